"""Which blocks a sequence lacks that a store may have. Pure.

A sequence of a model that has KV alone lacks the blocks between its leading blocks here and the next block here. A
recurrent model goes on only from a snapshot. Stores keep snapshots at the multiples of `state_every_tokens` alone, in
the objects of the blocks that end there, so the number of leading blocks in a store tells what a sequence could go on
from. Such a sequence lacks the blocks up to the last of these multiples that are in no tier here, and the block that
ends there even if its KV is here, for its snapshot.

This module asks no store and plans no fetch: `store_planner.py` does, and `chains.py` asks which blocks carry a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence

# most keys of one lookup; a longer chain is asked about in parts
MAX_LOOKUP_KEYS = 4096


@dataclass(slots=True, eq=False)
class Gap:
    """Blocks that a sequence lacks.

    Attributes:
        start: leading blocks behind which it could go on without them.
        numbers: of the blocks, ascending; it could go on behind the last one.
        keys: their identities.
    """

    start: int
    numbers: list[int]
    keys: list[bytes]

    @property
    def num_saved(self) -> int:
        """Blocks that need not be computed with them."""
        return self.numbers[-1] + 1 - self.start if self.numbers else 0

    def leading(self, count: int) -> Gap:
        """The first `count` of them."""
        return Gap(self.start, self.numbers[:count], self.keys[:count])


class Gaps:
    """See the module."""

    def __init__(self, config: SchedulerConfig, index: PrefixIndex) -> None:
        self._index = index
        self._size = config.block_tokens
        # blocks from one stored snapshot to the next; 0: the model has KV alone
        self.every = config.state_every_tokens // config.block_tokens if config.recurrent else 0

    def carries_state(self, number: int) -> bool:
        """Whether the object of a sequence's block of this number has a snapshot."""
        return bool(self.every) and (number + 1) % self.every == 0

    def find(self, seq: Sequence) -> Gap:
        """The blocks that it lacks; none, if it is not worth asking, as far as the tiers here know."""
        limit = seq.hit_limit(self._size)
        if not self.every:
            first = next((at for at in range(limit) if self._is_missing(seq.keys[at])), limit)
            if first == seq.store.absent_at:
                return Gap(first, [], [])
            stop = min(limit, first + MAX_LOOKUP_KEYS)
            numbers = list(takewhile(lambda at: self._is_missing(seq.keys[at]), range(first, stop)))
            return Gap(first, numbers, seq.keys[first : first + len(numbers)])
        start = 0
        for at in range(limit):
            block = self._index.get(seq.keys[at])
            if block is None:
                break
            if block.snapshot is not None:
                start = at + 1
        if seq.store.absent_at >= 0:
            limit = min(limit, seq.store.absent_at)
        stop = min(limit, start + MAX_LOOKUP_KEYS) // self.every * self.every
        numbers = [at for at in range(start, stop) if at + 1 == stop or self._is_missing(seq.keys[at])]
        return Gap(start, numbers, [seq.keys[at] for at in numbers])

    def still(self, gap: Gap, count: int) -> Gap:
        """What is lacking yet of the first `count` blocks of a gap that was found before; nothing, if a sequence could
        not go on with it."""
        gap = self.whole(gap.leading(count))
        if not self.every:
            known = next((at for at, key in enumerate(gap.keys) if self._is_missing(key)), len(gap.keys))
            rest = list(takewhile(self._is_missing, gap.keys[known:]))
            return Gap(gap.start + known, gap.numbers[known : known + len(rest)], rest)
        last = gap.numbers[-1] if gap.numbers else -1
        both = zip(gap.numbers, gap.keys, strict=True)
        left = [(at, key) for at, key in both if self._lacks(key, with_state=at == last)]
        return Gap(gap.start, [at for at, _ in left], [key for _, key in left])

    def whole(self, gap: Gap) -> Gap:
        """The leading blocks of a gap up to the last one behind which a sequence can go on."""
        if not self.every:
            return gap
        ends = [place for place, number in enumerate(gap.numbers) if self.carries_state(number)]
        return gap.leading(ends[-1] + 1 if ends else 0)

    def least(self, gap: Gap) -> int:
        """How many of its leading blocks are of use at least."""
        return next((place + 1 for place, at in enumerate(gap.numbers) if not self.every or self.carries_state(at)), 0)

    def _is_missing(self, key: bytes) -> bool:
        return self._index.get(key) is None

    def _lacks(self, key: bytes, *, with_state: bool) -> bool:
        block = self._index.get(key)
        return block is None or (with_state and block.snapshot is None)
