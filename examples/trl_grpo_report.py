"""The output of `trl_grpo.py`: a line for each step, a summary, and a file of figures."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_trainer.rows.mismatch import Mismatch, table

if TYPE_CHECKING:
    from pathlib import Path


class StepFigures(msgspec.Struct, frozen=True):
    """The figures of one step.

    Attributes:
        reward, clipped: mean over its samples, and share of tokens whose ratio the clip cut off, as TRL logs them.
        replayed, live: rollout against trainer before the update, with the rollout's experts and with its own.
        other_bits: tokens whose two log-probs in the loss differ in a bit.
        replayed_tokens: tokens, prompts included, that had the rollout's experts in the loss.
        rollout_s, step_s: seconds that TRL waited for samples, and of the whole step.
    """

    reward: float
    clipped: float
    replayed: Mismatch
    live: Mismatch
    other_bits: int
    replayed_tokens: int
    rollout_s: float
    step_s: float


def line(number: int, one: StepFigures) -> str:
    """What is printed of a step."""
    seconds = f"{one.step_s:.1f} s, {one.rollout_s:.1f} s of them for samples"
    kl = f"K3 KL {one.replayed.k3:.2e} with the rollout's experts, {one.live.k3:.2e} without"
    return f"step {number}: reward {one.reward:.3f}, {kl}; {seconds}"


def summary(done: list[StepFigures]) -> str:
    """Rewards, and how far the trainer was from the rollout on the same samples."""
    fifth = max(len(done) // 5, 1)
    first, last = (float(np.mean([one.reward for one in part])) for part in (done[:fifth], done[-fifth:]))
    arms = {"replay on": [one.replayed for one in done], "replay off": [one.live for one in done]}
    merged = {name: reduce(Mismatch.merge, ones) for name, ones in arms.items()}
    return f"reward {first:.3f} in the first fifth, {last:.3f} in the last\n" + table(merged)


def write(path: Path, settings: dict[str, Any], done: list[StepFigures]) -> None:
    """JSON: the settings, and `figures`, one object for each step. The folder of `path` is made."""
    steps = []
    for one in done:
        figures = msgspec.structs.asdict(one)
        replayed, live = figures.pop("replayed"), figures.pop("live")
        steps.append({**figures, "tokens": live.tokens, "kl_replayed": replayed.k3, "kl_live": live.k3})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode({**settings, "figures": steps})) + b"\n")
