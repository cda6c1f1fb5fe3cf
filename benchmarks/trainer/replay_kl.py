"""How far a trainer is from the rollout with replay off and on, and how far it is from itself.

A small mixture-of-experts language model is trained (`replay_model.py`), sampled by the engine in bfloat16, and the
log-probs of the sampled tokens are computed again by the library's own model in bfloat16 (`replay_sides.py`):

    off          padded batches of 16, live routers
    on           the same batches within `replay_routing`
    self         live routers: batches of 16 against one sequence at a time, the trainer alone, no engine
    self_decode  as self, against one position at a time with the library's own KV cache; of 64 sequences

The two sides differ in attention (paged, gathered block by block, one query at a time against a whole causal pass),
in how many tokens each product is of, hence its kernel and order of sums, and in where prefill was cut. Both take the
log-softmax of bfloat16 logits in float32. Twice, as a trainer's experts are seldom computed by the rollout's kernels:
with the library's default experts (the runner's too), and (`_eager`) with its other ones, which go expert by expert
and add in bfloat16.

KL is the K3 estimate of `fdasync_trainer.rows.mismatch`, in nats for each sampled token. `differing_tokens` and
`differing_picks` count positions that tokens were sampled from. Intervals come from 2,000 bootstrap draws over
sequences, and stand in the conditions as `NAME_interval95`. With replay on, the computed experts are compared with the
rollout's at every position, and a single difference voids the run.

`--numerics fixed`: both sides compute with fixed numerics, and one log-prob of other bits voids the run: the KL of all
arms is 0. `cost_of_fixed` is the time of the trainer's batches over that of the library's own, with the same experts on
a CPU, and with the library's default ones on a GPU.

Published for Qwen3-30B-A3B (arXiv 2510.11370):
1.535e-3 off, 7.5e-4 on, 8.4e-4 the trainer alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import uvloop
from fdasync_trainer.rows.mismatch import Mismatch, mismatch, table
from fdasync_transformers.weights.quiet import no_progress_bars

from benchmarks.lib.report import Report
from benchmarks.trainer.replay_model import SHAPES, STEPS, corpus, trained
from benchmarks.trainer.replay_sides import GROUP, Pass, Sampled, Trainer, asks, rollout, sampled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BATCH = 16
DECODED = 64
_RATIO_AIM = 0.5
_DRAWS = 2000


class Figures(Report):
    """A report of small figures: four digits of each instead of four decimals."""

    def put(
        self, name: str, value: float, interval: tuple[float, float] | None = None, aim: float | None = None
    ) -> None:
        self.figures[name] = _short(value)
        if interval is not None:
            self.conditions[f"{name}_interval95"] = [_short(end) for end in interval]
        if aim is not None:
            self._aims[name] = _short(aim)


class Arm:
    """A comparison of two sets of log-probs: its figures, and its KL sequence by sequence."""

    def __init__(self, sequences: Sequence[Sampled], ones: Pass, others: Pass) -> None:
        pairs = list(zip(ones.logprobs, others.logprobs, strict=True))
        self.all: Mismatch = mismatch(
            ones.logprobs,
            others.logprobs,
            rollout_routing=list(sampled_rows(sequences, ones.routing)),
            trainer_routing=list(sampled_rows(sequences, others.routing)),
        )
        each = [mismatch(one, other) for one, other in pairs]
        self.sums = np.array([one.k3 * one.tokens for one in each])
        self.tokens = np.array([one.tokens for one in each])
        difference = np.concatenate([other.astype(np.float64) - one for one, other in pairs])
        terms = np.expm1(difference) - difference
        self.largest_share = float(terms.max() / max(terms.sum(), 1e-300))
        self.equal_share = float((difference == 0).mean())

    def draws(self, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """KL of each bootstrap draw."""
        kl: NDArray[np.float64] = self.sums[drawn].sum(axis=1) / self.tokens[drawn].sum(axis=1)
        return kl


def compare(
    report: Figures, suffix: str, sequences: Sequence[Sampled], played: Pass, passes: dict[str, Pass]
) -> dict[str, Arm]:
    """Figures of the arms under their names, `suffix` behind them."""
    arms = {name: Arm(sequences, played, passes[name]) for name in ("off", "on")}
    for name in ("self", "self_decode"):
        if name in passes:
            # an arm with a part of the sequences is compared with the same part of the others
            count = len(passes[name].logprobs)
            arms[name] = Arm(sequences[:count], passes[name], passes["off"].part(count))
    kl_self = arms["self"].all.k3
    for name, arm in arms.items():
        aim = kl_self if name == "on" else None
        report.put(f"kl_{name}{suffix}", arm.all.k3, _interval(arm.draws(_drawn(len(arm.sums)))), aim)
    # the same draws for both
    drawn = _drawn(len(sequences))
    ratio = arms["on"].draws(drawn) / arms["off"].draws(drawn)
    report.put(f"kl_ratio{suffix}", arms["on"].all.k3 / arms["off"].all.k3, _interval(ratio), _RATIO_AIM)
    for name, arm in arms.items():
        report.put(f"extreme_{name}{suffix}", arm.all.extreme_share)
    for name, arm in arms.items():
        report.put(f"differing_tokens_{name}{suffix}", arm.all.differing_tokens_share or 0.0)
        report.put(f"differing_picks_{name}{suffix}", arm.all.differing_picks_share or 0.0)
        # how much one token weighs, and how many are equal to the last bit
        report.conditions[f"{name}{suffix}"] = {
            "largest_token_share_of_kl": _short(arm.largest_share),
            "equal_logprobs_share": _short(arm.equal_share),
            "extreme_tokens": arm.all.extreme_tokens,
        }
    return arms


def check_replay(sequences: Sequence[Sampled], on: Pass) -> dict[str, float]:
    """Raise SystemExit unless the experts computed with replay are the rollout's rows."""
    rows = mismatch([0.0], [0.0], rollout_routing=[one.routing for one in sequences], trainer_routing=on.routing)
    if rows.differing_rows or on.live != len(sequences) or rows.rows != on.real - on.live:
        problem = f"{rows.differing_rows} of {rows.rows} positions computed other experts, {on.live} had no row"
        raise SystemExit(f"replay is broken: {problem} ({len(sequences)} sequences)")
    counts = f"{on.live} of {on.real:,} tokens had no row: the last of each sequence"
    print(f"with replay: {rows.rows:,} positions compared, 0 differ; {counts}", flush=True)
    return {"positions": rows.rows, "differing": rows.differing_rows, "share_without_row": _short(on.live / on.real)}


def prove(report: Figures, sequences: Sequence[Sampled], played: Pass, passes: dict[str, Pass]) -> dict[str, Arm]:
    """Figures of passes that must have the rollout's bits. Raises SystemExit where one log-prob or pick differs."""
    arms = {name: Arm(sequences, played, one) for name, one in passes.items()}
    for name, arm in arms.items():
        differing = sum(
            int((one.view(np.int32) != other.view(np.int32)).sum())
            for one, other in zip(played.logprobs, passes[name].logprobs, strict=True)
        )
        report.put(f"kl_{name}", arm.all.k3, aim=0.0)
        report.put(f"differing_logprobs_{name}", differing, aim=0)
        report.put(f"differing_picks_{name}", arm.all.differing_picks_share or 0.0, aim=0.0)
        if differing or arm.all.differing_picks_share:
            raise SystemExit(f"{name}: {differing} log-probs of {len(sequences)} sequences have other bits")
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="sampled tokens, at least (default 20000)")
    parser.add_argument("--quick", action="store_true", help="2,000 tokens of a model trained for 60 steps")
    parser.add_argument("--steps", type=int, help=f"training steps of the model (default {STEPS})")
    parser.add_argument("--numerics", choices=("default", "fixed"), default="default", help="of both sides")
    parser.add_argument("--size", choices=tuple(SHAPES), default="small", help='"large" needs a GPU to be trained')
    parser.add_argument("--folder", type=Path, help="keep the trained model here, or take it from here")
    parser.add_argument("--device", default="cpu", help='of both sides: "cpu" (default) or "cuda"')
    parser.add_argument("--threads", type=int, default=1, help="of torch on each side (default 1: others slow it down)")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    tokens = options.tokens or (2_000 if options.quick else 20_000)
    steps = options.steps or (60 if options.quick else STEPS)
    # an engine's worker does the same with its own
    torch.set_num_threads(options.threads)
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {line}", flush=True)

    report = Figures("replay_kl: a rollout, and a trainer that computes its log-probs again")
    device = torch.device(options.device)
    with no_progress_bars(), tempfile.TemporaryDirectory(prefix="fdasync-replay-kl-") as name:
        folder = options.folder or Path(name) / "model"
        report.conditions["model"] = trained(folder, steps, device, say, options.size)
        prompts = asks(corpus()[1], tokens)
        sequences, facts = uvloop.run(rollout(folder, prompts, options.device, options.threads, say, options.numerics))
        report.conditions["rollout"] = facts
        sampled = sum(len(one.logprobs) for one in sequences)
        say(f"{sampled:,} tokens sampled, {facts['preemptions']} preemptions, {facts['cached_tokens']} cached tokens")
        played = Pass([one.logprobs for one in sequences], [one.routing for one in sequences])
        arms: dict[str, Arm] = {}
        if options.numerics == "fixed":
            trainer = Trainer(folder, device, fixed=True)
            # the first pass compiles and warms up, on both sides
            trainer.recompute(sequences[:BATCH], BATCH)
            passes = {
                "off": trainer.recompute(sequences, BATCH),
                "on": trainer.recompute(sequences, BATCH, replay=True),
                "self": trainer.recompute(sequences, 1),
            }
            report.conditions["replay"] = check_replay(sequences, passes["on"])
            arms = prove(report, sequences, played, passes)
            plain = Trainer(folder, device, trainer.experts if device.type == "cpu" else None)
            plain.recompute(sequences[:BATCH], BATCH)
            report.put("cost_of_fixed", passes["off"].seconds / plain.recompute(sequences, BATCH).seconds)
        for suffix, experts in (("", None), ("_eager", "eager")) if options.numerics == "default" else ():
            trainer = Trainer(folder, device, experts)
            passes = {
                "off": trainer.recompute(sequences, BATCH),
                "on": trainer.recompute(sequences, BATCH, replay=True),
            }
            passes["self"] = trainer.recompute(sequences, 1)
            say(f"{trainer.experts} experts: batches off and on, one sequence at a time")
            report.conditions[f"replay{suffix}"] = check_replay(sequences, passes["on"])
            report.conditions[f"trainer{suffix}"] = {
                "experts": trainer.experts,
                "attention": str(trainer.model.config._attn_implementation),
                "seconds": {name: round(one.seconds, 1) for name, one in passes.items()},
            }
            if not suffix:
                passes["self_decode"] = trainer.decode(sequences[:DECODED])
                say("one position at a time")
            found = compare(report, suffix, sequences, played, passes)
            arms |= {f"{name}{suffix}": arm for name, arm in found.items()}
    report.conditions |= {
        "tokens": sampled,
        "sequences": len(sequences),
        "prompts": len(prompts),
        "samples_of_a_prompt": GROUP,
        "mean_logprob": _short(float(np.concatenate(played.logprobs).mean())),
        "dtype": "bfloat16",
        "numerics": options.numerics,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": options.threads,
        "versions": {one: version(one) for one in ("torch", "transformers", "numpy")},
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(table({name: arm.all for name, arm in arms.items()}))
    report.finish(options.json_path)


def _drawn(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (_DRAWS, count))


def _interval(draws: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
