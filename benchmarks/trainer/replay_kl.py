"""How far a trainer is from the rollout with replay off and on, and how far it is from itself.

A small mixture-of-experts language model is trained (`replay_model.py`), sampled by the engine in bfloat16, and the
log-probs of the sampled tokens are computed again by the library's own model in bfloat16 (`replay_sides.py`):

    kl_off     padded batches of 16, live routers, against the rollout
    kl_on      the same batches within `replay_routing` (aim: kl_self)
    kl_self    live routers: one sequence at a time against batches of 16, the trainer alone, no engine
    kl_ratio   kl_on over kl_off (aim: 0.5)

The two sides differ in attention (paged, gathered block by block, one query at a time against a whole causal pass),
in how many tokens each product is of, hence its kernel and order of sums, and in where prefill was cut. Both take the
log-softmax of bfloat16 logits in float32. Twice, as a trainer's experts are seldom computed by the rollout's kernels:
with the library's default experts (the runner's too), and (`_eager`) with its other ones, which go expert by expert
and add in bfloat16.

KL is the K3 estimate of `fdasync_trainer.rows.mismatch`, in nats for each sampled token. Intervals come from 2,000
bootstrap draws over sequences, and stand in the conditions as `NAME_interval95`. With replay on, the computed experts
are compared with the rollout's at every position, and a single difference voids the run.

`--numerics fixed`: both sides compute with fixed numerics, and one log-prob of other bits voids the run: the KL of all
arms is 0. `cost_of_fixed` is the time of the trainer's batches over that of the library's own, with the same experts on
a CPU, and with the library's default ones on a GPU.

Published for Qwen3-30B-A3B (arXiv 2510.11370):
1.535e-3 off, 7.5e-4 on, 8.4e-4 the trainer alone.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import uvloop
from fdasync_trainer.rows.mismatch import mismatch
from fdasync_transformers.weights.quiet import no_progress_bars

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from benchmarks.trainer.replay_model import SHAPES, STEPS, corpus, trained
from benchmarks.trainer.replay_sides import Pass, Sampled, Trainer, asks, rollout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

BATCH = 16
_RATIO_AIM = 0.5
_DRAWS = 2000


class Arm:
    """KL between two sets of log-probs, and of bootstrap draws over their sequences."""

    def __init__(self, ones: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> None:
        each = [mismatch(one, other) for one, other in zip(ones, others, strict=True)]
        sums = np.array([one.k3 * one.tokens for one in each])
        tokens = np.array([one.tokens for one in each])
        self.kl = float(sums.sum() / tokens.sum())
        # the same draws for all arms
        drawn = np.random.default_rng(0).integers(0, len(each), (_DRAWS, len(each)))
        self.draws: NDArray[np.float64] = sums[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)


def compare(report: Report, suffix: str, sequences: Sequence[Sampled], passes: dict[str, Pass]) -> None:
    """Figures of the arms under their names, `suffix` behind them."""
    played = [one.logprobs for one in sequences]
    off, on = Arm(played, passes["off"].logprobs), Arm(played, passes["on"].logprobs)
    itself = Arm(passes["self"].logprobs, passes["off"].logprobs)
    for name, arm, aim in (("off", off, None), ("on", on, itself.kl), ("self", itself, None)):
        _add(report, f"kl_{name}{suffix}", arm.kl, arm.draws, aim)
    if off.kl:
        _add(report, f"kl_ratio{suffix}", on.kl / off.kl, on.draws / off.draws, _RATIO_AIM)


def _add(report: Report, name: str, value: float, draws: NDArray[np.float64], aim: float | None) -> None:
    report.add(name, [value], aim=aim)
    report.conditions[f"{name}_interval95"] = [float(f"{end:.4g}") for end in np.percentile(draws, (2.5, 97.5))]


def check_replay(sequences: Sequence[Sampled], on: Pass) -> int:
    """How many positions computed the rollout's rows with replay. Raises SystemExit unless all did but the last."""
    rows = mismatch([0.0], [0.0], rollout_routing=[one.routing for one in sequences], trainer_routing=on.routing)
    if rows.differing_rows or on.live != len(sequences) or rows.rows != on.real - on.live:
        problem = f"{rows.differing_rows} of {rows.rows} positions computed other experts, {on.live} had no row"
        raise SystemExit(f"replay is broken: {problem} ({len(sequences)} sequences)")
    return rows.rows


def prove(report: Report, sequences: Sequence[Sampled], passes: dict[str, Pass]) -> None:
    """Count log-probs of other bits than the rollout's. Raises SystemExit where there is one."""
    for name, one in passes.items():
        differing = sum(
            int((ours.logprobs.view(np.int32) != theirs.view(np.int32)).sum())
            for ours, theirs in zip(sequences, one.logprobs, strict=True)
        )
        report.add(f"differing_logprobs_{name}", [differing], aim=0)
        if differing:
            raise SystemExit(f"{name}: {differing} log-probs of {len(sequences)} sequences have other bits")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=at_least_one, default=20_000, help="sampled tokens, at least")
    parser.add_argument("--steps", type=at_least_one, default=STEPS, help="training steps of the model")
    parser.add_argument("--numerics", choices=("default", "fixed"), default="default", help="of both sides")
    parser.add_argument("--size", choices=tuple(SHAPES), default="small", help='"large" needs a GPU to be trained')
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")
    options = parser.parse_args()
    fixed = options.numerics == "fixed"
    # an engine's worker does the same with its own: more slow it down
    torch.set_num_threads(1)
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {line}", flush=True)

    device = torch.device(options.device)
    title = "replay_kl: a rollout, and a trainer that computes its log-probs again"
    report = Report(title, gpus=int(device.type == "cuda"))
    with no_progress_bars(), tempfile.TemporaryDirectory(prefix="fdasync-replay-kl-") as name:
        folder = Path(name) / "model"
        report.conditions["model"] = trained(folder, options.steps, device, say, options.size)
        prompts = asks(corpus()[1], options.tokens)
        sequences, facts = uvloop.run(rollout(folder, prompts, options.device, options.numerics))
        report.conditions["rollout"] = facts
        sampled = sum(len(one.logprobs) for one in sequences)
        say(f"{sampled:,} tokens sampled, {facts['preemptions']} preemptions, {facts['cached_tokens']} cached tokens")
        for suffix, experts in (("", None),) if fixed else (("", None), ("_eager", "eager")):
            trainer = Trainer(folder, device, experts, fixed=fixed)
            # the first pass compiles and warms up
            trainer.recompute(sequences[:BATCH], BATCH)
            passes = {
                "off": trainer.recompute(sequences, BATCH),
                "on": trainer.recompute(sequences, BATCH, replay=True),
                "self": trainer.recompute(sequences, 1),
            }
            say(f"{trainer.experts} experts: batches off and on, one sequence at a time")
            report.conditions[f"replayed_positions{suffix}"] = check_replay(sequences, passes["on"])
            report.conditions[f"experts{suffix}"] = trainer.experts
            compare(report, suffix, sequences, passes)
            if fixed:
                prove(report, sequences, passes)
                plain = Trainer(folder, device, trainer.experts if device.type == "cpu" else None)
                plain.recompute(sequences[:BATCH], BATCH)
                report.add("cost_of_fixed", [passes["off"].seconds / plain.recompute(sequences, BATCH).seconds])
    report.conditions |= {"tokens": sampled, "sequences": len(sequences), "numerics": options.numerics}
    report.finish(options.json_path)
