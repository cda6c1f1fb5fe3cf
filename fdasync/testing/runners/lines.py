"""Sequences of a bench with what was sampled for them, and the steps that decode several together.

Compares nothing. Used by `open_blocks.py` and `numerics.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fdasync.events.actions import Chunk

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from fdasync.events.actions import SeqStart
    from fdasync.runner.base import StepOutput
    from fdasync.testing.runners.bench import Bench


@dataclass
class Line:
    """One sequence of a bench.

    Attributes:
        start: how it joins.
        blocks: its block table.
        tokens, raw, processed, best: what was sampled for it, and the log-probs.
        length: tokens so far.
    """

    start: SeqStart
    blocks: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    best: list[tuple[float, ...]] = field(default_factory=list)
    length: int = 0

    def take(self, output: StepOutput, row: int) -> None:
        self.tokens.append(output.tokens[row])
        if output.raw is not None and output.processed is not None:
            self.raw.append(output.raw[row])
            self.processed.append(output.processed[row])
        best = None if output.top is None else output.top[row]
        self.best.append(() if best is None else best.logprobs)


class Play:
    """Sequences that are decoded together, with up to `depth` steps in flight.

    `lines`: the lines that decode already, in the order in which they joined.
    """

    def __init__(self, on: Bench, depth: int, lines: Sequence[Line] = ()) -> None:
        self._on = on
        self._depth = depth
        self._lines = list(lines)
        self._flights: deque[tuple[asyncio.Future[StepOutput], list[Line]]] = deque()

    async def step(self, *joining: Line) -> None:
        """Launch a step, if there is a sequence; wait until there is room for another step in flight."""
        on, size = self._on, self._on.size
        if not self._lines and not joining:
            return
        due = [line for line in self._lines if line.length % size == 0]
        appends = [on.append(line.start.key, line.blocks[line.length // size]) for line in due]
        for line in self._lines:
            line.length += 1
        chunks = []
        for line in joining:
            line.length = len(line.start.tokens) // 4
            chunks.append(Chunk(line.start.key, line.length - line.start.num_cached, True))
        starts = [line.start for line in joining]
        self._lines += joining
        self._flights.append((on.launch(starts=starts, appends=appends, chunks=chunks), list(self._lines)))
        while len(self._flights) >= self._depth:
            await self._land()

    async def end(self) -> None:
        """Wait for all; the sequences leave."""
        while self._flights:
            await self._land()
        await self._on.leave(*[line.start.key for line in self._lines])

    async def _land(self) -> None:
        future, lines = self._flights.popleft()
        output = await future
        for row, line in enumerate(lines):
            line.take(output, row)
