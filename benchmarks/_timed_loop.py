"""A uvloop loop that takes the time of every callback: the loop's engine uses, with a stopwatch around each turn.

Tasks step, futures call back, timers fire and sockets report through `call_soon`, `call_later`, `add_reader` and
`add_writer`: whatever these run is timed, in CPU time of the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedLoop(uvloop.Loop):
    """Attributes:
    longest_s: of the callbacks since `reset`, in seconds of CPU time; what the stopwatch takes is in it.
    longest: which one that was.
    callbacks: how many.
    """

    longest_s = 0.0
    longest = ""
    callbacks = 0

    def reset(self) -> None:
        self.longest_s, self.longest, self.callbacks = 0.0, "", 0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(self._timed, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        # `call_at` comes this way too
        return super().call_later(delay, self._timed, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]
        return super().add_reader(fd, self._timed, callback, *args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]
        return super().add_writer(fd, self._timed, callback, *args)

    def _timed(self, callback: Callable[..., Any], *args: Any) -> None:
        started = time.thread_time()
        try:
            callback(*args)
        finally:
            spent = time.thread_time() - started
            self.callbacks += 1
            if spent > self.longest_s:
                self.longest_s = spent
                self.longest = _name_of(callback)


def _name_of(callback: Callable[..., Any]) -> str:
    """Of a task's step: the coroutine's. No paths: it stands in figures that are kept."""
    owner = getattr(callback, "__self__", None)
    named = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
    return str(getattr(named, "__qualname__", type(named).__name__))


class Ticker:
    """How late a 1 ms timer of this loop came while the block ran, in seconds of wall time."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            self.late_s.append(max(loop.time() - due, 0.0))
