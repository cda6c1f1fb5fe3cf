"""Keeps the receives of a transport that run: ends them from outside, and waits until all have returned.

Knows no bytes and no sources but their tokens. Called by every transport.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, InvariantBroken
from fdasync.ipc.deadlines import wait_within
from fdasync_fleet.transfer.validation import LATE

if TYPE_CHECKING:
    from fdasync.cache.store.base import Outcome

# no timer is longer: a waiting transfer checks again after it
_LONGEST_WAIT_S = 3600.0
# an ended transfer returns within a turn of the loop; else there is a defect
_IDLE_S = 10.0


class Transfer:
    """One receive.

    Attributes:
        token: token of the source.
        deadline: its deadline, by the loop's clock.
        over: outcome of its unfinished copies once it has ended; None while it goes on.
    """

    def __init__(self, token: bytes, deadline: float) -> None:
        self.token = token
        self.deadline = deadline
        self.over: Outcome | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def now(self) -> float:
        """The time by the loop's clock."""
        return self._loop.time()

    def check(self) -> Outcome | None:
        """`over`, which is `LATE` from the deadline on."""
        if self.over is None and self._loop.time() >= self.deadline:
            self.over = LATE
        return self.over

    def end(self, outcome: Outcome) -> None:
        """End it; the first outcome counts."""
        if self.over is None:
            self.over = outcome
        self.wake()

    def wake(self) -> None:
        """Have `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, until: float) -> None:
        """Wait until it is woken or ended, until that time or its deadline, or less. One caller at a time."""
        self._waiter = self._loop.create_future()
        seconds = min(until, self.deadline) - self._loop.time()
        try:
            await wait_within([self._waiter], min(seconds, _LONGEST_WAIT_S))
        finally:
            self._waiter.cancel()
            self._waiter = None


class Transfers:
    """All transfers of a transport that run."""

    def __init__(self) -> None:
        self._running: dict[Transfer, None] = {}
        self._idle: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._running)

    def start(self, token: bytes, deadline: float) -> Transfer:
        """A new transfer. Raises InvariantBroken for a deadline that is not finite."""
        if not math.isfinite(deadline):
            raise InvariantBroken(f"{deadline} is no deadline")
        transfer = Transfer(token, deadline)
        self._running[transfer] = None
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """A transfer returns; it does not use its parts any more."""
        del self._running[transfer]
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def end(self, outcome: Outcome, token: bytes | None = None) -> None:
        """End all transfers, or those from this source."""
        for transfer in list(self._running):
            if token is None or transfer.token == token:
                transfer.end(outcome)

    def wake(self) -> None:
        """Wake all transfers."""
        for transfer in list(self._running):
            transfer.wake()

    async def idle(self) -> None:
        """Wait until all transfers, which were ended before, have returned. Raises DeadlineExceeded."""
        if not self._running:
            return
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
        # concurrent closers share the future
        await wait_within([self._idle], _IDLE_S)
        if self._running:
            raise DeadlineExceeded("the end of receives that were ended", _IDLE_S)
