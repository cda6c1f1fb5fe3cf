"""An update in parts: open from `begin` to `end`, and no step runs meanwhile. Its parts are tensors of a group.

An update whose next part or end does not come within the limit of an update ends by itself. An update that ends before
it is whole leaves the weights broken. Knows no blocks and no schedule. Called by `engine/engine.py`,
`fdasync_fleet/instance/instance.py` and `weights.py`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from fdasync.engine.weights.update import Asked
from fdasync.errors import BadInput, UpdateUnderWay, WeightsBroken, WeightsRejected
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync.request import check_update_mode, checked_fingerprint, checked_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.loaders import Loaders
    from fdasync.engine.weights.pausing import Pausing
    from fdasync.engine.weights.state import WeightsState
    from fdasync.engine.weights.tasks import UpdateTask
    from fdasync.engine.weights.update import UpdateMode, Updater
    from fdasync.request import GroupTensors, WeightsFingerprint


class _OpenUpdate:
    """An update in parts.

    Attributes:
        mode: of `update_weights`.
        begun: no step is in flight, and parts may come.
        label: that a part was given last; None: none was.
        parts: how many have come.
        timer: ends the update when neither a part nor its end comes in time.
    """

    __slots__ = ("begun", "label", "mode", "parts", "timer")

    def __init__(self, mode: UpdateMode) -> None:
        self.mode = mode
        self.begun = False
        self.label: str | None = None
        self.parts = 0
        self.timer: DeadlineTimer | None = None


class PartUpdates:
    """See the module.

    Args:
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        state: WeightsState,
        pausing: Pausing,
        task: UpdateTask,
        updater: Updater,
        loaders: Loaders,
        runtime: Runtime,
        check: Callable[[], None],
    ) -> None:
        self._state = state
        self._pausing = pausing
        self._task = task
        self._updater = updater
        self._loaders = loaders
        self._runtime = runtime
        self._check = check
        self._open: _OpenUpdate | None = None

    async def begin(self, mode: UpdateMode) -> None:
        """See `Engine.begin_weight_update`."""
        self._check()
        check_update_mode(mode)
        state = self._state
        state.check_idle()
        state.check_awake("begin_weight_update")
        state.updating = state.is_open = True
        self._open = update = _OpenUpdate(mode)
        try:
            await self._pausing.quiet()
        except BaseException:
            self._close(update)
            raise
        update.begun = True
        self._await_part(update)

    async def take(
        self, version: str | int | None, part: GroupTensors | None, expected: WeightsFingerprint | None
    ) -> None:
        """The next part. Raises UpdateUnderWay if it is no part, and while another part is being received."""
        update = self._open
        assert update is not None
        if part is None or self._is_busy(update):
            raise self._state.under_way()
        if expected is not None:
            raise BadInput("expected", "is of a part of an update", hint="give it where the update ends")
        if version is not None:
            update.label = checked_version(version)
        self._stop_waiting(update)
        await self._task.run(self._receive(update, part))

    async def _receive(self, update: _OpenUpdate, part: GroupTensors) -> None:
        ended = True
        try:
            # the result of all parts is compared at the end at the earliest
            receiving = self._loaders.receive(part, first=not update.parts, last=False, whole=self._state.differs)
            await self._task.in_time("receiving weights", receiving)
            update.parts += 1
            ended = False
        except WeightsRejected as error:
            if update.parts:
                broken = WeightsBroken(f"{error.problem}; tensors before these have been replaced")
                raise self._state.breaks(broken) from error
            raise
        except Exception as error:
            self._updater.broke(error)
        finally:
            if ended:
                self._close(update)
            else:
                self._await_part(update)

    async def end(
        self, version: str | int | None, expected: str | WeightsFingerprint | None, order: int = 0, weights_id: str = ""
    ) -> None:
        """See `Engine.end_weight_update`. `order`, `weights_id`: as in `Asked`."""
        self._check()
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        update = self._open
        if update is None:
            raise BadInput("end_weight_update", "no update is open", hint="it begins with begin_weight_update")
        if self._is_busy(update):
            raise self._state.under_way()
        if version is not None:
            update.label = checked_version(version)
        label = update.label or self._state.new_label(None)
        self._stop_waiting(update)
        if not update.parts:
            # nothing came, so nothing is new
            self._close(update)
            return
        self._open, self._state.is_open = None, False
        asked = Asked(label=label, order=order, mode=update.mode, expected=wanted, weights_id=weights_id)
        await self._task.run(self._updater.update(asked, self._loaders.end_received, None))

    def has_label(self, version: str | int) -> bool:
        """Whether an update is open whose weights will have this label. Raises BadInput if it is no label."""
        label = checked_version(version)
        return self._open is not None and self._open.label == label

    def abandon(self) -> None:
        """See `Engine.abandon_weight_update`."""
        self._check()
        if self._open is None:
            return
        if self._is_busy(self._open):
            raise UpdateUnderWay("of this engine: tensors are being received")
        self._lapse(self._open, "was abandoned")

    def stop(self) -> None:
        """The engine ends: stop waiting for the next part."""
        if self._open is not None:
            self._stop_waiting(self._open)

    def _is_busy(self, update: _OpenUpdate) -> bool:
        """The update begins, or a part of it is being received."""
        return not update.begun or self._task.runs

    def _await_part(self, update: _OpenUpdate) -> None:
        limit_s = self._runtime.update_limit_s
        loop = asyncio.get_running_loop()
        words = f"was neither continued nor ended for {limit_s:g} s"
        update.timer = DeadlineTimer(loop, loop.time() + limit_s, partial(self._lapse, update, words))

    def _stop_waiting(self, update: _OpenUpdate) -> None:
        if update.timer is not None:
            update.timer.cancel()
            update.timer = None

    def _lapse(self, update: _OpenUpdate, what: str) -> None:
        """End an update that is not whole."""
        if update.parts:
            self._state.breaks(WeightsBroken(f"an update in parts {what}, after {update.parts} of them"))
        self._close(update)

    def _close(self, update: _OpenUpdate) -> None:
        self._stop_waiting(update)
        if self._open is update:
            self._open, self._state.is_open = None, False
        self._task.finish()
        self._pausing.go_on()
