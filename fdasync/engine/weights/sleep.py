"""Sleep and wake of one engine: another program uses the device's memory for a while.

A sleep pauses, has what runs give its blocks up, waits until no block is left on the device, and has the runner release
memory. A wake takes memory back, part by part, and the engine goes on when all of it is there. The scheduler learns of
a sleep by one event (`SleepRequested`); releasing and taking back are calls of the runner, made while nothing is in
flight. One waits for the other. Knows no blocks and no bytes (docs/design.md, rule 44). Called by `engine/engine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from fdasync.errors import ConfigError, DeadlineExceeded, WakeFailed
from fdasync.events.catalog import SleepRequested
from fdasync.ipc.deadlines import Within
from fdasync.request import MemoryPart, checked_sleep, checked_tags

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from fdasync.engine.weights.room import Room
    from fdasync.engine.weights.update import Updater
    from fdasync.request import Doing, PauseMode, SleepMode, WakeTag

#: in the order in which they are taken back
_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
#: what holds addresses of all others: it comes back with the last of them
_LAST: tuple[MemoryPart, ...] = ("cuda_graph",)
_PAUSES: dict[SleepMode, PauseMode] = {"keep": "retract", "abort": "abort", "wait": "wait"}


class Sleep:
    """See the module.

    Args:
        updater: brings weights that were dropped again.
    """

    def __init__(self, room: Room, updater: Updater) -> None:
        self._room = room
        self._updater = updater

    def check(self, level: Any, mode: Any, parts: Sequence[Any] | None = None) -> tuple[MemoryPart, ...]:
        """Raise where a sleep is refused, before it has changed anything; returns what the sleep would release."""
        level, _ = checked_sleep(level, mode)
        named = _PARTS if parts is None else checked_tags(parts)
        wanted = tuple([part for part in _PARTS if part in named]) if level else ()
        self._room.check()
        if wanted and (why := self._room.runtime.capacity.no_sleep):
            raise ConfigError("sleep", why)
        self._room.control.check("sleep")
        return wanted

    async def sleep(self, level: Any, mode: Any, parts: Sequence[Any] | None = None) -> None:
        """See `Engine.sleep`."""
        wanted = self.check(level, mode, parts)
        await self._room.changes.make("sleep", lambda: self._fall_asleep(wanted, mode, keep_weights=level < 2))

    async def wake(self, tags: Sequence[Any] | None) -> Doing:
        """See `Engine.wake`."""
        named: tuple[WakeTag, ...] = () if tags is None else checked_tags(tags)
        self._room.check()
        self._room.control.check("wake")
        if self._room.control.waits("wake") or not self._is_awake():
            await self._room.changes.make("wake", lambda: self._wake(named or _PARTS))
        return self._room.control.doing

    def _is_awake(self) -> bool:
        return not self._room.control.sleeps and self._room.control.weights != "dropped"

    # -- sleep --------------------------------------------------------------------------------------

    async def _fall_asleep(self, parts: tuple[MemoryPart, ...], mode: SleepMode, *, keep_weights: bool) -> None:
        control = self._room.control
        control.sleeps = True
        await self._room.pausing.quiet(_PAUSES[mode])
        if "kv_cache" in parts and "kv_cache" not in control.released:
            await self._clear_device()
        fresh = tuple([part for part in parts if part not in control.released])
        if "weights" in parts and not keep_weights and control.weights != "dropped":
            # deeper than before, maybe
            control.weights = "dropped"
            fresh = tuple([part for part in _PARTS if part in (*fresh, "weights")])
        if fresh:
            keep_weights = control.weights != "dropped"
            await self._of_runner(
                "releasing memory", self._room.runtime.runner.release_memory(fresh, keep_weights=keep_weights)
            )
            control.released = tuple([part for part in _PARTS if part in (*control.released, *fresh)])

    async def _clear_device(self) -> None:
        driver, limit_s = self._room.runtime.driver, self._room.runtime.update_limit_s
        assert driver is not None
        pausing = driver.scheduler.pausing
        self._room.runtime.bus.publish(SleepRequested())
        try:
            async with Within(limit_s):
                await driver.wait_until(lambda: pausing.stage == "clear" and driver.is_idle)
        except TimeoutError:
            self._room.fail(DeadlineExceeded("clearing the device of blocks", limit_s))
        self._room.check()

    async def _of_runner(self, what: str, work: Awaitable[None]) -> None:
        """Wait for work of the runner; an error, but WakeFailed, fails the engine: nobody knows what its memory
        holds."""
        try:
            await self._room.changes.in_time(what, work)
        except WakeFailed:
            # raises the engine's failure where the worker died
            self._room.check()
            raise
        except Exception as error:
            self._room.fail(error)
        self._room.check()

    # -- wake ---------------------------------------------------------------------------------------

    async def _wake(self, tags: tuple[WakeTag, ...]) -> None:
        control = self._room.control
        if self._is_awake():
            return
        for part in _PARTS:
            # graphs come back when nothing else is missing, named or not, and not before
            wanted = control.released == _LAST if part in _LAST else part in tags
            if wanted and part in control.released:
                await self._of_runner("taking memory back", self._room.runtime.runner.regain_memory(part))
                control.released = tuple([other for other in control.released if other != part])
        if control.released:
            return
        # from here on only dropped weights keep it from going on, and an update ends that
        control.sleeps = False
        if control.weights == "dropped" and self._room.state.sources:
            await self._updater.reload()
