"""The task of an update: one at a time, left to its end by a caller who is cancelled, its calls of the runner bounded.

Knows no weights and no schedule. Called by the modules of this room that change weights or groups.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.errors import INTERRUPTS, DeadlineExceeded, EngineClosed, TaskCancelled
from fdasync.ipc.deadlines import Within, wait_within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.state import WeightsState

T = TypeVar("T")


class UpdateTask:
    """See the module.

    Args:
        fail: ends the engine.
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        state: WeightsState,
        runtime: Runtime,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self._state = state
        self._runtime = runtime
        self._fail = fail
        self._check = check
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a task, other than an update in parts that waits for its next part."""
        return self._task is not None

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of an update as a task, and wait for it. A caller who is cancelled stops waiting."""
        self._state.updating = True
        self._task = task = asyncio.get_running_loop().create_task(work, name="fdasync-weights")
        task.add_done_callback(self._ended)
        # an update that the engine's end cut short cancels no caller
        await asyncio.wait([task])
        take_end(task, self._check)

    def finish(self) -> None:
        """The work is done: nothing is under way any more, or an update in parts is still open."""
        self._state.updating = self._state.is_open
        if self._runtime.driver is not None:
            # a pause that waits for requests looks again
            self._runtime.driver.tell()

    def _ended(self, task: asyncio.Task[None]) -> None:
        # the next update may have begun in the turn in which this one ended
        if self._task is task:
            self._task = None
            # a task that was cancelled before its first step has not called `finish`
            self._state.updating = self._state.is_open
        if task.cancelled():
            if not self._state.closing:
                # `asyncio.run` cancels all tasks at its end: the runner may lack whole weights
                self._fail(TaskCancelled("fdasync-weights"))
        elif (error := task.exception()) is not None and not isinstance(error, Exception):
            # an interrupt, which has reached the program: what the runner holds is not known
            self._fail(error)

    async def in_time(self, what: str, work: Awaitable[T]) -> T:
        """Wait for work of the runner; fails the engine where it takes longer than an update may."""
        limit_s = self._runtime.update_limit_s
        try:
            async with Within(limit_s):
                return await work
        except TimeoutError as error:
            late = not isinstance(error, DeadlineExceeded)
            self._fail(self._runtime.runner.overdue(what, limit_s) if late else error)
            self._check()
            raise

    async def aclose(self, limit_s: float) -> None:
        """Stop it."""
        if self._task is not None:
            self._task.cancel()
            # all that it awaits can be cancelled: it ends within a turn or two
            await wait_within([self._task], limit_s)


def take_end(task: asyncio.Task[None], check: Callable[[], None]) -> None:
    """Raise what a task of this room raised, which is done; the engine's end where that cut it short. An interrupt
    has failed the engine, and reached the program, already.

    Args:
        check: raises unless the engine is running.
    """
    if task.cancelled():
        check()
        raise EngineClosed("closing")
    if isinstance(task.exception(), INTERRUPTS):
        check()
    task.result()  # of a task that is done
