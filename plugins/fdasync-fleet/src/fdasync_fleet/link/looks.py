"""Knows which peers `Links` has to look after, and when: the earliest first, whatever the number of peers.

A router has hundreds of peers, but few have anything due at one time. A peer that becomes due earlier than before gets
a new entry, and the entry that it replaces is dropped when its time comes. Pure: knows no clock. Called by `links.py`.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from fdasync_fleet.link.session import NEVER

if TYPE_CHECKING:
    from fdasync_fleet.link.peer import Peer


class Looks:
    """See the module. `Peer.look_due` is the time of a peer's look; this alone sets it."""

    def __init__(self) -> None:
        # (time, number of the entry, peer): peers have no order
        self._heap: list[tuple[float, int, Peer]] = []
        self._count = 0

    def __len__(self) -> int:
        """Number of entries, replaced ones included."""
        return len(self._heap)

    def add(self, when: float, peer: Peer) -> None:
        """Look after a peer by then; a look that is due earlier stays."""
        if when < peer.look_due:
            peer.look_due = when
            self._count += 1
            heappush(self._heap, (when, self._count, peer))

    def take(self, now: float) -> list[Peer]:
        """The peers whose time has come, in order of it; none of them has a look any more."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= now:
            when, _, peer = heappop(heap)
            if when == peer.look_due:
                peer.look_due = NEVER
                due.append(peer)
        return due

    def next(self) -> float:
        """The time of the next look; NEVER: there is none."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].look_due:
            heappop(heap)
        return heap[0][0] if heap else NEVER
