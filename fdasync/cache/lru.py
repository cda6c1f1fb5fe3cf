"""Blocks in the order of their last use, which they keep while they come and go. Pure.

What a transfer touched returns to its old place: being copied or written is no use. Members are few operations each:
a heap by last use with entries that may be stale, beside a dict that says who is in. Used by `prefix.py`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.cache.blocks import Block

_SLACK = 64


class Lru:
    """See the module. A member's `used` does not change while it is in."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: dict[Block, None] = {}
        # (last use, a number that tells blocks apart, block)
        self._heap: list[tuple[int, int, Block]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, block: Block) -> bool:
        return block in self._members

    def __iter__(self) -> Iterator[Block]:
        """Used longest ago first."""
        return iter(sorted(self._members, key=lambda block: block.used))

    def add(self, block: Block) -> None:
        self._members[block] = None
        heapq.heappush(self._heap, (block.used, id(block), block))
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [(member.used, id(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        self._members.pop(block, None)

    def oldest(self) -> Block:
        """The member used longest ago. There must be one."""
        heap = self._heap
        while heap[0][2] not in self._members or heap[0][0] != heap[0][2].used:
            heapq.heappop(heap)
        return heap[0][2]

    def first(self, count: int) -> list[Block]:
        """The members used longest ago, in that order."""
        heap, members = self._heap, self._members
        found: dict[Block, tuple[int, int, Block]] = {}
        # as many steps as are wanted, not as there are members: the engine's loop waits for this
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            block = entry[2]
            if block in members and entry[0] == block.used:
                found[block] = entry
        for entry in found.values():
            heapq.heappush(heap, entry)
        return list(found)
