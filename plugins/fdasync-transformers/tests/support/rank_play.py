"""What a group plays in tests: prompts in chunks beside decodes, and what every step gave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranks import as_ranks, returned
from step_driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fdasync.ipc.exchange import Exchange
    from fdasync.runner.base import Capacity

CONFIG = {"dtype": "float64", "experts": "eager", "num_threads": 1}
PROMPTS = ((5, 9, 200, 31, 7, 3, 2, 1, 99, 100, 101), (7, 8, 9), tuple(range(20)))


@dataclass
class Played:
    """One rank's view.

    Attributes:
        tokens: of each sequence.
        rows: of each sequence, at rank 0 of a model with routing; else empty.
        raw: log-probs of the tokens.
        logits: of each step.
        capacity: of the runner.
    """

    tokens: list[list[int]]
    # not shown: asyncio writes out a task's result as its loop ends, which for tensors takes longer than a step
    rows: list[Any] = field(repr=False)
    raw: list[list[float]] = field(repr=False)
    logits: list[torch.Tensor] = field(repr=False)
    capacity: Capacity


def play(folder: Path, ranks: int = 1, **options: Any) -> list[Played]:
    """What each of the ranks saw; of one rank in this process alone. Raises what a rank raised."""
    if ranks == 1:
        return [play_one(folder, None, **options)]
    return returned(as_ranks(ranks, lambda exchange: play_one(folder, exchange, **options)))


def play_one(folder: Path, exchange: Exchange | None, config: dict[str, Any] | None = None, **limits: Any) -> Played:
    return asyncio.run(_play(folder, exchange, {**CONFIG, **(config or {})}, limits))


async def _play(folder: Path, exchange: Exchange | None, config: dict[str, Any], limits: dict[str, Any]) -> Played:
    driver = await Driver.open(folder, config=config, exchange=exchange, **limits)
    logits: list[torch.Tensor] = []
    try:
        model: Any = driver.runner.opened.model.step_model
        forward = model.forward

        def watched(*args: Any) -> Any:
            passed = forward(*args)
            logits.append(passed.logits.clone())
            return passed

        model.forward = watched
        sequences = [driver.sequence(list(prompt), 8 - at, arrival=at, raw=True) for at, prompt in enumerate(PROMPTS)]
        await driver.run(sequences, chunks=3)
        rows = [driver.rows(sequence) for sequence in sequences] if driver.arena is not None else []
        tokens, raw = [sequence.tokens for sequence in sequences], [sequence.raw for sequence in sequences]
        return Played(tokens, rows, raw, logits, driver.capacity)
    finally:
        await driver.close()
