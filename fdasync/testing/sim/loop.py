"""An event loop in virtual time: hours pass in milliseconds, and the same code gives the same order.

`SimLoop` is the stdlib's selector loop with a clock of its own. Time stands still while anything is ready and jumps to
the next timer when nothing is, so a timeout never beats code that needs no time. Timers that are due at the same moment
fire one by one, in the order they were set; the loop runs all consequences of a timer before the next. When nothing is
ready and no timer is set the loop raises `Deadlock` and names the waiting tasks. It does so too when its time is up:
timers that only repeat (an open engine has one) would keep a test that waits for ever running for ever.

Real sockets and pipes between tasks of the same loop work. Work that asyncio gives to threads takes no time: the clock
stands still until it has ended. Other threads, child processes and other machines do not work (`outside.py`). The
module knows nothing of engines. Called by `run_sim`, which the pytest plugin hands out.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from fdasync.errors import BadInput
from fdasync.testing.sim.outside import NotSimulated, OutsideLoop
from fdasync.testing.sim.process import Guarded, process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_NS = 1_000_000_000
_MAX_TURNS_PER_MOMENT = 200_000
_MIN_TAKEN = 4096
# of real time; busy machines are slow
_THREADS_S = 120.0
# rounds of cancelling at the end of a run that failed
_MAX_ROUNDS = 8


class Deadlock(RuntimeError):
    """A run that does not end: nothing is ready and no timer is set, or the time of the run is up.

    Attributes:
        reason: which of them, in words.
        waiting: one line for each task that is not done: its name, and where it waits, from its own coroutine to the
            innermost one.
    """

    def __init__(self, reason: str, waiting: list[str]) -> None:
        self.reason = reason
        self.waiting = waiting
        super().__init__("\n  ".join([f"{reason}; these tasks wait:", *waiting]))


class Livelock(RuntimeError):
    """The loop is always busy and its time stands still: a task polls without a timer."""


class _SimSelector(selectors.BaseSelector):
    """The real selector, which waits for work in threads alone: another wait moves the loop's clock instead."""

    def __init__(self) -> None:
        self.loop: SimLoop
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        if loop.stranger:
            loop.refuse_stranger()
        # the loop's own pipe, which wakes it for threads and signals, is always there
        ready = self._real.select(0) if timeout is None or len(self._real.get_map()) > 1 else []
        if ready:
            return ready
        if loop.away and timeout != 0:
            return self._real.select(loop.threads_s) or loop.never_back()
        loop.nothing_ready(timeout)
        return ready


class SimLoop(OutsideLoop):
    """See the module. `time()` starts at 0 and counts whole nanoseconds.

    Attributes:
        turns: iterations of the loop so far.
        limit_s: no timer that is set at this virtual time or later is waited for; `run_sim` sets it.
        threads_s: how long the loop waits for work in threads, in seconds of real time.
    """

    threads_s = _THREADS_S

    def __init__(self) -> None:
        selector = _SimSelector()
        selector.loop = self
        self.turns = 0
        self.limit_s = math.inf
        self._time_is_up = False
        self._now_ns = 0
        self._last_moment = 0
        self._taken: set[int] = set()
        self._taken_limit = _MIN_TAKEN
        super().__init__(selector)
        # timers are whole nanoseconds apart, so half of one never takes two at once
        self._clock_resolution = 0.5 / _NS

    def time(self) -> float:
        return self._now_ns / _NS

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio, but no two timers share a moment: the later set one fires a nanosecond later."""
        # of a wait that began before, the loop makes several: they are for timers that were set before
        self._time_is_up = self._now_ns >= self.limit_s * _NS
        # up, never down: a timer must not fire before its time
        moment = max(math.ceil(round(when * _NS, 3)), self._now_ns)
        while moment in self._taken:
            moment += 1
        self._taken.add(moment)
        if len(self._taken) > self._taken_limit:
            self._taken = {taken for taken in self._taken if taken >= self._now_ns}
            self._taken_limit = max(2 * len(self._taken), _MIN_TAKEN)
        context = copy_context() if context is None else context
        process = process_of(context)
        if process is None:
            return super().call_at(moment / _NS, callback, *args, context=context)
        guarded = Guarded(process, callback, args, context)
        guarded.handle = handle = super().call_at(moment / _NS, guarded, context=context)
        return handle

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio; a callback of a process (`process.py`) runs when its process does."""
        context = copy_context() if context is None else context
        process = process_of(context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        guarded = Guarded(process, callback, args, context)
        guarded.handle = handle = super().call_soon(guarded, context=context)
        return handle

    def nothing_ready(self, timeout: float | None) -> None:
        """Called by the selector when the loop would wait this long (None: for ever; 0: it would not)."""
        self.turns += 1
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set", self._waiting())
        if timeout > 0:
            if self._time_is_up:
                raise Deadlock(f"{self.limit_s:g} s of virtual time have passed (limit_s)", self._waiting())
            self.pass_time(timeout)
            self._last_moment = self.turns
        elif self.turns - self._last_moment > _MAX_TURNS_PER_MOMENT:
            self._last_moment = self.turns
            raise Livelock(f"{_MAX_TURNS_PER_MOMENT} turns of the loop at {self.time():g} s: a task polls")

    def pass_time(self, seconds: float) -> None:
        """Move the clock on."""
        self._now_ns += math.ceil(round(seconds * _NS, 3))

    def never_back(self) -> NoReturn:
        """Called by the selector when work in threads does not end."""
        reason = (
            f"work in a thread has not ended within {self.threads_s:g} s of real time, in which virtual time stands"
        )
        raise Deadlock(f"{reason} still: does the work wait for the loop?", self._waiting())

    def _waiting(self) -> list[str]:
        return sorted([f"{task.get_name()} in {_where(task)}" for task in asyncio.all_tasks(self)])


def _where(task: asyncio.Task[Any]) -> str:
    """The task's own coroutine, and the innermost one that it waits in."""
    inner: Any = task.get_coro()
    places = []
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        code = frame.f_code
        places.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        inner = inner.cr_await
    return " > ".join([*places[:1], *places[1:][-1:]]) or repr(inner)


def run_sim(main: Coroutine[Any, Any, T], loop: SimLoop | None = None, *, limit_s: float = 86_400.0) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` would.

    Args:
        loop: a fresh loop of a derived class, which is closed at the end; None: a `SimLoop`.
        limit_s: of virtual time, after which the run may begin no further wait. A wait that began before may be longer.

    Raises the coroutine's error; `Deadlock` when it can never end, or has not ended by its limit; `NotSimulated` when
    it needs a process or a thread that virtual time cannot wait for; BadInput for a limit that is no number above 0;
    RuntimeError when it leaves tasks behind.
    """
    if not limit_s > 0:
        main.close()
        raise BadInput("limit_s", f"is {limit_s!r:.100}", limit="a number above 0")
    loop = SimLoop() if loop is None else loop
    loop.limit_s = limit_s
    try:
        asyncio.set_event_loop(loop)
        try:
            result = loop.run_until_complete(main)
        except BaseException:
            _cancel_all(loop)
            raise
        left = [task.get_name() for task in asyncio.all_tasks(loop)]
        _cancel_all(loop)
        if left:
            raise RuntimeError(f"tasks were left behind: {', '.join(sorted(left))}")
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: SimLoop) -> None:
    # what closes has limits of its own
    loop.limit_s = math.inf
    # a cancelled task may start tasks that close its resources
    for _ in range(_MAX_ROUNDS):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=3600.0))
        except (Deadlock, Livelock, NotSimulated):
            # the error of the run is reported, not the error of its end
            return
        for task in tasks:
            # retrieved, so that asyncio does not warn of it
            _ = not task.done() or task.cancelled() or task.exception()
    loop.run_until_complete(loop.shutdown_asyncgens())
