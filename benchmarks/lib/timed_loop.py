"""A uvloop loop that measures every callback, in CPU time of the loop's thread.

Steps of tasks, callbacks of futures, timers and sockets all run through `call_soon`, `call_later`, `add_reader` and
`add_writer`, which this loop overrides. Knows no engine. Used by the benchmarks of stores and transports.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedLoop(uvloop.Loop):
    """See the module.

    Attributes:
        longest_s: of the longest callback since `reset`, in seconds of CPU time, the measurement's own included.
        longest: name of that callback.
        spent_s: of all callbacks since `reset`, likewise.
        callbacks: number of callbacks since `reset`.
    """

    longest_s = 0.0
    longest = ""
    spent_s = 0.0
    callbacks = 0

    def reset(self) -> None:
        self.longest_s, self.longest, self.spent_s, self.callbacks = 0.0, "", 0.0, 0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # looser
        return super().call_soon(self._timed, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # looser
        # uvloop's `call_at` calls this too
        return super().call_later(delay, self._timed, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]  # looser
        return super().add_reader(fd, self._timed, callback, *args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]  # looser
        return super().add_writer(fd, self._timed, callback, *args)

    def _timed(self, callback: Callable[..., Any], *args: Any) -> None:
        started = time.thread_time()
        try:
            callback(*args)
        finally:
            spent = time.thread_time() - started
            self.callbacks += 1
            self.spent_s += spent
            if spent > self.longest_s:
                self.longest_s = spent
                self.longest = _name_of(callback)


def _name_of(callback: Callable[..., Any]) -> str:
    """The name of a callback, of a task's step its coroutine's; without paths, since recorded figures hold it."""
    owner = getattr(callback, "__self__", None)
    named = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
    return str(getattr(named, "__qualname__", type(named).__name__))


class Ticker:
    """Measures how late a 1 ms timer of this loop fires while the body runs, in seconds of wall time (`late_s`)."""

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
