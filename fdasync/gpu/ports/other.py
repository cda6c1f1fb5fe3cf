"""The other completion ports: a host function of the driver, a thread, and a fake with events fired by hand.

`completion.py` has the contract. The first two are slower than `adaptive.py` and cost less CPU on long works. The fake
is for tests, also in virtual time, and for devices without streams, whose work is done when the call returns.
Called by runners and tests.
"""

from __future__ import annotations

import asyncio
import queue
import threading  # threads: ThreadPort is one, and off by default; FakeEvent can be waited for in it
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from fdasync.errors import DeviceFailed, InvariantBroken
from fdasync.gpu.completion import CompletionPort
from fdasync.gpu.ports.native import Notifier, cuda_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fdasync.gpu.completion import DeviceEvent, Work

_WATCHDOG_S = 0.25
# milliseconds that the end of a port waits for its threads
_TRIES = 5000
_STUCK_TRIES = 50


class NotifyStream(Protocol):
    """What the host-function port needs of a stream; `torch.cuda.Stream` has it."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_event(self, event: Any) -> None: ...


class _Notices:
    """One lane of the host-function port: its side stream, its fd, and the works without a notice yet."""

    __slots__ = ("notifier", "stream", "waiting")

    def __init__(self, stream: NotifyStream, notifier: Notifier) -> None:
        self.stream = stream
        self.notifier = notifier
        self.waiting: deque[Work] = deque()


class HostFunctionPort(CompletionPort):
    """The driver calls a libc function behind each event, on a side stream of the lane; that wakes the loop.

    The callback may never come after an error of the device, so a coarse timer asks too while anything is in flight.

    Args:
        stream: makes a side stream for a lane, e.g. `lambda lane: torch.cuda.Stream(device)`.
        launch: see `native.cuda_launcher`; None takes that.

    Raises OSError where there is no CUDA driver.
    """

    name: ClassVar[str] = "hostfunc"

    def __init__(
        self,
        stream: Callable[[str], NotifyStream],
        *,
        launch: Callable[[int, int, int], None] | None = None,
        watchdog_s: float = _WATCHDOG_S,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._launch = cuda_launcher() if launch is None else launch
        self._watchdog_s = watchdog_s
        self._notices: dict[str, _Notices] = {}
        self._watchdog: asyncio.TimerHandle | None = None

    def _open_lane(self, lane: str) -> None:
        def news(_: int) -> None:
            self._drain(lane)
            if not self._stopped:
                self._ask(lane)

        self._notices[lane] = _Notices(self._stream(lane), Notifier(self._loop, news))

    def _given(self, work: Work) -> None:
        self._notices[work.lane].waiting.append(work)
        self._ask(work.lane)
        if self._watchdog is None and not self._stopped:
            # bare timer: a look every so often
            self._watchdog = self._loop.call_later(self._watchdog_s, self._watch)

    def _ask(self, lane: str) -> None:
        """Have the driver tell of the works of this lane, of as many as there are files for."""
        notices = self._notices[lane]
        try:
            while notices.waiting:
                if notices.waiting[0].finished:
                    notices.waiting.popleft()
                    continue
                file = notices.notifier.load()
                if file is None:
                    # those that are out come first: their news asks again
                    return
                notices.stream.wait_event(notices.waiting.popleft().event)
                self._launch(notices.stream.cuda_stream, notices.notifier.function, file)
        except Exception as error:  # torch's and the driver's errors: the device is not usable
            self._fail(f"{type(error).__name__}: {error}")

    def _watch(self) -> None:
        self._watchdog = None
        for lane in list(self._lanes):
            if not self._stopped:
                self._drain(lane)
        if self._in_flight and not self._stopped:
            # bare timer: a look every so often
            self._watchdog = self._loop.call_later(self._watchdog_s, self._watch)

    def _stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        for notices in self._notices.values():
            notices.notifier.close()
            notices.waiting.clear()


class ThreadPort(CompletionPort):
    """A daemon thread for each lane, which blocks in `event.synchronize()`; make the events with `blocking=True`.

    A thread that is blocked when the port is closed ends when its event does: nothing can end it before.
    """

    name: ClassVar[str] = "thread"

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, queue.SimpleQueue[DeviceEvent | None]] = {}
        self._threads: list[threading.Thread] = []
        self._gave_up = False

    async def aclose(self, deadline_s: float = 10.0) -> None:
        """As in the contract; threads that have nothing to wait for have ended then."""
        try:
            await super().aclose(deadline_s)
        finally:
            # an idle thread is gone in microseconds; one that is blocked in the driver is not waited for
            tries = _STUCK_TRIES if self._gave_up else _TRIES
            while tries and any(thread.is_alive() for thread in self._threads):
                tries -= 1
                await asyncio.sleep(0.001)

    def _open_lane(self, lane: str) -> None:
        waiting: queue.SimpleQueue[DeviceEvent | None] = queue.SimpleQueue()

        def tell(problem: str) -> None:
            if problem:
                self._fail(problem)
            elif not self._stopped:
                self._drain(lane)

        # threads: the fallback where neither asking nor host functions work; a runner must name it to get it
        thread = threading.Thread(
            target=_wait_for_each, args=(waiting, self._loop, tell), name=f"completion {lane}", daemon=True
        )
        thread.start()  # blocking: until the thread runs, once for each lane
        self._threads.append(thread)
        self._queues[lane] = waiting

    def _given(self, work: Work) -> None:
        self._queues[work.lane].put(work.event)

    def _give_up(self, work: Work, error: Exception) -> None:
        self._gave_up = True
        super()._give_up(work, error)

    def _stop(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)


def _wait_for_each(
    events: queue.SimpleQueue[DeviceEvent | None], loop: asyncio.AbstractEventLoop, tell: Callable[[str], None]
) -> None:
    """What the thread of a lane runs: tell the loop of each event, or of why it cannot be waited for."""
    while (event := events.get()) is not None:
        problem = ""
        try:
            event.synchronize()  # type: ignore[attr-defined]  # of this port's events, not of the contract's
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            loop.call_soon_threadsafe(tell, problem)
        except RuntimeError:
            # the loop was closed meanwhile: nobody is left to tell
            return


class AlreadyDone:
    """The event of a device without streams: what was launched before it is done."""

    def record(self, stream: object = None) -> None:
        """As of an event with a stream; nothing is to be done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class FakeEvent:
    """An event that a test fires, or fails, by hand; from any thread, if nobody but a ThreadPort waits for it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._problem = ""
        self._callbacks: list[Callable[[], None]] = []

    def query(self) -> bool:
        """Raises DeviceFailed after `fail`."""
        if self._problem:
            raise DeviceFailed(self._problem)
        return self._over.is_set()

    def synchronize(self) -> None:
        """Block until it is fired or failed. Raises DeviceFailed after `fail`."""
        self._over.wait()
        self.query()

    def fire(self) -> None:
        """It is done. Does nothing after `fail`."""
        self._over.set()
        self._tell()

    def fail(self, problem: str) -> None:
        """The device has failed; an event that is done stays done."""
        if not self._over.is_set():
            self._problem = problem
            self._over.set()
            self._tell()

    def watch(self, callback: Callable[[], None]) -> None:
        """Have it called once, in `fire` or `fail`, or now."""
        if self._over.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class FakePort(CompletionPort):
    """Works in virtual time: everything goes through the loop.

    Args:
        done_after: seconds that a work of a kind takes on a lane, which does one after the other: then its event is
            fired, where it is a FakeEvent. None: events say themselves when they are done.
    """

    name: ClassVar[str] = "fake"

    def __init__(self, done_after: float | Callable[[str, Hashable], float] | None = None) -> None:
        super().__init__()
        self._done_after = done_after
        self._ends: dict[str, float] = {}
        self._unripe: set[Work] = set()
        self._handles: set[asyncio.Handle] = set()

    def _given(self, work: Work) -> None:
        if not isinstance(work.event, FakeEvent | AlreadyDone):
            raise InvariantBroken(f"a {type(work.event).__name__} was given to the fake completion port")
        if self._done_after is not None:
            took = self._done_after(work.lane, work.kind) if callable(self._done_after) else self._done_after
            end = max(self._loop.time(), self._ends.get(work.lane, 0.0)) + took
            self._ends[work.lane] = end
            self._unripe.add(work)
            self._at(end, lambda: self._ripen(work))
        if isinstance(work.event, FakeEvent):
            work.event.watch(lambda: self._soon(work.lane))
        elif self._done_after is None:
            self._soon(work.lane)

    def _is_done(self, work: Work) -> bool:
        # asked even while it cannot be done: its device may have failed
        done = work.event.query()
        return done and work not in self._unripe

    def _ripen(self, work: Work) -> None:
        self._unripe.discard(work)
        if isinstance(work.event, FakeEvent):
            work.event.fire()
        self._drain(work.lane)

    def _soon(self, lane: str) -> None:
        if not self._stopped:
            self._at(None, lambda: self._drain(lane))

    def _at(self, moment: float | None, callback: Callable[[], None]) -> None:
        def run() -> None:
            self._handles.discard(handle)
            callback()

        # bare timer: how long a work of this pretended device takes
        handle = self._loop.call_soon(run) if moment is None else self._loop.call_at(moment, run)
        self._handles.add(handle)

    def _stop(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
        self._unripe.clear()


def make_port(name: str, device: Any = None) -> CompletionPort:
    """The port of this name, on the running loop: "adaptive", "hostfunc", "thread" or "fake".

    Args:
        device: what `torch.cuda.Stream` takes; for "hostfunc" only.

    Raises InvariantBroken for other names, OSError as the ports say.
    """
    from fdasync.gpu.ports.adaptive import AdaptivePort

    if name == "adaptive":
        return AdaptivePort()
    if name == "hostfunc":
        import torch

        def side_stream(_: str) -> NotifyStream:
            return cast("NotifyStream", torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

        return HostFunctionPort(side_stream)
    if name == "thread":
        return ThreadPort()
    if name == "fake":
        return FakePort()
    raise InvariantBroken(f"there is no completion port named {name!r}")
