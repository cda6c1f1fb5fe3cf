"""A trainer's process groups, which workers join and leave while no step is in flight and no update is open.

A join first waits until somebody answers where the trainer's store is said to be; steps go on meanwhile. Then it pauses
until the ranks have met. Whoever wants it no more ends it: its caller by going away, others by leaving the group. Knows
no tensors. Called by `engine/engine.py` and `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.engine.weights.changes import Stopped
from fdasync.engine.weights.control import Joining
from fdasync.engine.weights.source import check_group
from fdasync.errors import FdasyncError, WeightsRejected, WorkerStuck
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from fdasync.engine.weights.room import Room
    from fdasync.request import WeightsGroup

# beyond a group's own limit: a worker tells by itself who did not come
_JOIN_GRACE_S = 40.0
_LEAST_S = 0.01


class Groups:
    """See the module.

    Args:
        interface: that workers may listen on; "": the loopback one alone.
    """

    def __init__(self, room: Room, interface: str) -> None:
        self._room = room
        self._interface = interface

    @property
    def joins(self) -> bool:
        """Whether a group is being joined."""
        return self._room.control.joining is not None

    async def join(self, group: WeightsGroup) -> None:
        """See `Engine.join_weights_group`."""
        self._room.check()
        check_group(group, self._room.runtime.capacity.tensor_parallel, self._interface)
        self._room.control.check("join_weights_group")
        until = asyncio.get_running_loop().time() + group.timeout_s
        self._room.control.joining = Joining(group.name, f"{group.address}:{group.port}", until)
        try:
            await self._room.changes.make("join_weights_group", lambda: self._reach_and_meet(group, until), leaves=True)
        except Stopped as error:
            raise WeightsRejected(f"group {group.name!r} was not joined: {error.why}") from None

    def stop(self, why: str) -> None:
        """End a join that is under way, in a moment; its caller hears why."""
        if self.joins:
            self._room.changes.stop(why)

    async def _reach_and_meet(self, group: WeightsGroup, until: float) -> None:
        loop = asyncio.get_running_loop()
        late = f"nobody answers at {group.address}:{group.port}, where its store should be"
        try:
            async with Within(until - loop.time()):
                await self._room.runtime.runner.reach_group(group)
            late = "its ranks have not met"
            await self._meet(group, max(until - loop.time(), _LEAST_S))
        except TimeoutError:
            self._room.check()
            raise WeightsRejected(f"group {group.name!r}: {late}, for {group.timeout_s:g} s") from None
        except FdasyncError as error:
            # raises the engine's failure where the worker died
            self._room.check()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"group {group.name!r}: {type(error).__name__}: {error}") from error

    async def _meet(self, group: WeightsGroup, limit_s: float) -> None:
        runner = self._room.runtime.runner
        # from here on it keeps the engine from planning steps
        self._room.control.move("meeting")
        await self._room.pausing.quiet()
        try:
            # a worker may wait for the others without answering
            async with Within(limit_s + _JOIN_GRACE_S):
                await runner.join_group(group, self._interface, limit_s)
        except WorkerStuck as error:
            self._room.fail(error)
            self._room.check()
        except (TimeoutError, asyncio.CancelledError):
            # of several ranks some may have joined
            await self._room.changes.in_time("leaving a group", runner.leave_group(group.name))
            raise

    async def leave(self, name: str) -> None:
        """See `Engine.leave_weights_group`."""
        self._room.check()
        joining = self._room.control.joining
        if joining is not None and joining.name == name:
            self.stop("it was left meanwhile")
            await self._room.changes.ended()
        await self._room.changes.make("leave_weights_group", lambda: self._leave(name))

    async def _leave(self, name: str) -> None:
        # closing a connection takes a moment, in which the worker does nothing else
        await self._room.pausing.quiet()
        await self._room.changes.in_time("leaving a group", self._room.runtime.runner.leave_group(name))
