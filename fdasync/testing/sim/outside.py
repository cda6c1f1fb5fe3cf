"""A selector loop that knows of the work outside of it: it counts what runs in threads, and refuses child processes.

Virtual time has no length for work that a thread or a process does in real time. `SimLoop` therefore stands still while
work in threads is under way, and ends with `NotSimulated` where it cannot know that something is under way. Knows no
virtual time and no engines. Called by `sim/loop.py` alone.
"""

from __future__ import annotations

import asyncio
import os
import threading  # threads: names the thread that called the loop; starts none
from concurrent.futures import Executor, Future, ThreadPoolExecutor  # threads: a test's own work, as asyncio runs it
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NotSimulated(RuntimeError):
    """The test needs something that runs in real time, and that virtual time cannot wait for.

    Attributes:
        what: the thing that was met, in words.
        instead: the way out.
    """

    def __init__(self, what: str, instead: str) -> None:
        self.what = what
        self.instead = instead
        super().__init__(f"{what}, which virtual time cannot wait for: {instead}")


_ORDINARY = "run this test on an ordinary loop (asyncio.run)"


class OutsideLoop(asyncio.SelectorEventLoop):
    """See the module.

    Attributes:
        away: work that `run_in_executor` gave to threads or processes, and whose end has not come back.
        stranger: the first thread that called the loop though no such work was given to it; "" if there was none.
    """

    def __init__(self, *args: Any) -> None:
        self.away: set[Future[Any]] = set()
        self.stranger = ""
        self._threads: Executor | None = None
        super().__init__(*args)

    def set_default_executor(self, executor: ThreadPoolExecutor) -> None:  # type: ignore[override]  # as the loop checks
        super().set_default_executor(executor)
        self._threads = executor

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As in asyncio; the work is in `away` until its end has come back, also if its future was cancelled."""
        if executor is None and self._threads is None:
            self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))
        executor = executor or self._threads
        assert executor is not None
        work = executor.submit(func, *args)
        self.away.add(work)
        future: asyncio.Future[T] = self.create_future()
        # work that has not begun is cancelled with its future
        future.add_done_callback(lambda _: work.cancel())
        work.add_done_callback(lambda _: self._came_back(work, future))
        return future

    def _came_back(self, work: Future[T], future: asyncio.Future[T]) -> None:
        # in the thread that ended it; a loop that gave it up may be closed
        if not self.is_closed():
            super().call_soon_threadsafe(self._deliver, work, future)

    def _deliver(self, work: Future[T], future: asyncio.Future[T]) -> None:
        self.away.discard(work)
        if future.done():
            return
        if work.cancelled():
            future.cancel()
        elif (error := work.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(work.result())

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio; a call from another thread makes that thread the `stranger`."""
        if self.is_running() and asyncio._get_running_loop() is not self:
            self.stranger = self.stranger or threading.current_thread().name
        return super().call_soon_threadsafe(callback, *args, context=context)

    def refuse_stranger(self) -> NoReturn:
        """Raise NotSimulated for the stranger, which is told once."""
        stranger, self.stranger = self.stranger, ""
        way = "give its work to asyncio.to_thread or loop.run_in_executor, and let the result come back by its return"
        raise NotSimulated(f"thread {stranger} called the loop", f"{way}, or {_ORDINARY}")

    async def subprocess_exec(self, protocol_factory: object, program: object, *args: Any, **options: Any) -> NoReturn:
        """Raises NotSimulated."""
        del protocol_factory, args, options
        raise NotSimulated(f"child process {program!r:.200}", f"put a fake in its place, or {_ORDINARY}")

    async def subprocess_shell(self, protocol_factory: object, cmd: object, **options: Any) -> NoReturn:
        """Raises NotSimulated."""
        await self.subprocess_exec(protocol_factory, cmd, **options)

    def add_reader(self, fd: Any, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        """As in asyncio. Raises NotSimulated for a pidfd, by which somebody waits for the end of a child process."""
        number = fd if isinstance(fd, int) else fd.fileno()
        if "[pidfd]" in os.readlink(f"/proc/self/fd/{number}"):
            raise NotSimulated("a child process", f'run the engine in this process (process="inline"), or {_ORDINARY}')
        super().add_reader(fd, callback, *args)

    def close(self) -> None:
        # idle threads end at once; the loop does not wait for busy ones, but the interpreter does at its end
        if self._threads is not None:
            self._threads.shutdown(wait=not self.away, cancel_futures=True)
        super().close()
