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
from fdasync.errors import BadInput, WeightsBroken, WeightsRejected
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync.request import check_update_mode, checked_fingerprint, checked_version

if TYPE_CHECKING:
    from fdasync.engine.weights.room import Room
    from fdasync.engine.weights.update import UpdateMode, Updater
    from fdasync.request import GroupTensors, WeightsFingerprint


class _OpenUpdate:
    """An update in parts.

    Attributes:
        mode: of `update_weights`.
        label: that a part was given last; None: none was.
        parts: how many have come.
        timer: ends the update when neither a part nor its end comes in time.
    """

    __slots__ = ("label", "mode", "parts", "timer")

    def __init__(self, mode: UpdateMode) -> None:
        self.mode = mode
        self.label: str | None = None
        self.parts = 0
        self.timer: DeadlineTimer | None = None


class PartUpdates:
    """See the module."""

    def __init__(self, room: Room, updater: Updater) -> None:
        self._room = room
        self._updater = updater
        self._open: _OpenUpdate | None = None

    async def begin(self, mode: UpdateMode) -> None:
        """See `Engine.begin_weight_update`."""
        self._room.check()
        check_update_mode(mode)
        update = _OpenUpdate(mode)
        try:
            await self._room.changes.make("begin_weight_update", lambda: self._begin(update), leaves=True)
        except asyncio.CancelledError:
            if self._open is update:
                # it had begun in the turn in which its caller went away
                self._close()
            raise

    async def _begin(self, update: _OpenUpdate) -> None:
        await self._room.pausing.quiet()
        self._open = update
        self._await_part(update)

    async def take(
        self, version: str | int | None, part: GroupTensors | None, expected: WeightsFingerprint | None
    ) -> None:
        """The next part. Raises UpdateUnderWay if it is no part, and while another part is being received."""
        self._room.control.check("part" if part is not None else "update_weights")
        update = self._open
        assert update is not None
        assert part is not None
        if expected is not None:
            raise BadInput("expected", "is of a part of an update", hint="give it where the update ends")
        if version is not None:
            update.label = checked_version(version)
        self._stop_waiting(update)
        await self._room.changes.make("part", lambda: self._receive(update, part))

    async def _receive(self, update: _OpenUpdate, part: GroupTensors) -> None:
        try:
            # the result of all parts is compared at the end at the earliest
            whole = self._room.control.weights == "differs"
            receiving = self._room.loaders.receive(part, first=not update.parts, last=False, whole=whole)
            await self._room.changes.in_time("receiving weights", receiving)
        except WeightsRejected as error:
            self._open = None
            if update.parts:
                broken = WeightsBroken(f"{error.problem}; tensors before these have been replaced")
                raise self._updater.breaks(broken) from error
            raise
        except Exception as error:
            self._open = None
            self._updater.broke(error)
        update.parts += 1
        self._await_part(update)

    async def end(
        self, version: str | int | None, expected: str | WeightsFingerprint | None, order: int = 0, weights_id: str = ""
    ) -> None:
        """See `Engine.end_weight_update`. `order`, `weights_id`: as in `Asked`."""
        self._room.check()
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        self._room.control.check("end_weight_update")
        update = self._open
        assert update is not None
        if version is not None:
            update.label = checked_version(version)
        label = update.label or self._room.state.new_label(None)
        self._stop_waiting(update)
        if not update.parts:
            # nothing came, so nothing is new
            self._close()
            return
        self._open = None
        asked = Asked(label=label, order=order, mode=update.mode, expected=wanted, weights_id=weights_id)
        load = self._room.loaders.end_received
        await self._room.changes.make("end_weight_update", lambda: self._updater.update(asked, load, None))

    def has_label(self, version: str | int) -> bool:
        """Whether an update is open whose weights will have this label. Raises BadInput if it is no label."""
        label = checked_version(version)
        return self._open is not None and self._open.label == label

    def abandon(self) -> None:
        """See `Engine.abandon_weight_update`."""
        self._room.check()
        self._room.control.check("abandon_weight_update")
        if self._open is not None:
            self._lapse(self._open, "was abandoned")

    def stop(self) -> None:
        """The engine ends: stop waiting for the next part."""
        if self._open is not None:
            self._stop_waiting(self._open)

    def _await_part(self, update: _OpenUpdate) -> None:
        self._room.control.move("open")
        limit_s = self._room.runtime.update_limit_s
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
            self._updater.breaks(WeightsBroken(f"an update in parts {what}, after {update.parts} of them"))
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._stop_waiting(self._open)
            self._open = None
        self._room.changes.end()
