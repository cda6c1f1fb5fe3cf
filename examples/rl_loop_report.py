"""The output of `rl_loop.py`: a table that grows while it runs, two tables at the end, and a picture."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_trainer.rows.mismatch import Mismatch, table
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path


class StepFigures(msgspec.Struct, frozen=True):
    """The figures of one step.

    Attributes:
        reward: mean over its samples.
        fresh: rollout against trainer before the update, over the samples that ran under the trainer's weights alone.
        other_bits: tokens of these samples whose two log-probs differ in a bit; their importance ratio is not 1.
        crossed: samples that were running when an update came, and went on under the new weights.
        stale: tokens that were sampled under older weights than the trainer's.
        clipped: share of tokens whose ratio the clip cut off.
        left_out: samples that a deadline or an abort cut short; not trained on, in no other figure.
        replayed: tokens, prompts included, that had the rollout's experts in the trainer's passes.
        rollout_s, train_s: seconds that the step waited for samples, and that its update took.
    """

    reward: float
    fresh: Mismatch
    other_bits: int
    crossed: int
    stale: int
    clipped: float
    left_out: int
    replayed: int
    rollout_s: float
    train_s: float


COLUMNS = (
    "step", "reward", "K3 KL", "ratio > 2", "other bits", "crossed", "stale tokens", "clipped", "left out", "replayed",
    "rollout", "update",
)  # fmt: skip


def steps_table(name: str, done: list[StepFigures], last: int = 12) -> Table:
    drawn = Table(title=f"{name}: the latest steps")
    for column in COLUMNS:
        drawn.add_column(column, justify="right")
    for number, one in list(enumerate(done, 1))[-last:]:
        drawn.add_row(*cells(number, one))
    return drawn


def plain_row(row: tuple[str, ...]) -> str:
    """A row where there is no terminal; the first one is `COLUMNS`."""
    return "  ".join(cell.rjust(max(len(column), 8)) for cell, column in zip(row, COLUMNS, strict=True))


def cells(number: int, one: StepFigures) -> tuple[str, ...]:
    extreme = f"{one.fresh.extreme_share:.2%}"
    bits = f"{one.other_bits / max(one.fresh.tokens, 1):.1%}"
    seconds = (f"{one.rollout_s:.1f} s", f"{one.train_s:.1f} s")
    counts = (str(one.crossed), str(one.stale), f"{one.clipped:.2%}", str(one.left_out), str(one.replayed))
    return (str(number), f"{one.reward:.3f}", f"{one.fresh.k3:.2e}", extreme, bits, *counts, *seconds)


def draw(runs: dict[str, list[StepFigures]], path: Path) -> None:
    """Two panels, reward and KL by step; the folder of `path` is made."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, done in runs.items():
        steps = range(1, len(done) + 1)
        rewards = [one.reward for one in done]
        smooth = [float(np.mean(rewards[max(0, at - 4) : at + 1])) for at in range(len(rewards))]
        (line,) = left.plot(steps, smooth, label=name)
        left.plot(steps, rewards, color=line.get_color(), alpha=0.25)
        right.plot(steps, [one.fresh.k3 for one in done], label=name)
    # a KL of 0 has no place on a logarithmic axis
    positive = all(one.fresh.k3 > 0 for done in runs.values() for one in done)
    left.set(title="reward (mean of 5 steps)", xlabel="step", ylim=(0, 1))
    right.set(title="K3 KL of rollout and trainer", xlabel="step", yscale="log" if positive else "linear")
    left.legend()
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def summary(runs: dict[str, list[StepFigures]]) -> str:
    """Two tables: rewards, and how far the trainer was from the rollout."""
    console = Console(width=120, color_system=None)
    drawn = Table(title="reinforcement learning")
    counted = ("crossed an update", "stale tokens", "left out", "replayed tokens")
    for column in ("", "first fifth", "last fifth", *counted, "rollout", "update"):
        drawn.add_column(column, justify="right" if column else "left")
    for name, done in runs.items():
        fifth = max(len(done) // 5, 1)
        first, last = (f"{np.mean([one.reward for one in part]):.3f}" for part in (done[:fifth], done[-fifth:]))
        crossed, stale = sum(one.crossed for one in done), sum(one.stale for one in done)
        seconds = (f"{sum(one.rollout_s for one in done):.0f} s", f"{sum(one.train_s for one in done):.0f} s")
        left_out, replayed = sum(one.left_out for one in done), sum(one.replayed for one in done)
        drawn.add_row(name, first, last, f"{crossed} samples", f"{stale}", f"{left_out}", f"{replayed}", *seconds)
    with console.capture() as capture:
        console.print(drawn)
    merged = {name: reduce(Mismatch.merge, [one.fresh for one in done]) for name, done in runs.items()}
    return capture.get() + table(merged)


def verdict(runs: dict[str, list[StepFigures]]) -> str:
    """Whether the trainer had the rollout's bits wherever no update came between. Raises SystemExit if it had not."""
    lines = []
    for name, done in runs.items():
        tokens, other = sum(one.fresh.tokens for one in done), sum(one.other_bits for one in done)
        if other:
            raise SystemExit(f"{name}: {other} of {tokens:,} log-probs have other bits than the rollout's")
        lines.append(f"{name}: {tokens:,} tokens of samples that crossed no update: KL 0, every importance ratio 1")
    return "\n".join(lines)
