"""Deadlines that look once more: what had come when a loop was blocked is read before anybody is called late.

An embedder's own code may block the loop for seconds. When the loop goes on, a deadline may have passed although the
answer lies unread in a socket. A deadline that such a loop comes late to counts only once the loop has been attentive
for `GRACE_S` (DECISIONS 28); any other counts a few turns of the loop later, which let what was read just now reach its
waiter. This module knows nothing of what is waited for. Every wait for another process goes through here; a test
holds that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    F = TypeVar("F", bound=asyncio.Future[Any])

#: how long a loop that was held up has to be attentive before a deadline counts, in seconds
GRACE_S = 0.05
# a timer that fires no later than this after its time says that its loop was not held up, in seconds
_PUNCTUAL_S = 0.01
# turns of the loop from a readable socket to the task that waits for what it brings, with room to spare
_TURNS = 16
# a loop that is blocked again and again has read everything after so many looks
_MAX_LOOKS = 16


class DeadlineTimer:
    """Calls `passed` once: when `when` has passed, and what had come by then was read.

    Args:
        when: by the loop's clock, in seconds.
        passed: called in the loop; it must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, when: float, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due = when
        self._looks = 0
        self._turns = 0
        # bare timer: this is what looks once more
        self._next: asyncio.Handle | None = loop.call_at(when, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due < (GRACE_S if self._looks else _PUNCTUAL_S) or self._looks == _MAX_LOOKS:
            self._turn()
            return
        # the loop was held up, at the deadline or at the look behind it
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
        """`passed` is not called any more; idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None


class Within:
    """`async with Within(limit_s):` is `asyncio.timeout(limit_s)` with a `DeadlineTimer`.

    Raises TimeoutError in place of the cancellation that ends the block. Another's cancellation goes through as it is.

    Args:
        limit_s: from entering, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # bare deadline: the timer below ends it
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Within:
        loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        self._timer = DeadlineTimer(loop, loop.time() + self._limit_s, self._passed)
        return self

    def _passed(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # the timer knows this object: together they would wait for the garbage collector
        del self._timer
        await self._timeout.__aexit__(kind, error, trace)


class Closing:
    """One deadline for all that closes together: each part takes what those before it left.

    It is made long before anything closes, and handed down; it counts from `begin`.

    Args:
        limit_s: from `begin`, in seconds.

    Attributes:
        limit_s: as given.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until: float | None = None

    def begin(self) -> None:
        """It counts now; idempotent."""
        if self._until is None:
            self._until = asyncio.get_running_loop().time() + self.limit_s

    def grant(self, share: float) -> None:
        """At least this share of `limit_s` is left from now, whatever was taken already."""
        now = asyncio.get_running_loop().time()
        self._until = max(now + share * self.limit_s, now if self._until is None else self._until)

    @property
    def left_s(self) -> float:
        """All of it before `begin`, never below 0."""
        if self._until is None:
            return self.limit_s
        return max(self._until - asyncio.get_running_loop().time(), 0.0)


async def wait_within(
    futures: Iterable[F], limit_s: float, *, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[F], set[F]]:
    """`asyncio.wait` with a `DeadlineTimer`: (done, not done). Cancelling it stops the waiting only.

    Args:
        futures: not empty.
        limit_s: from now, in seconds; 0 or less: what has come already is still read.
    """
    waited = set(futures)
    try:
        async with Within(limit_s):
            await asyncio.wait(waited, return_when=return_when)
    except TimeoutError:
        # the answer says what is not done
        pass
    done = {future for future in waited if future.done()}
    return done, waited - done
