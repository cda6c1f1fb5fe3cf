"""Zeroes what blocks hold behind the tokens of a sequence that starts in the midst of one.

Another instance computed the first tokens of such a block, and it was copied whole, with any bits behind them. Torch's
attention reads whole blocks, and masks what is behind: a NaN there would reach its sums. (A block that a step begins to
fill is zeroed by the model's pass itself.) Called as parts are (`step_part.py`), where no kernel attends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart

if TYPE_CHECKING:
    from fdasync_transformers.execution.parts.step_part import StepWork
    from fdasync_transformers.model.kv import KVPool

# blocks and the first tokens behind what they hold
Tails = tuple[tuple[int, int], ...]


class CleanBlocks(StepPart[Tails]):
    """See the module."""

    name = "clean"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def plan(self, work: StepWork) -> PartWork[Tails] | None:
        tails = []
        for start in work.step.starts:
            column, offset = divmod(start.num_cached, self._pool.block_tokens)
            if offset:
                tails.append((start.blocks[column], offset))
        return PartWork(self, tuple(tails)) if tails else None

    def before(self, work: StepWork, own: PartWork[Tails]) -> None:
        for block, offset in own.plan:
            self._pool.clear_past(block, offset)
