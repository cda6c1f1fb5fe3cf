"""Counts the blocks that a store refused to write, and makes events of them that do not flood a log.

A full store refuses every write, in words that may hold changing numbers. So there is an event for an outcome's status
when it is new, and then one in `TELL_EVERY_S`, with the latest words and the number of blocks since the last event.
Called by `store_io.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.events.catalog import WritesRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.cache.store.base import Outcome

# seconds between two events of the same status
TELL_EVERY_S = 10.0


class Refusals:
    """See the module.

    Attributes:
        blocks: how many were refused so far.
        problem: why the latest was refused, in the store's words; "" while none was.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.problem = ""
        self._untold: dict[str, int] = {}
        self._told_at: dict[str, float] = {}

    def add(self, store: str, outcomes: Iterable[Outcome], now: float) -> list[WritesRefused]:
        """Count the refused outcomes of a put; returns the events that are due at `now`, engine time in seconds."""
        events = []
        refused: dict[str, Outcome] = {}
        for outcome in outcomes:
            if not outcome.ok:
                refused.setdefault(outcome.status, outcome)
                self.blocks += 1
                self._untold[outcome.status] = self._untold.get(outcome.status, 0) + 1
        for status, first in refused.items():
            self.problem = first.problem or status
            told_at = self._told_at.get(status)
            if told_at is None or now >= told_at + TELL_EVERY_S:
                self._told_at[status] = now
                events.append(WritesRefused(store=store, items=self._untold.pop(status), problem=self.problem))
        return events
