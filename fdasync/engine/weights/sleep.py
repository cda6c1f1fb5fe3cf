"""Sleep and wake of one engine: another program uses the device's memory for a while.

A sleep pauses, has what runs give its blocks up, waits until no block is left on the device, and has the runner release
memory. A wake takes memory back, part by part, and the engine goes on when all of it is there. The scheduler learns of
a sleep by one event (`SleepRequested`); releasing and taking back are calls of the runner, made while nothing is in
flight. Both are tasks of the engine, one after the other: a caller that is cancelled stops waiting. Knows no blocks and
no bytes (docs/design.md, rule 44). Called by `engine/engine.py` and `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, get_args

from fdasync.engine.weights.tasks import take_end
from fdasync.errors import (
    ConfigError,
    DeadlineExceeded,
    TaskCancelled,
    WakeFailed,
)
from fdasync.events.catalog import SleepRequested
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.request import MemoryPart, checked_sleep, checked_tags

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.weights import Weights
    from fdasync.request import Doing, PauseMode, SleepMode, WakeTag

#: in the order in which they are taken back
_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
#: what holds addresses of all others: it comes back with the last of them
_LAST: tuple[MemoryPart, ...] = ("cuda_graph",)
_PAUSES: dict[SleepMode, PauseMode] = {"keep": "retract", "abort": "abort", "wait": "wait"}


class Sleep:
    """See the module.

    Args:
        weights: of the same engine; they hold its pause.
        fail: ends the engine.
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        weights: Weights,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._weights = weights
        self._state = weights.state
        self._fail = fail
        self._check = check
        self._turn = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closing = False

    def check(self, level: Any, mode: Any, parts: Sequence[Any] | None = None) -> tuple[MemoryPart, ...]:
        """Raise where a sleep is refused, before it has changed anything; returns what the sleep would release."""
        level, _ = checked_sleep(level, mode)
        named = _PARTS if parts is None else checked_tags(parts)
        wanted = tuple([part for part in _PARTS if part in named]) if level else ()
        self._check()
        if wanted and (why := self._runtime.capacity.no_sleep):
            raise ConfigError("sleep", why)
        self._refuse()
        return wanted

    async def sleep(self, level: Any, mode: Any, parts: Sequence[Any] | None = None) -> None:
        """See `Engine.sleep`."""
        wanted = self.check(level, mode, parts)
        await self._finish(self._fall_asleep(wanted, mode, keep_weights=level < 2), "sleep")

    async def wake(self, tags: Sequence[Any] | None) -> Doing:
        """See `Engine.wake`."""
        named: tuple[WakeTag, ...] = () if tags is None else checked_tags(tags)
        self._check()
        self._state.check_idle()
        await self._finish(self._wake(named or _PARTS), "wake")
        return self._state.doing

    async def aclose(self) -> bool:
        """Stop what is under way; True: memory is released, and the runner takes no more work."""
        self._closing = True
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await wait_within(list(self._tasks), self._config.close_deadline_s)
        return self._state.sleeps

    def _refuse(self) -> None:
        if self._state.broken is not None:
            raise self._state.broken
        self._state.check_idle()

    async def _finish(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Do it when its turn comes; a caller who is cancelled leaves it to its end."""
        task = asyncio.get_running_loop().create_task(self._in_turn(work), name=f"fdasync-{what}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        # bounded by the deadlines of what it waits for
        await asyncio.wait([task])
        take_end(task, self._check)

    async def _in_turn(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turn:
                await work
        finally:
            # a call that was cancelled before its turn
            work.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task.cancelled():
            if not self._closing:
                # `asyncio.run` cancels all tasks at its end: nobody knows what the runner holds
                self._fail(TaskCancelled(task.get_name()))
        elif (error := task.exception()) is not None and not isinstance(error, Exception):
            # an interrupt, which has reached the program: what the runner holds is not known
            self._fail(error)

    # -- sleep --------------------------------------------------------------------------------------

    async def _fall_asleep(self, parts: tuple[MemoryPart, ...], mode: SleepMode, *, keep_weights: bool) -> None:
        # of calls that came in one turn the first one has its way
        self._refuse()
        state = self._state
        state.sleeps = True
        state.moving = True
        try:
            await self._weights.pausing.quiet(_PAUSES[mode])
            if "kv_cache" in parts and "kv_cache" not in state.released:
                await self._clear_device()
            fresh = tuple([part for part in parts if part not in state.released])
            if "weights" in parts and not keep_weights and not state.dropped:
                # deeper than before, maybe
                state.dropped = True
                fresh = tuple([part for part in _PARTS if part in (*fresh, "weights")])
            if fresh:
                await self._of_runner(
                    "releasing memory", self._runtime.runner.release_memory(fresh, keep_weights=not state.dropped)
                )
                state.released = tuple([part for part in _PARTS if part in (*state.released, *fresh)])
        finally:
            state.moving = False

    async def _clear_device(self) -> None:
        driver, limit_s = self._runtime.driver, self._runtime.update_limit_s
        assert driver is not None
        pausing = driver.scheduler.pausing
        self._runtime.bus.publish(SleepRequested())
        try:
            async with Within(limit_s):
                await driver.wait_until(lambda: pausing.sleep == "deep" and driver.is_idle)
        except TimeoutError:
            self._fail(DeadlineExceeded("clearing the device of blocks", limit_s))
        self._check()

    async def _of_runner(self, what: str, work: Awaitable[None]) -> None:
        """Wait for work of the runner; an error, but WakeFailed, fails the engine: nobody knows what its memory
        holds."""
        limit_s = self._runtime.update_limit_s
        try:
            async with Within(limit_s):
                await work
        except WakeFailed:
            # raises the engine's failure where the worker died
            self._check()
            raise
        except TimeoutError as error:
            late = not isinstance(error, DeadlineExceeded)
            self._fail(self._runtime.runner.overdue(what, limit_s) if late else error)
        except Exception as error:
            self._fail(error)
        self._check()

    # -- wake ---------------------------------------------------------------------------------------

    async def _wake(self, tags: tuple[WakeTag, ...]) -> None:
        state = self._state
        state.check_idle()
        if not state.sleeps and not state.dropped:
            return
        state.moving = state.waking = True
        try:
            for part in _PARTS:
                # graphs come back when nothing else is missing, named or not, and not before
                wanted = state.released == _LAST if part in _LAST else part in tags
                if wanted and part in state.released:
                    await self._of_runner("taking memory back", self._runtime.runner.regain_memory(part))
                    state.released = tuple([other for other in state.released if other != part])
            if state.released:
                return
            # from here on only dropped weights keep it from going on, and an update ends that
            state.sleeps = False
            if state.dropped and state.sources:
                await self._weights.updater.reload()
        finally:
            state.moving = state.waking = False
        self._weights.pausing.go_on()
