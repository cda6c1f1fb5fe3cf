"""What the store did not take, and why: counted for `Engine.stats`, told as events that do not flood a log.

A store that is full refuses every write that comes, in words that may hold changing numbers. So a kind of reason (the
outcome's status) is told when it is new, and then once in a while, in the latest words, with how many have come
together meanwhile. Used by `store_io.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.events.catalog import WritesRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome

# a reason that was told is told again after this long
TELL_EVERY_S = 10.0


class Refusals:
    """See the module.

    Attributes:
        blocks: that were refused so far.
        problem: why the latest one was, in the store's words; "" as long as none was.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.problem = ""
        self._untold: dict[str, int] = {}
        self._told_at: dict[str, float] = {}

    def add(self, store: str, outcomes: Sequence[Outcome], now: float) -> list[WritesRefused]:
        """Count what of a put was refused; returns what is to be told now, engine time in seconds."""
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
