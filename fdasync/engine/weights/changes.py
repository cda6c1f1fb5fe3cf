"""The change that is under way, as a task.

A caller who is cancelled leaves it to its end. A join, and the begin of an update in parts, end with their caller. What
a change asks of the runner has a deadline. At its end the engine goes on, unless something else keeps it from that.
Knows no weights and no memory. Called by the other modules of this room.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.engine.weights.control import CALLS
from fdasync.errors import INTERRUPTS, DeadlineExceeded, EngineClosed, TaskCancelled
from fdasync.ipc.deadlines import Within, wait_within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.control import Change, Control
    from fdasync.engine.weights.pausing import Pausing

    Work = Callable[[], Coroutine[Any, Any, None]]

T = TypeVar("T")


class Stopped(Exception):
    """A change was ended before its time.

    Attributes:
        why: for its caller.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Made:
    """A change that is under way, or waits for its turn.

    Attributes:
        why: what ended it before its time; "": nothing has.
    """

    __slots__ = ("task", "why")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.why = ""

    def stop(self, why: str) -> None:
        """End it in a moment, unless it has ended."""
        if not self.task.done() and not self.why:
            self.why = why
            self.task.cancel()


class Changes:
    """See the module; arguments as in `Room`."""

    def __init__(
        self,
        control: Control,
        pausing: Pausing,
        runtime: Runtime,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self._control = control
        self._pausing = pausing
        self._runtime = runtime
        self._fail = fail
        self._check = check
        # all but `_running` wait for their turn
        self._made: dict[asyncio.Task[None], _Made] = {}
        self._running: _Made | None = None

    async def make(self, call: str, work: Work, *, leaves: bool = False) -> None:
        """Make the change of this call, and wait for its end. Raises what refuses the call, and what the change raises.

        A cancelled caller stops waiting. `leaves`: the change then ends, and the caller waits for its end.
        """
        self._control.check(call)
        if self._control.waits(call):
            made = self._start(call, self._in_turn(call, work))
        else:
            self._control.move(CALLS[call].begins)
            self._running = made = self._start(call, work())
        try:
            # a change that the engine's end cut short cancels no caller
            await asyncio.wait([made.task])
        except asyncio.CancelledError:
            if leaves:
                made.stop("its caller went away")
                # the caller's next call meets nothing of it. Bounded by the change, and by a second cancellation
                await asyncio.wait([made.task])
            raise
        self._take_end(made)

    def stop(self, why: str) -> None:
        """End the change that is under way in a moment; its caller gets Stopped."""
        if self._running is not None:
            self._running.stop(why)

    async def ended(self) -> None:
        """Wait for the end of the change that is under way. Raises the engine's end."""
        if self._running is not None:
            # bounded by the limits of the change; a worker that does not give it up is killed
            await asyncio.wait([self._running.task])
        self._check()

    def end(self) -> None:
        """Nothing is under way any more."""
        self._control.move("nothing")
        self._pausing.go_on()
        if self._runtime.driver is not None:
            # a pause that waits for requests looks again
            self._runtime.driver.tell()

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

    async def aclose(self, limit_s: float) -> Change:
        """End all changes, as the engine ends; returns what was under way."""
        before = self._control.change
        self._control.move("closing")
        if tasks := list(self._made):
            for task in tasks:
                task.cancel()
            # all that they await can be cancelled: they end within a turn or two
            await wait_within(tasks, limit_s)
        return before

    async def _in_turn(self, call: str, work: Work) -> None:
        control = self._control
        while control.waits(call):
            await self.ended()
            control.check(call)
        control.move(CALLS[call].begins)
        task = asyncio.current_task()
        assert task is not None
        self._running = self._made[task]
        await work()

    def _start(self, call: str, work: Coroutine[Any, Any, None]) -> _Made:
        task = asyncio.get_running_loop().create_task(work, name=f"fdasync-{call}")
        self._made[task] = made = _Made(task)
        task.add_done_callback(self._ended)
        return made

    def _ended(self, task: asyncio.Task[None]) -> None:
        made, control = self._made.pop(task), self._control
        ran = self._running is made
        if ran:
            self._running = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() and not made.why and control.change != "closing":
            # `asyncio.run` cancels all tasks at its end: what the runner holds is not known
            self._fail(TaskCancelled(task.get_name()))
        elif error is not None and not isinstance(error, Exception):
            # an interrupt, which has reached the program: what the runner holds is not known
            self._fail(error)
        elif ran and control.change not in ("open", "nothing"):
            # an update in parts is open, or was closed in the turn in which it came to be
            self.end()

    def _take_end(self, made: _Made) -> None:
        """Raise what it raised; the engine's end where that cut it short. An interrupt has failed the engine, and
        reached the program, already."""
        if made.task.cancelled():
            self._check()
            raise Stopped(made.why) if made.why else EngineClosed("closing")
        if isinstance(made.task.exception(), INTERRUPTS):
            self._check()
        made.task.result()  # of a task that is done
