"""Blocks in the order of their last use, which they keep while they come and go. Pure.

What a transfer touched returns to its old place: being copied or written is no use. Members are few operations each:
a heap by last use with entries that may be stale, beside a dict that says who is in. Used by `prefix.py`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLACK = 64


class Used(Protocol):
    """What knows when it was used last, by a clock that only grows. Compared by identity."""

    used: int


M = TypeVar("M", bound=Used)


class Lru(Generic[M]):
    """See the module. A member's `used` does not change while it is in."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: dict[M, None] = {}
        # (last use, a number that tells blocks apart, block)
        self._heap: list[tuple[int, int, M]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, block: M) -> bool:
        return block in self._members

    def __iter__(self) -> Iterator[M]:
        """Used longest ago first."""
        return iter(sorted(self._members, key=lambda member: member.used))

    def add(self, block: M) -> None:
        self._members[block] = None
        heapq.heappush(self._heap, (block.used, id(block), block))
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [(member.used, id(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def discard(self, block: M) -> None:
        self._members.pop(block, None)

    def oldest(self) -> M:
        """The member used longest ago. There must be one."""
        heap = self._heap
        while heap[0][2] not in self._members or heap[0][0] != heap[0][2].used:
            heapq.heappop(heap)
        return heap[0][2]

    def first(self, count: int) -> list[M]:
        """The members used longest ago, in that order."""
        heap, members = self._heap, self._members
        found: dict[M, tuple[int, int, M]] = {}
        # as many steps as are wanted, not as there are members: the engine's loop waits for this
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            block = entry[2]
            if block in members and entry[0] == block.used:
                found[block] = entry
        for entry in found.values():
            heapq.heappush(heap, entry)
        return list(found)
