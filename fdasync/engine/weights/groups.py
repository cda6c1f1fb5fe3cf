"""A trainer's process groups, which workers join and leave while no step is in flight and no update is open.

A join first waits until somebody answers where the trainer's store is said to be; steps go on meanwhile. Then it pauses
until the ranks have met. Whoever wants it no more ends it: its caller by going away, others by leaving the group. Knows
no tensors. Called by `engine/engine.py` and `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.engine.weights.source import check_group
from fdasync.engine.weights.state import Joining
from fdasync.engine.weights.tasks import take_end
from fdasync.errors import FdasyncError, WeightsRejected, WorkerStuck
from fdasync.ipc.deadlines import Within, wait_within

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.pausing import Pausing
    from fdasync.engine.weights.state import WeightsState
    from fdasync.engine.weights.tasks import UpdateTask
    from fdasync.request import WeightsGroup

# beyond a group's own limit: a worker tells by itself who did not come
_JOIN_GRACE_S = 40.0
_LEAST_S = 0.01


class _Join:
    """A join that is under way, or has ended.

    Attributes:
        task: its work.
        why: what ended it before its time; "": nothing has.
    """

    __slots__ = ("task", "why")

    def __init__(self, work: Callable[[_Join], Coroutine[Any, Any, None]]) -> None:
        self.why = ""
        self.task = asyncio.get_running_loop().create_task(work(self), name="fdasync-join")

    def stop(self, why: str) -> None:
        """End it in a moment, unless it has ended; its caller hears why."""
        if not self.task.done() and not self.why:
            self.why = why
            self.task.cancel()


class Groups:
    """See the module.

    Args:
        interface: that workers may listen on; "": the loopback one alone.
        fail: ends the engine.
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        state: WeightsState,
        pausing: Pausing,
        task: UpdateTask,
        runtime: Runtime,
        interface: str,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self._state = state
        self._pausing = pausing
        self._task = task
        self._runtime = runtime
        self._interface = interface
        self._fail = fail
        self._check = check
        self._join: _Join | None = None

    @property
    def joins(self) -> bool:
        """Whether a group is being joined."""
        return self._state.joining is not None

    async def join(self, group: WeightsGroup) -> None:
        """See `Engine.join_weights_group`."""
        self._check()
        check_group(group, self._runtime.capacity.tensor_parallel, self._interface)
        self._state.check_idle()
        self._state.check_still()
        loop = asyncio.get_running_loop()
        until = loop.time() + group.timeout_s
        self._state.joining = Joining(group.name, f"{group.address}:{group.port}", until)
        self._join = join = _Join(lambda join: self._reach_and_meet(join, group, until))
        join.task.add_done_callback(self._ended)
        try:
            # bounded by the group's limit
            await asyncio.wait([join.task])
        except asyncio.CancelledError:
            join.stop("its caller went away")
            raise
        if join.task.cancelled() and join.why:
            # before its first step
            raise _stopped(group, join)
        take_end(join.task, self._check)

    def stop(self, why: str) -> None:
        """End a join that is under way, in a moment; its caller hears why."""
        if self._join is not None:
            self._join.stop(why)

    async def _reach_and_meet(self, join: _Join, group: WeightsGroup, until: float) -> None:
        loop = asyncio.get_running_loop()
        late = f"nobody answers at {group.address}:{group.port}, where its store should be"
        try:
            async with Within(until - loop.time()):
                await self._runtime.runner.reach_group(group)
            late = "its ranks have not met"
            await self._meet(group, max(until - loop.time(), _LEAST_S))
        except asyncio.CancelledError:
            if not join.why:
                raise
            raise _stopped(group, join) from None
        except TimeoutError:
            self._check()
            raise WeightsRejected(f"group {group.name!r}: {late}, for {group.timeout_s:g} s") from None
        except FdasyncError as error:
            # raises the engine's failure where the worker died
            self._check()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"group {group.name!r}: {type(error).__name__}: {error}") from error

    async def _meet(self, group: WeightsGroup, limit_s: float) -> None:
        runner = self._runtime.runner
        # from here on it keeps the engine from planning steps
        self._state.updating = True
        try:
            await self._pausing.quiet()
            try:
                # a worker may wait for the others without answering
                async with Within(limit_s + _JOIN_GRACE_S):
                    await runner.join_group(group, self._interface, limit_s)
            except WorkerStuck as error:
                self._fail(error)
                self._check()
            except (TimeoutError, asyncio.CancelledError):
                # of several ranks some may have joined
                await self._task.in_time("leaving a group", runner.leave_group(group.name))
                raise
        finally:
            self._task.finish()
            self._pausing.go_on()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._state.joining = None
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Exception):
            # an interrupt, which has reached the program: what the runner holds is not known
            self._fail(error)

    async def leave(self, name: str) -> None:
        """See `Engine.leave_weights_group`."""
        self._check()
        joining = self._state.joining
        if joining is not None and joining.name == name and self._join is not None:
            self.stop("it was left meanwhile")
            # a worker that does not give it up is killed
            await asyncio.wait([self._join.task])
            self._check()
        self._state.check_idle()
        self._state.check_still()
        await self._task.run(self._leave(name))

    async def _leave(self, name: str) -> None:
        try:
            # closing a connection takes a moment, in which the worker does nothing else
            await self._pausing.quiet()
            await self._task.in_time("leaving a group", self._runtime.runner.leave_group(name))
        finally:
            self._task.finish()
            self._pausing.go_on()

    async def aclose(self, limit_s: float) -> None:
        """End a join that is under way."""
        if self._join is not None and not self._join.task.done():
            self._join.task.cancel()
            await wait_within([self._join.task], limit_s)


def _stopped(group: WeightsGroup, join: _Join) -> WeightsRejected:
    return WeightsRejected(f"group {group.name!r} was not joined: {join.why}")
