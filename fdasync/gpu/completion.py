"""How work on a device completes an asyncio future: the contract of completion ports, and what all of them share.

A caller launches work on a stream, records an event behind it and gives the event to a port. The port watches the
event on its loop and never blocks the loop. Ports differ in how they learn that an event is done: the port of
`ports/adaptive.py` predicts and queries, that of `ports/fake.py` serves tests and devices without streams.

Knows nothing of torch, streams or steps. Called by runners.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, overload

from fdasync.errors import DeadlineExceeded, DeviceFailed, InvariantBroken
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

T = TypeVar("T")


class DeviceEvent(Protocol):
    """The part of an event that a port uses; `torch.cuda.Event` has it."""

    def query(self) -> bool:
        """Whether all work before the event on its stream is done. Raises after an error of the device."""
        ...


class Hold(Protocol):
    """Keeps an event or a buffer for the device until the work is done."""

    def release(self) -> None:
        """Give it back to its pool."""
        ...


class Work:
    """One event in flight.

    Attributes:
        event: recorded behind the work.
        future: the caller's.
        lane: name of the order that the work belongs to.
        kind: works of one kind in one lane take about the same time.
        holds: released when the work is done.
        on_done: called when the work is done, before the holds are released; None: nothing is called.
        given_at: when the port got the work, on the port's own clock; ports that need no clock leave it 0.
    """

    __slots__ = ("event", "future", "given_at", "holds", "kind", "lane", "on_done")

    def __init__(
        self,
        event: DeviceEvent,
        future: asyncio.Future[Any],
        lane: str,
        kind: Hashable,
        holds: Sequence[Hold],
        on_done: Callable[[], Any] | None,
    ) -> None:
        self.event = event
        self.future = future
        self.lane = lane
        self.kind = kind
        self.holds = holds
        self.on_done = on_done
        self.given_at = 0.0

    def __str__(self) -> str:
        return self.lane if self.kind is None else f"{self.lane} {self.kind!r}"


def when_done(future: asyncio.Future[T], callback: Callable[[asyncio.Future[T]], object]) -> None:
    """Call `callback(future)` when the future is done: now if it is, in a turn of the loop that follows if it is not.

    `add_done_callback` waits for a turn in both cases."""
    if future.done():
        callback(future)
    else:
        future.add_done_callback(callback)


class CompletionPort(ABC):
    """Futures for events. Belongs to one loop: the running one, where it is made.

    Events of a lane must complete in the order they are given (record them on one stream); their futures resolve in
    that order. Lanes do not wait for each other. Not safe to call from other threads.

    Attributes:
        name: of the kind of port.
        lost: holds that were never released, because the device failed or the port was closed before their work was
            done. The device may still write to their buffers.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        """Raises RuntimeError where no loop runs."""
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[str, deque[Work]] = {}
        self._in_flight = 0
        self._problem: str | None = None
        self._closing = False
        self._stopped = False
        self._idle: asyncio.Future[None] | None = None
        self.lost = 0

    @property
    def problem(self) -> str | None:
        """The error that the device failed with; None while it works."""
        return self._problem

    @overload
    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = ...,
        kind: Hashable = ...,
        holds: Sequence[Hold] = ...,
        on_done: None = ...,
    ) -> asyncio.Future[None]: ...

    @overload
    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = ...,
        kind: Hashable = ...,
        holds: Sequence[Hold] = ...,
        on_done: Callable[[], T],
    ) -> asyncio.Future[T]: ...

    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = "compute",
        kind: Hashable = None,
        holds: Sequence[Hold] = (),
        on_done: Callable[[], Any] | None = None,
    ) -> asyncio.Future[Any]:
        """A future that resolves, in a later turn of the loop, when the event is done.

        When the port sees the event done, `on_done` runs, then the holds are released, then the future gets the result
        of `on_done` (None without one), whether or not a caller still waits. So read a held buffer in `on_done`;
        name in `holds` what the device uses and the caller does not read, such as the event itself. Cancelling the
        future ends the waiting and nothing else. An error of `on_done` or of a release is the future's error; it goes
        to the loop's exception handler if the future was cancelled.

        Args:
            event: recorded already, on the stream behind the work.
            lane: name of the order that the work belongs to; few, with fixed names.
            kind: works of one kind in one lane take about the same time; None is a kind too.
            holds: the port's own from here on, unless this raises.
            on_done: called in a turn of the loop when the work is done.

        The future fails with `DeviceFailed` once the device has failed, also for events given later, and with
        `DeadlineExceeded` if the port is closed before the event is done; `on_done` does not run then, and the holds
        are lost. Raises InvariantBroken when the port is closed or closing, and OSError if the port needs an fd
        and there is none; the port keeps nothing then.
        """
        if self._closing:
            raise InvariantBroken(f"work for the {lane} lane was given to a closed completion port")
        future: asyncio.Future[Any] = self._loop.create_future()
        work = Work(event, future, lane, kind, holds, on_done)
        if self._problem is not None:
            self._give_up(work, DeviceFailed(self._problem))
            return future
        works = self._lanes.get(lane)
        if works is None:
            self._open_lane(lane)
            works = self._lanes[lane] = deque()
        works.append(work)
        self._in_flight += 1
        try:
            self._given(work)
        except BaseException:
            works.remove(work)
            self._in_flight -= 1
            raise
        return future

    def in_flight(self) -> dict[str, int]:
        """How many events are not done, by lane and kind; for reports."""
        return dict(Counter(str(work) for works in self._lanes.values() for work in works))

    async def aclose(self, deadline_s: float = 10.0) -> None:
        """Wait for the work in flight, then give back every fd, timer and handle.

        Cancelling it closes at once. Later calls do nothing.

        Raises DeadlineExceeded, naming the work in flight, if it did not end in time. The port has given everything
        back then too, and the futures of that work have failed with the same error.
        """
        self._closing = True
        began = self._loop.time()
        try:
            if self._in_flight:
                if self._idle is None:
                    self._idle = self._loop.create_future()
                await wait_within([self._idle], deadline_s)
        except asyncio.CancelledError:
            self._abandon(self._loop.time() - began)
            raise
        stuck = self._abandon(deadline_s)
        if stuck is not None:
            raise stuck

    # -- for the kinds of ports

    def _open_lane(self, lane: str) -> None:  # noqa: B027
        """Called once for each lane, before its first work. What it raises, `completion` does."""

    @abstractmethod
    def _given(self, work: Work) -> None:
        """A work was appended to its lane: make sure that `_drain` is called, later, once the work may be done."""

    def _seen(self, work: Work) -> None:  # noqa: B027
        """`work`, the oldest of its lane, was just seen done and taken from the lane; it is finished next."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop watching and give everything back: the port was closed, or the device failed. Called once."""

    def _is_done(self, work: Work) -> bool:
        return work.event.query()

    def _drain(self, lane: str) -> None:
        """Finish the works of this lane that are done, oldest first; fail all works where the device has failed."""
        works = self._lanes[lane]
        while works:
            work = works[0]
            try:
                done = self._is_done(work)
            except Exception as error:  # torch has no narrower type for it in all of its versions
                self._fail(error.problem if isinstance(error, DeviceFailed) else f"{type(error).__name__}: {error}")
                return
            if not done:
                return
            works.popleft()
            self._seen(work)
            self._finish(work)

    def _fail(self, problem: str) -> None:
        """The device failed: fail every future that waits, in all lanes."""
        if self._problem is not None or self._stopped:
            return
        self._problem = problem
        for work in self._all():
            self._give_up(work, DeviceFailed(problem))
        self._end()

    # -- inside

    def _all(self) -> list[Work]:
        """Take all works in flight out of their lanes."""
        left = [work for works in self._lanes.values() for work in works]
        for works in self._lanes.values():
            works.clear()
        self._in_flight -= len(left)
        return left

    def _finish(self, work: Work) -> None:
        result, error = None, None
        if work.on_done is not None:
            try:
                result = work.on_done()
            except Exception as raised:
                error = raised
        for hold in work.holds:
            try:
                hold.release()
            except Exception as raised:
                error = error or raised
        if not work.future.done():
            if error is None:
                work.future.set_result(result)
            else:
                work.future.set_exception(error)
        elif error is not None:
            said = {"message": f"after the completion of {work}", "exception": error, "future": work.future}
            self._loop.call_exception_handler(said)
        self._in_flight -= 1
        self._tell_idle()

    def _give_up(self, work: Work, error: Exception) -> None:
        self.lost += len(work.holds)
        if not work.future.done():
            work.future.set_exception(error)
            # every later call, and `aclose`, raise the same: asyncio need not warn of a future that no caller awaited
            work.future.exception()

    def _abandon(self, after_s: float) -> DeadlineExceeded | None:
        """Close now. The error for the work that was in flight, or None if none was."""
        names = [name if count == 1 else f"{count} x {name}" for name, count in self.in_flight().items()]
        left = self._all()
        what = f"device work ({', '.join(names)})"
        for work in left:
            self._give_up(work, DeadlineExceeded(what, after_s))
        self._end()
        return DeadlineExceeded(what, after_s) if left else None

    def _end(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._stop()
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._idle is not None and not self._in_flight and not self._idle.done():
            self._idle.set_result(None)
