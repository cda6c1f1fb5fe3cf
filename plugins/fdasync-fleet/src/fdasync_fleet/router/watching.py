"""Asks a router's instances what there is to see, for `Router.watch`: each at most once a second, however many look on.

What an instance said is kept, and only what is new crosses the link: later moments, and the picks of the weights in
use; earlier tables come once. Decides nothing, and no request waits for it. Called by `router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import FdasyncError
from fdasync.ipc.deadlines import wait_within
from fdasync.telemetry.sight.sight import MOST_MOMENTS, MOST_TABLES
from fdasync_fleet.messages import Seen, Watch
from fdasync_fleet.router.stats import watched_of

if TYPE_CHECKING:
    import asyncio

    from fdasync.telemetry.sight.sight import Picks, Sight, Watched
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable

# an instance is asked again after so long, and waited for as long
_PERIOD_S = 1.0


class _Known:
    """What one session of an instance has shown.

    Attributes:
        session: its number.
        asked_at: time of the latest question.
        seen_at: time of the latest answer.
        sight: of that; None before the first.
        number, whole: of that question, and whether it asked for the tables of earlier weights.
        version: of the weights at the latest answer to such a question.
        answer: done when the question that is open has its answer, or will have none; None: none is open.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self.asked_at = self.seen_at = -_PERIOD_S
        self.sight: Sight | None = None
        self.answer: asyncio.Future[None] | None = None
        self.number, self.whole, self.version = 0, False, ""
        # of the weights when it was last asked for all
        self.namespace = b""

    def take(self, sight: Sight, now: float) -> None:
        """An answer: what is kept and what is new."""
        before = self.sight
        if before is not None:
            moments = (*before.moments, *sight.moments)[-MOST_MOMENTS:]
            picks = sight.picks if self.whole else _joined(before.picks, sight.picks)
            sight = msgspec.structs.replace(sight, moments=moments, picks=picks)
        if self.whole:
            self.version = sight.stats.scheduler.weight_version
        self.sight, self.seen_at = sight, now


class Watching:
    """See the module."""

    def __init__(self, table: InstanceTable, loop: asyncio.AbstractEventLoop) -> None:
        self._table = table
        self._loop = loop
        self._known: dict[InstanceHandle, _Known] = {}
        self._number = 0

    async def look(self) -> tuple[Watched, ...]:
        """What every instance shows; see `Generator.watch`."""
        answers = [answer for instance in self._table.up() if (answer := self._ask(instance)) is not None]
        if answers:
            await wait_within(answers, _PERIOD_S)
        now = self._loop.time()
        for gone in self._known.keys() - set(self._table.instances.values()):
            del self._known[gone]
        told = []
        for instance in self._table.instances.values():
            known = self._known.get(instance)
            sight = None if known is None else known.sight
            told.append(watched_of(instance, sight, 0.0 if known is None or sight is None else now - known.seen_at))
        return tuple(told)

    def _ask(self, instance: InstanceHandle) -> asyncio.Future[None] | None:
        """Ask an instance, unless it was asked just now; returns a future of its answer, if one is awaited."""
        known, now = self._known.get(instance), self._loop.time()
        if known is None or known.session != instance.sessions:
            # another process may be there: nothing that the last one said is continued
            self._forget(known)
            known = self._known[instance] = _Known(instance.sessions)
        if now - known.asked_at < _PERIOD_S:
            return known.answer
        self._forget(known)
        sight = known.sight
        moments = () if sight is None else sight.moments
        # with new weights, or a new label, the last counts under the old ones are still to come
        same = sight is not None and known.version == sight.stats.scheduler.weight_version == instance.weight_version
        known.whole = not (same and known.namespace == instance.namespace)
        if known.whole:
            known.namespace = instance.namespace
        self._number += 1
        known.number, known.asked_at = self._number, now
        try:
            instance.peer.send(Watch(self._number, moments[-1].number if moments else 0, past_picks=known.whole))
        except FdasyncError:
            # the link is full or was lost: what it said before stands
            return None
        known.answer = self._loop.create_future()
        return known.answer

    def on_seen(self, instance: InstanceHandle, message: Seen) -> None:
        known = self._known.get(instance)
        if known is None or known.number != message.number or known.answer is None:
            return
        known.take(message.sight, self._loop.time())
        self._forget(known)

    def on_lost(self, instance: InstanceHandle) -> None:
        """The link is lost: its answer will not come."""
        self._forget(self._known.get(instance))

    @staticmethod
    def _forget(known: _Known | None) -> None:
        """End the wait for an answer."""
        if known is not None and known.answer is not None:
            if not known.answer.done():
                known.answer.set_result(None)
            known.answer = None


def _joined(before: tuple[Picks, ...], now: tuple[Picks, ...]) -> tuple[Picks, ...]:
    """Tables, newest first: the answer's, then known tables that are not in it."""
    if not now:
        return ()
    told = {(picks.version, picks.namespace) for picks in now}
    return (*now, *[picks for picks in before if (picks.version, picks.namespace) not in told])[:MOST_TABLES]
