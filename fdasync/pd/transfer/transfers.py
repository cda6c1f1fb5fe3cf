"""Receives that are running: each can be ended from outside, and all be waited for. Used by every transport."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, InvariantBroken
from fdasync.ipc.deadlines import wait_within
from fdasync.pd.transfer.validation import LATE

if TYPE_CHECKING:
    from fdasync.cache.store.base import Outcome

# no timer is longer: what waits looks again then
_LONGEST_WAIT_S = 3600.0
# calls that were ended return within a turn of the loop; one that does not is a defect, and is told
_IDLE_S = 10.0


class Call:
    """One receive.

    Attributes:
        token: of the source.
        deadline: in the loop's time.
        over: how what is left of it ends, or None: it goes on.
    """

    def __init__(self, token: bytes, deadline: float) -> None:
        self.token = token
        self.deadline = deadline
        self.over: Outcome | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def now(self) -> float:
        """The loop's time."""
        return self._loop.time()

    def check(self) -> Outcome | None:
        """`over`, which is "late" from the deadline on."""
        if self.over is None and self._loop.time() >= self.deadline:
            self.over = LATE
        return self.over

    def end(self, outcome: Outcome) -> None:
        """Nothing of it goes on; the first reason counts."""
        if self.over is None:
            self.over = outcome
        self.wake()

    def wake(self) -> None:
        """Whoever waits in `wait` looks again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, until: float) -> None:
        """Until it is woken or ended, until that time, or its deadline, or sooner. One at a time."""
        self._waiter = self._loop.create_future()
        seconds = min(until, self.deadline) - self._loop.time()
        try:
            await wait_within([self._waiter], min(seconds, _LONGEST_WAIT_S))
        finally:
            self._waiter.cancel()
            self._waiter = None


class Calls:
    """All of a transport's."""

    def __init__(self) -> None:
        self._running: dict[Call, None] = {}
        self._idle: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._running)

    def start(self, token: bytes, deadline: float) -> Call:
        """Raises InvariantBroken for a deadline that is none."""
        if not math.isfinite(deadline):
            raise InvariantBroken(f"{deadline} is no deadline")
        call = Call(token, deadline)
        self._running[call] = None
        return call

    def finish(self, call: Call) -> None:
        """It returns now; its parts are not used any more."""
        del self._running[call]
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def end(self, outcome: Outcome, token: bytes | None = None) -> None:
        """All that run, or those from this source."""
        for call in list(self._running):
            if token is None or call.token == token:
                call.end(outcome)

    def wake(self) -> None:
        """All look again."""
        for call in list(self._running):
            call.wake()

    async def idle(self) -> None:
        """Until all that were ended have returned. Raises DeadlineExceeded."""
        if not self._running:
            return
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
        # closers at the same time share it
        await wait_within([self._idle], _IDLE_S)
        if self._running:
            raise DeadlineExceeded("the end of receives that were ended", _IDLE_S)
