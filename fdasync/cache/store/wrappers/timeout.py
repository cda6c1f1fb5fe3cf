"""A deadline on every call: it stops the waiting, never the work, whose end the error hands on.

A call that has run for too long is killed as well: a call that hangs holds parts, a place in line and the breaker's
probe, and nothing else would end it (docs/design.md, rule 5).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.cache.store.wrappers.base import GIB, Wrapper, nbytes_of
from fdasync.errors import StoreTimeout, StoreUnavailable
from fdasync.ipc.deadlines import Closing, DeadlineTimer, wait_within

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from fdasync.cache.store.base import Store
    from fdasync.events.catalog import StoreVerb
    from fdasync.ipc.shared_memory import SharedRegion

T = TypeVar("T")


class Timeout(Wrapper):
    """Each inner verb runs in a task of its own; the caller waits for it until its deadline.

    At the deadline the caller gets StoreTimeout; `error.ended` is the task, and only when that is done are the parts
    free. A cancelled call cancels the inner verb and waits for its end, until the deadline too: then it raises
    StoreTimeout instead of CancelledError, because the parts are still in use.

    When a verb or an `open` still runs `kill_s` after it began, and its deadline has passed, this wrapper kills the
    inner store, once. That ends every other verb of the store too, and a start of its process that the verb waits for.
    If the store cannot be killed, only this call is cancelled.

    Args:
        call_s: deadline of a call, in seconds.
        gib_s: added to the deadline for each GiB of the call's parts, in seconds.
        kill_s: how long a verb may run at all, in seconds, but never less than its deadline; None: without limit.
        open_s: deadline of `open`, in seconds.
        close_s: how long `aclose` may take, and a `kill` outside of it, in seconds; or a deadline that it shares.
        reap_s: how much longer the store's process may take to be gone, in seconds; 0: it has none.
        name: see `Wrapper`.
    """

    def __init__(
        self,
        inner: Store,
        *,
        call_s: float,
        gib_s: float = 0.0,
        kill_s: float | None = None,
        open_s: float = 60.0,
        close_s: float | Closing = 10.0,
        reap_s: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__(inner, name=name)
        self._call_s = call_s
        self._gib_s = gib_s
        self._kill_s = kill_s
        self._open_s = open_s
        self._closing = close_s if isinstance(close_s, Closing) else Closing(close_s)
        self._reap_s = reap_s
        self._openings: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._timers: dict[asyncio.Task[Any], DeadlineTimer] = {}  # of late verbs: when each is killed

    @property
    def running(self) -> int:
        """Inner calls that have not ended, whether a caller still waits for them or not."""
        return len(self._left())

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        await self._within(super().open(regions), "open", self._open_s, self._kill_s)

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        limit_s = self._call_s + self._gib_s * nbytes_of(verb, argument) / GIB
        return await self._within(self.ask(verb, argument, self.era), verb, limit_s, self._kill_s)

    async def kill(self, why: str) -> bool:
        """Kill the inner store; verbs that this does not end are cancelled. False if that does not end them either."""
        self.end()
        left = self._left()
        killed = False
        try:
            killed = await self._within(self.inner.kill(why), "kill", self._closing.left_s + self._reap_s)
            if killed:
                # the verbs have ended: let their tasks take their last turns
                await self._settle(left, 0.0)
        except StoreTimeout as error:
            error.ended.cancel()
        except Exception:
            # a defect of the store, which counts as a store that cannot be killed
            pass
        for task in left:
            task.cancel()
        await self._settle([task for task in left if not task.done()], self._closing.left_s / 2)
        return (killed or bool(left)) and all(task.done() for task in left)

    async def aclose(self) -> None:
        """Wait for running verbs, kill them half-way to the deadline, close.

        Raises StoreTimeout, naming the verbs that never ended.
        """
        self._closed = True
        self._closing.begin()
        # the deadline of closing counts now
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for opening in self._openings:
            opening.cancel()
        patience_s = self._closing.left_s / 2
        await self._settle(self._left(), patience_s)
        self.end()
        if self._left():
            await self.kill(f"{self._names()} did not end in {patience_s:g} s before it was closed")
        try:
            await self._within(self.inner.aclose(), "aclose", self._closing.left_s + self._reap_s)
        except StoreTimeout as error:
            # no caller waits for it any more
            error.ended.cancel()
            await self._settle([error.ended], 0.0)
            raise StoreTimeout(self.name, self._names() or "aclose", self._closing.limit_s, error.ended) from None
        await self._settle(self._left(), self._closing.left_s)
        for task in self._left():
            raise StoreTimeout(self.name, self._names(), self._closing.limit_s, task)

    @staticmethod
    async def _settle(left: Sequence[asyncio.Future[Any]], limit_s: float) -> None:
        if left:
            await wait_within(left, limit_s)

    def _left(self) -> list[asyncio.Task[Any]]:
        # a task that has just ended is taken out in the next turn of the loop
        return [task for task in self._running if not task.done()]

    def _names(self) -> str:
        return ", ".join(sorted(task.get_name() for task in self._left()))

    async def _within(self, work: Coroutine[Any, Any, T], what: str, limit_s: float, kill_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        task = self._begin_task(work, what)
        if what == "open":
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)
        begun = loop.time()
        deadline = begun + limit_s
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await wait_within([task], deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
                task.cancel()
                continue
            if not task.done():
                if kill_s is not None and not self._closed:
                    kill = partial(self._too_old, task, max(kill_s, limit_s))
                    self._timers[task] = DeadlineTimer(loop, max(begun + kill_s, loop.time()), kill)
                raise StoreTimeout(self.name, what, limit_s, task)
        if cancelled is not None:
            raise cancelled
        if task.cancelled():
            # cancelled by a kill, a close or its age, not by the caller
            raise StoreUnavailable(self.name, f"{what} was ended")
        return task.result()  # of a task that is done

    def _begin_task(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=f"{what} of store {self.name}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _too_old(self, task: asyncio.Task[Any], kill_s: float) -> None:
        del self._timers[task]
        if not task.done():
            # nothing waits for this task: the late call ends, or does not
            self._begin_task(self._end_old(task, f"{task.get_name()} had not ended after {kill_s:g} s"), "kill")

    async def _end_old(self, task: asyncio.Task[Any], why: str) -> None:
        try:
            if await self.inner.kill(why):
                # the verb has ended: let its task take its last turns
                await wait_within([task], 0.0)
        finally:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        timer = self._timers.pop(task, None)
        if timer is not None:
            timer.cancel()
        # retrieved, so that asyncio does not warn of a late error
        _ = task.cancelled() or task.exception()
