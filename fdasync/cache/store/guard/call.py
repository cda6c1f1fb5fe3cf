"""One call of a guarded store, and the line in which calls wait for room.

    asked --> waiting ----> running --------> ended
      |          |            |                 ^
      |          |            +----> late ------+
      +----------+------------------------------+

- *waiting*: it stands in line and holds nothing. Refused calls end at once; a call leaves the line when it is given up,
  when the store is killed or closed, or after the longest wait.
- *running*: the store performs it. It holds its room (one call, its bytes) and the parts of its items.
- *late*: its deadline has passed, and nobody waits any more. It holds what it held. When it grows too old, the store is
  killed for it.
- *ended*: the store has let go of its parts, and its room is free. Only here does a call give back what it held.

A call has one timer, which ends the state that it is in. The module knows no store; `guard.py` moves calls on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from fdasync.errors import StoreTimeout
    from fdasync.ipc.deadlines import DeadlineTimer

CallState = Literal["waiting", "running", "late", "ended"]


class Call:
    """See the module.

    Args:
        verb: of the store; or "open".
        argument: its keys, items or regions; () for `usage`.
        nbytes: of all parts.
        period: `Breaker.period` when it was asked; -1: the guard itself asked, or it was given up in line.

    Attributes:
        asked_at: loop time.
        task: performs it; None before it runs.
        late: the error of its deadline, once that has passed.
        waited: done when the waiting is over: it is late or ended.
        ended: done when it has ended, with the answer or the error.
    """

    __slots__ = (
        "argument", "asked_at", "ended", "late", "nbytes", "period", "state", "task", "timer", "verb", "waited",
    )  # fmt: skip

    def __init__(self, verb: str, argument: Sequence[Any], nbytes: int, period: int) -> None:
        loop = asyncio.get_running_loop()
        self.verb = verb
        self.argument = argument
        self.nbytes = nbytes
        self.period = period
        self.state: CallState = "waiting"
        self.asked_at = loop.time()
        self.task: asyncio.Task[Any] | None = None
        self.timer: DeadlineTimer | None = None
        self.late: StoreTimeout | None = None
        self.waited: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Any] = loop.create_future()

    def answer(self) -> Any:
        """The store's answer; None: it has not ended, or it raised."""
        ended = self.ended.done() and self.ended.exception() is None
        return self.ended.result() if ended else None  # of a future that is done

    def stop_timer(self) -> None:
        """Let the state last."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def waited(calls: Collection[Call], until: float | None = None) -> None:
    """Wait until each of the calls is late or has ended, or until loop time `until`. Cancelling it stops the waiting
    only."""
    futures = [call.waited for call in calls]
    if not futures:
        return
    if until is None:
        await asyncio.wait(futures)
    else:
        await wait_within(futures, until - asyncio.get_running_loop().time())


class Line:
    """Room for so many calls and bytes at a time; first come, first served, and no call overtakes another.

    Args:
        max_calls: most calls that have room at a time.
        max_nbytes: most bytes of their parts; a call that has more has room alone.

    Attributes:
        calls, nbytes: what has room now.
    """

    def __init__(self, max_calls: int, max_nbytes: int) -> None:
        self._max_calls = max_calls
        self._max_nbytes = max_nbytes
        self._waiting: deque[Call] = deque()
        self.calls = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, call: Call) -> None:
        """The call is the last in line."""
        self._waiting.append(call)

    def leave(self, call: Call) -> None:
        """The call leaves the line without having had room."""
        self._waiting.remove(call)

    def free(self, call: Call) -> None:
        """The call gives its room back."""
        self.calls -= 1
        self.nbytes -= call.nbytes

    def turns(self) -> Iterator[Call]:
        """Those at the front of the line that have room now."""
        while self._waiting:
            nbytes = self._waiting[0].nbytes
            if self.calls and (self.calls >= self._max_calls or self.nbytes + nbytes > self._max_nbytes):
                return
            self.calls += 1
            self.nbytes += nbytes
            yield self._waiting.popleft()

    def empty(self) -> list[Call]:
        """All leave the line; returns them."""
        left = list(self._waiting)
        self._waiting.clear()
        return left
