"""Whether a trainer has a rollout's bits, family by family: `fdasync verify-trainer` on a tiny checkpoint of each.

Each rollout has prefix hits, chunks of odd sizes, preemption, two steps in flight, an update in the middle, and a
prefill and a decode instance; the trainer computes its log-probs in padded batches. One log-prob of other bits, or one
that is missing or no number, fails the run. On a GPU steps run from graphs. Knows no engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from benchmarks.lib.arguments import at_least_one, names_of, parser_of
from benchmarks.lib.report import Report

if TYPE_CHECKING:
    import argparse

#: dense and sparse, with windows, chunks, sinks, latents, shared experts, groups, sigmoids and identity experts
FAMILIES = (
    "qwen3_moe",
    "qwen3_moe_swa",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "llama4_text",
    "phimoe",
    "granitemoe",
    "longcat_flash",
)
#: what is told of each family's run
KEPT = ("tokens", "preemptions", "hit_tokens", "steps", "moved_blocks", "crossed_tokens", "not_covered")
_LIMIT_S = 3600


def verified(family: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON of `fdasync verify-trainer` for a fresh checkpoint. Raises SystemExit where it could not run."""
    make_tiny_checkpoint(folder, family)
    command = [sys.executable, "-m", "fdasync", "verify-trainer", "--model", str(folder), "--json"]
    command += ["--tokens", str(options.tokens), "--dtype", options.dtype, "--device", options.device]
    command += ["--num-threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{family}: verify-trainer ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--families", type=names_of(FAMILIES), default=set(FAMILIES))
    parser.add_argument("--tokens", type=at_least_one, default=20_000, help="sampled tokens of each, at least")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")
    options = parser.parse_args()
    title = "same_bits: log-probs of a rollout, and of a trainer with fixed numerics"
    report = Report(title, gpus=int(options.device == "cuda"))
    tokens = differing = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fdasync-same-bits-") as name:
        for family in [name for name in FAMILIES if name in options.families]:
            began = time.perf_counter()
            found = verified(family, Path(name) / family, options)
            tokens += found["tokens"]
            differing += found["differing"]
            wrong += [] if found["ok"] else [family]
            report.add(f"differing_{family}", [found["differing"]], aim=0)
            report.conditions[family] = {one: found[one] for one in KEPT}
            report.conditions[family]["seconds"] = round(time.perf_counter() - began, 1)
    report.add("tokens", [tokens])
    report.add("differing", [differing], aim=0)
    report.conditions["dtype"] = options.dtype
    report.finish(options.json_path)
    if wrong:
        raise SystemExit(
            f"{', '.join(wrong)}: {differing} of {tokens:,} log-probs have other bits, or some are missing"
        )
