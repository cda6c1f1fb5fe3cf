"""Event loops whose clock a test can move on, so that a block of minutes costs no minutes.

A test marked `skips` runs on such a loop. `block` stands for a call of the user's that blocks the loop: it blocks it
for real until what the test waits for has come (an answer that lies unread in a socket), and moves the clock on by as
long as the call would have taken. So limits of minutes pass, and no answer of a busy machine is late. What is overdue
is called in the next turn as by the loops below it: on uvloop before sockets are read.
"""

from __future__ import annotations

import asyncio
import select
import time
from typing import TYPE_CHECKING, Any

import uvloop

from fdasync.cache.store.process.proxy import ProcessStore
from tests.support.helpers import hold_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.engine import Engine
    from fdasync.ipc.rpc import RpcClient

#: what a call or a step may take, for tests that skip it: no machine is so busy that one takes it
LIMIT_S = 600.0
#: how long a block is for the loop
BLOCKED_S = 4 * LIMIT_S
# what is waited for with the loop blocked is there by then, or it never comes
_HANG_S = 300.0
_LOOK_S = 0.002


class SkippedSelectorLoop(asyncio.SelectorEventLoop):
    """The stdlib's, which asks `time` at each turn."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s

    def skip(self, seconds: float) -> None:
        self.skipped_s += seconds


class _Timer(asyncio.TimerHandle):
    """A timer of uvloop's that can be set anew."""

    inner: asyncio.Handle


class SkippedUvloop(uvloop.Loop):
    """uvloop, whose timers know nothing of `time`: they are kept, and set anew when the clock moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        # by id: timers may be equal
        self._timers: dict[int, _Timer] = {}

    def time(self) -> float:
        return super().time() + self.skipped_s

    def skip(self, seconds: float) -> None:
        self.skipped_s += seconds
        for timer in sorted(self._timers.values()):
            timer.inner.cancel()
            self._set(timer)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        timer = _Timer(when, callback, args, self, context)
        self._timers[id(timer)] = timer
        self._set(timer)
        return timer

    def _set(self, timer: _Timer) -> None:
        # without a delay: in the next turn
        timer.inner = super().call_later(max(timer.when() - self.time(), 0.0), self._fire, timer)

    def _fire(self, timer: _Timer) -> None:
        del self._timers[id(timer)]
        timer._run()

    def _timer_handle_cancelled(self, timer: _Timer) -> None:
        # as asyncio's handles ask of their loop
        if self._timers.pop(id(timer), None) is not None:
            timer.inner.cancel()


def block(until: Callable[[], object] = lambda: True, seconds: float = BLOCKED_S) -> None:
    """Block the running loop until this holds, and move its clock on by so many seconds."""
    begun = time.monotonic()
    while not until():
        assert time.monotonic() < begun + _HANG_S, "what the loop is blocked for does not come"
        hold_up(_LOOK_S)
    loop: Any = asyncio.get_running_loop()
    loop.skip(seconds)


async def go_on(done: Callable[[], object], stands: Callable[[], object]) -> None:
    """Let the loop turn until `done` holds, and block it whenever `stands` says that only time will change anything."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() < begun + _HANG_S, "what is waited for does not come"
        if stands():
            block()
        await asyncio.sleep(_LOOK_S)


def is_left_or_stuck(engine: Engine, pid: int) -> bool:
    """Only time changes anything for this engine's store: its breaker rests, or this process does not answer it."""
    store = engine._runtime.store
    assert store is not None
    assert isinstance(store.inner, ProcessStore)
    child = store.inner._child
    is_asked = child is not None and child.process.pid == pid and bool(child._calls)
    return is_asked or store.breaker.state == "open"


def blocked_steps(engine: Engine) -> Callable[[], bool]:
    """Only time ends the engine's oldest step: true once for each, since a block outlasts what a step may take."""
    skipped: set[int] = set()

    def stands() -> bool:
        runtime = engine._runtime
        if engine._failure is not None or runtime is None or not runtime.driver._steps:
            return False
        step_id, _ = runtime.driver._steps[0]
        is_new = step_id not in skipped
        skipped.add(step_id)
        return is_new

    return stands


def said(child: RpcClient) -> bool:
    """It has said something that the loop has not read."""
    poll = select.poll()
    poll.register(child.process.channel._sock, select.POLLIN)
    return bool(poll.poll(0))
