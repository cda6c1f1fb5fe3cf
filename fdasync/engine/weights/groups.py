"""A trainer's process groups, which workers join and leave while no step is in flight and no update is open.

Knows no tensors. Called by `engine/engine.py` and `pd/instance/instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.engine.weights.source import check_group
from fdasync.errors import FdasyncError, WeightsRejected
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.pausing import Pausing
    from fdasync.engine.weights.state import WeightsState
    from fdasync.engine.weights.tasks import UpdateTask
    from fdasync.request import WeightsGroup

# beyond a group's own limits
_JOIN_GRACE_S = 10.0


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

    async def join(self, group: WeightsGroup) -> None:
        """See `Engine.join_weights_group`."""
        self._check()
        check_group(group, self._runtime.capacity.tensor_parallel, self._interface)
        self._state.check_idle()
        self._state.check_still()
        await self._task.run(self._join(group))

    async def _join(self, group: WeightsGroup) -> None:
        runner = self._runtime.runner
        limit_s = 2 * group.timeout_s + _JOIN_GRACE_S
        try:
            # a worker may wait for the others without answering
            await self._pausing.quiet()
            async with Within(limit_s):
                await runner.join_group(group, self._interface)
        except TimeoutError:
            self._fail(runner.overdue("joining a group", limit_s))
            self._check()
        except FdasyncError as error:
            # raises the engine's failure where the worker died
            self._check()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"{type(error).__name__}: {error}") from error
        finally:
            self._task.finish()
            self._pausing.go_on()

    async def leave(self, name: str) -> None:
        """See `Engine.leave_weights_group`."""
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
