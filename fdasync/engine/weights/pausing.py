"""Pauses of one engine: stop planning, let steps end, and go on when nothing keeps the engine from it any more.

Each caller has a pause of its own: a caller that is cancelled takes back its own pause and no other's. Changes pause by
`quiet`; at their end `changes.py` calls `go_on`. Knows no weights (docs/design.md, rules 10 and 36). Called
by `engine/engine.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.events.catalog import PauseRequested, ResumeRequested
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.control import Control
    from fdasync.request import PauseMode


class Pausing:
    """See the module.

    Args:
        fail: ends the engine.
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        control: Control,
        config: EngineConfig,
        runtime: Runtime,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self._control = control
        self._config = config
        self._runtime = runtime
        self._fail = fail
        self._check = check
        # calls of `pause` that have not returned, with their modes; a resume takes them all out, and ends their waits
        self._pausers: dict[object, PauseMode] = {}
        # how many PauseRequested were published
        self._asked = 0

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._check()
        control = self._control
        pauser = object()
        self._pausers[pauser] = mode
        try:
            await self.quiet(mode, pauser)
            control.held = control.held or pauser in self._pausers
        except asyncio.CancelledError:
            # a cancelled call takes its own pause back, and no other's
            if self._pausers.pop(pauser, None) is not None:
                self.go_on()
            raise
        finally:
            self._pausers.pop(pauser, None)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._check()
        self._control.check("resume")
        self._control.held = False
        self._pausers.clear()
        self.go_on()
        if self._runtime.driver is not None:
            # pauses that wait have been undone
            self._runtime.driver.tell()

    def _ask(self, mode: PauseMode) -> None:
        self._asked += 1
        self._runtime.bus.publish(PauseRequested(mode=mode))

    async def quiet(self, mode: PauseMode = "in_place", pauser: object = None) -> None:
        """Pause, and wait until no step and no copy is in flight; fails the engine where that takes too long
        (docs/design.md, rule 10). `pauser`: the call of `pause` that waits, until a resume undoes it; None: the room's
        own work waits, and no resume ends it."""
        driver = self._runtime.driver
        assert driver is not None
        pausing = driver.scheduler.pausing
        self._ask(mode)

        def paused() -> bool:
            # the turn that reads PauseRequested may still be to come
            return pausing.paused and pausing.requests >= self._asked

        def resumed() -> bool:
            # after a resume the engine may never be idle again
            return pauser is not None and pauser not in self._pausers

        while True:
            if mode == "wait":
                # bounded by the deadlines of the requests that run; a caller does not wait for the pause of an update
                await driver.wait_until(
                    lambda: resumed() or (paused() and not (self._control.updating and pauser is not None))
                )
                self._check()
            limit_s = self._config.step_deadline_s * self._config.pipeline_depth
            try:
                async with Within(limit_s):
                    # another caller took its pause back meanwhile: requests run on, and this one waits on
                    await driver.wait_until(lambda: resumed() or (driver.is_idle if paused() else mode == "wait"))
            except TimeoutError:
                self._fail(self._runtime.runner.overdue("the steps in flight at a pause", limit_s))
            self._check()
            if resumed() or paused():
                return

    def go_on(self) -> None:
        """Resume, unless a change is under way, the weights are broken or away, or a sleep or a pause is left. A pause
        that waits for requests lets them go on."""
        if not self._control.may_go_on or any(mode != "wait" for mode in self._pausers.values()):
            return
        self._runtime.bus.publish(ResumeRequested())
        if self._pausers:
            self._ask("wait")
