"""A deadline on every call: it stops the waiting, never the work, whose end the error hands on.

And an age that no call outlives, where the store inside can be killed: what hangs holds parts, places in line and
whoever probes the store, and nobody else ends it (DECISIONS 5).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.cache.wrappers.base import GIB, Verb, Wrapper, nbytes_of
from fdasync.errors import StoreTimeout

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from fdasync.cache.region import SharedRegion
    from fdasync.cache.store import Store

T = TypeVar("T")


class Timeout(Wrapper):
    """Each inner verb runs in a task of its own, and is waited for until its deadline.

    At the deadline the caller gets StoreTimeout; `error.ended` is the task, and only when that is done are the parts
    free. A cancelled call cancels the inner verb and waits for its end, until the deadline too: then it raises
    StoreTimeout instead of CancelledError, because the parts are still in use.

    A verb that still runs `kill_s` after it began, and its deadline has passed, has the inner store killed, once. That
    ends every other verb of the store too, and a start of its process that the verb waits for.

    Args:
        call_s: deadline of a call, in seconds.
        gib_s: added for each GiB of the call's parts, in seconds.
        kill_s: how long a verb may run at all, in seconds, but never less than its deadline; None: as long as it likes.
        open_s: deadline of `open`, in seconds.
        close_s: how long `aclose` waits for running calls, and then for the store to close, in seconds.
    """

    def __init__(
        self,
        inner: Store,
        *,
        call_s: float,
        gib_s: float = 0.0,
        kill_s: float | None = None,
        open_s: float = 60.0,
        close_s: float = 10.0,
    ) -> None:
        super().__init__(inner)
        self._call_s = call_s
        self._gib_s = gib_s
        self._kill_s = kill_s
        self._open_s = open_s
        self._close_s = close_s
        self._running: set[asyncio.Task[Any]] = set()
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}  # of late verbs: when each is killed

    @property
    def running(self) -> int:
        """Inner calls that have not ended, waited for or not."""
        return len(self._left())

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        await self._within(self.inner.open(regions), "open", self._open_s)

    async def around(self, verb: Verb, argument: Sequence[Any]) -> Any:
        limit_s = self._call_s + self._gib_s * nbytes_of(verb, argument) / GIB
        return await self._within(self.ask(verb, argument, self.era), verb, limit_s, self._kill_s)

    async def kill(self, why: str) -> bool:
        """The inner store's; False if that does not end either."""
        self.end()
        try:
            return await self._within(self.inner.kill(why), "kill", self._close_s)
        except StoreTimeout:
            return False

    async def aclose(self) -> None:
        """Wait for what runs, kill it at the deadline, close. Raises StoreTimeout, naming what never ended."""
        self._closed = True
        # the deadline of closing counts now
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._settle()
        self.end()
        if self._left():
            await self.kill(f"{self._names()} did not end in {self._close_s:g} s before it was closed")
        await self._within(self.inner.aclose(), "aclose", self._close_s)
        await self._settle()
        for task in self._left():
            raise StoreTimeout(self.name, self._names(), self._close_s, task)

    async def _settle(self) -> None:
        left = self._left()
        if left:
            await asyncio.wait(left, timeout=self._close_s)

    def _left(self) -> list[asyncio.Task[Any]]:
        # one that has just ended is taken out in the next turn of the loop
        return [task for task in self._running if not task.done()]

    def _names(self) -> str:
        return ", ".join(sorted(task.get_name() for task in self._left()))

    async def _within(self, work: Coroutine[Any, Any, T], what: str, limit_s: float, kill_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        task = self._begin_task(work, what)
        begun = loop.time()
        deadline = begun + limit_s
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            left_s = deadline - loop.time()
            if left_s <= 0:
                if kill_s is not None and not self._closed:
                    left_s = max(begun + kill_s - loop.time(), 0.0)
                    self._timers[task] = loop.call_later(left_s, self._too_old, task, max(kill_s, limit_s))
                raise StoreTimeout(self.name, what, limit_s, task)
            try:
                await asyncio.wait([task], timeout=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
                task.cancel()
        if cancelled is not None:
            raise cancelled
        return task.result()  # of a task that is done

    def _begin_task(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=f"{what} of store {self.name}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _too_old(self, task: asyncio.Task[Any], kill_s: float) -> None:
        del self._timers[task]
        if not task.done():
            # what comes of it is nobody's: the late call ends, or does not
            self._begin_task(self.inner.kill(f"{task.get_name()} had not ended after {kill_s:g} s"), "kill")

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        timer = self._timers.pop(task, None)
        if timer is not None:
            timer.cancel()
        # retrieved, so that asyncio does not warn of a late error that nobody waits for
        _ = task.cancelled() or task.exception()
