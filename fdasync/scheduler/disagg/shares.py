"""How many of a bounded number of places each peer has, so that a slow one leaves room for the others. Pure data.

A peer gets half of the places at most, and one at least. This module knows no blocks and no states. `sender.py` and
`receiver.py` each have one `Shares` for the blocks of the staging ring and one for recurrent states.
"""

from __future__ import annotations


class Shares:
    """See the module.

    Args:
        places: how many there are.

    Attributes:
        total: how many are taken.
    """

    def __init__(self, places: int) -> None:
        self.total = 0
        self._places = places
        self._most = max(places // 2, 1)
        self._by_peer: dict[str, int] = {}

    def is_full(self, peer: str) -> bool:
        """Whether all places are taken, or all that this peer may have."""
        return self.total >= self._places or self._by_peer.get(peer, 0) >= self._most

    def take(self, peer: str) -> None:
        self.total += 1
        self._by_peer[peer] = self._by_peer.get(peer, 0) + 1

    def give_back(self, peer: str) -> None:
        self.total -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]
