"""Deadlines that look once more: after a loop was blocked, answers are read before a deadline counts as passed.

An embedder's own code may block the loop for seconds. When the loop goes on, a deadline may have passed although the
answer lies unread in a socket. If its timer fires late, a deadline counts only once the loop has been attentive for
`GRACE_S` (docs/design.md, rule 28); otherwise it counts a few turns of the loop later, so that an answer that was just
read reaches its waiter. The module does not know what its callers wait for. Every wait for another process uses it; a
test holds that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    F = TypeVar("F", bound=asyncio.Future[Any])

#: how long a loop that was blocked has to be attentive before a deadline counts, in seconds
GRACE_S = 0.05
# a timer that fires no later than this after its time shows that its loop was not blocked, in seconds
_PUNCTUAL_S = 0.01
# turns of the loop from a readable socket to the task that waits for its data, with room to spare
_TURNS = 16
# a loop that is blocked again and again has read everything after this many looks
_MAX_LOOKS = 16


class DeadlineTimer:
    """Calls `passed` once: when `when` has passed, and data that had arrived by then was read.

    Args:
        when: by the loop's clock, in seconds.
        passed: called in the loop; it must not raise.
    """

    __slots__ = ("_due", "_looks", "_loop", "_next", "_passed", "_turns")

    def __init__(self, loop: asyncio.AbstractEventLoop, when: float, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due = when
        self._looks = 0
        self._turns = 0
        # bare timer: the look itself
        self._next: asyncio.Handle | None = loop.call_at(when, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due < (GRACE_S if self._looks else _PUNCTUAL_S) or self._looks == _MAX_LOOKS:
            self._turn()
            return
        # the loop was blocked, at the deadline or at the look before this one
        self._looks += 1
        self._due = now + GRACE_S
        # bare timer: as above
        self._next = self._loop.call_at(self._due, self._look)

    def _turn(self) -> None:
        self._turns += 1
        if self._turns < _TURNS:
            self._next = self._loop.call_soon(self._turn)
            return
        self._next = None
        self._passed()

    def cancel(self) -> None:
        """Never call `passed`; idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None


class Within:
    """`async with Within(limit_s):` is `asyncio.timeout(limit_s)` with a `DeadlineTimer`.

    Raises TimeoutError in place of the cancellation that ends the block. Any other cancellation goes through as it is.
    `asyncio.timeout` of Python 3.11.2 takes its own cancellation for one of these in a task that outlived an earlier
    one, so nothing of it is used here.

    Args:
        limit_s: from entering, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._has_passed = False

    async def __aenter__(self) -> Within:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline outside of a task")
        self._task = task
        # cancellations that the task outlived
        self._before = task.cancelling()
        self._timer = DeadlineTimer(loop, loop.time() + self._limit_s, self._passed)
        return self

    def _passed(self) -> None:
        self._has_passed = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # the timer knows this object: together they would wait for the garbage collector
        del self._timer
        if self._has_passed and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            # no cancellation but the deadline's own
            raise TimeoutError from error


class Closing:
    """One deadline for parts that close together: each part has the time that the parts before it left.

    It is made long before the parts close, and handed down; it counts from `begin`.

    Args:
        limit_s: from `begin`, in seconds.

    Attributes:
        limit_s: as given.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until: float | None = None

    def begin(self) -> None:
        """Start the time; idempotent."""
        if self._until is None:
            self._until = asyncio.get_running_loop().time() + self.limit_s

    def grant(self, share: float) -> None:
        """Leave at least this share of `limit_s` from now, however much is spent already."""
        now = asyncio.get_running_loop().time()
        self._until = max(now + share * self.limit_s, now if self._until is None else self._until)

    @property
    def left_s(self) -> float:
        """The time that is left, in seconds, never below 0; `limit_s` before `begin`."""
        if self._until is None:
            return self.limit_s
        return max(self._until - asyncio.get_running_loop().time(), 0.0)


async def wait_within(
    futures: Iterable[F], limit_s: float, *, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[F], set[F]]:
    """`asyncio.wait` with a `DeadlineTimer`: (done, not done). Cancelling it stops the waiting only.

    Args:
        futures: not empty.
        limit_s: from now, in seconds; 0 or less: data that has arrived is still read.
    """
    waited = set(futures)
    try:
        async with Within(limit_s):
            await asyncio.wait(waited, return_when=return_when)
    except TimeoutError:
        # the result says which are not done
        pass
    done = {future for future in waited if future.done()}
    return done, waited - done
