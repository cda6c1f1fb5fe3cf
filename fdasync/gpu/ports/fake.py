"""The fake completion port, and events that are fired by hand or are done already.

`completion.py` has the contract. The fake is for tests, also in virtual time, and for devices without streams, whose
work is done when the call returns. Called by runners and tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fdasync.errors import DeviceFailed, InvariantBroken
from fdasync.gpu.completion import CompletionPort

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from fdasync.gpu.completion import Work


class AlreadyDone:
    """The event of a device without streams: work launched before it is done already."""

    def record(self, stream: object = None) -> None:
        """Do nothing; events with a stream have this method too."""

    def query(self) -> bool:
        return True


class FakeEvent:
    """An event that a test fires, or fails, by hand."""

    def __init__(self) -> None:
        self._over = False
        self._problem = ""
        self._callbacks: list[Callable[[], None]] = []

    def query(self) -> bool:
        """Raises DeviceFailed after `fail`."""
        if self._problem:
            raise DeviceFailed(self._problem)
        return self._over

    def fire(self) -> None:
        """Make the event done. Does nothing after `fail`."""
        self._over = True
        self._tell()

    def fail(self, problem: str) -> None:
        """Make the device fail; an event that is done stays done."""
        if not self._over:
            self._problem = problem
            self._over = True
            self._tell()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: in `fire` or `fail`, or now where either was called."""
        if self._over:
            callback()
        else:
            self._callbacks.append(callback)

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class FakePort(CompletionPort):
    """A port for tests and for devices without streams; works in virtual time too, since it uses the loop's clock.

    Args:
        done_after: seconds that a work takes, from its lane and kind; a lane does one work after the other. The port
            then fires the event, where it is a FakeEvent. None: a work is done when its event says so.
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
        # query even while the work cannot be done: its device may have failed
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
