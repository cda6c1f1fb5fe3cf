"""What sums in slices cost one process with fixed numerics on a CPU: passes of a model in 4 slices against 1.

A Qwen3-MoE (by default 8 layers of width 256, 64 experts of width 128, 8 of them for a token) computes batches of
sequences of one token, which are what the layers of a decoding step see, one sequence of 256 tokens, and that with its
backward pass. Both numbers of slices take turns on the same weights and tokens; CPU time of one thread. Attention is
not what differs, so the contexts are short.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fdasync_trainer import fixed_numerics
from fdasync_trainer.verification.reference import library_model
from fdasync_transformers.weights.random_checkpoints import SIZES, VOCAB_SIZE, make_random_checkpoint

from benchmarks._report import Report

#: (sequences, tokens of each)
BATCHES = ((1, 1), (16, 1), (1, 256))


def seconds_of(model: Any, ids: torch.Tensor, *, backward: bool) -> float:
    """CPU seconds of a pass within whatever is open."""
    began = time.process_time()
    if backward:
        model(ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad()
    else:
        with torch.no_grad():
            model(ids, use_cache=False)
    return time.process_time() - began


def measure(report: Report, model: Any, name: str, runs: int, slices: int) -> None:
    """Figures of one dtype."""
    contexts = {count: fixed_numerics(model, sum_slices=count) for count in (1, slices)}
    generator = torch.Generator().manual_seed(0)
    cases = [(shape, False) for shape in BATCHES] + [(BATCHES[-1], True)]
    for shape, backward in cases:
        ids = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        found: dict[int, list[float]] = {count: [] for count in contexts}
        for run in range(runs + 1):
            for count, context in contexts.items():
                with context:
                    seconds = seconds_of(model, ids, backward=backward)
                if run:  # the first one warms up
                    found[count].append(seconds)
        case = f"{name}_{shape[0]}x{shape[1]}" + ("_backward" if backward else "")
        report.add(f"ms_{case}", [1e3 * seconds for seconds in found[1]])
        report.add(f"cost_{case}", [many / one for one, many in zip(*found.values(), strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", choices=sorted(SIZES), help="of the model (default medium)")
    parser.add_argument("--slices", type=int, default=4, help="against 1 (default 4)")
    parser.add_argument("--runs", type=int, default=7, help="of each case (default 7)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas (default: both)")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(f"sum_slices: CPU time of passes in {options.slices} slices over that in 1")
    with tempfile.TemporaryDirectory(prefix="fdasync-sum-slices-") as folder:
        make_random_checkpoint(Path(folder) / "model", size=options.size)
        for dtype in options.dtypes.split(","):
            model = library_model(Path(folder) / "model", getattr(torch, dtype), alone=True)
            measure(report, model, dtype, options.runs, options.slices)
    report.conditions |= {
        "size": options.size,
        "slices": options.slices,
        "versions": {one: version(one) for one in ("torch", "transformers")},
    }
    report.finish(options.json_path)


if __name__ == "__main__":
    main()
