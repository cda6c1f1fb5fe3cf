"""How work on a device completes an asyncio future: the contract of completion ports, and what all of them share.

A caller launches work on a stream, records an event behind it and gives the event to a port. The port watches it,
on its loop, and never blocks that. How it learns that an event is done is what ports differ in: `adaptive.py`
predicts and queries, `other.py` has a host function of the driver, a thread, and a fake for tests and for devices
without streams.

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
    """What a port needs of an event; `torch.cuda.Event` has it."""

    def query(self) -> bool:
        """Whether everything before it on its stream is done. Raises after an error of the device."""
        ...


class Lease(Protocol):
    """Something that the device uses until the work is done."""

    def release(self) -> None: ...


class Work:
    """One event in flight.

    Attributes:
        finished: it was seen done, or given up.
        given_at: when it was given, on the port's own clock; ports that need no clock leave it 0.
    """

    __slots__ = ("event", "finished", "future", "given_at", "kind", "lane", "leases", "on_done")

    def __init__(
        self,
        event: DeviceEvent,
        future: asyncio.Future[Any],
        lane: str,
        kind: Hashable,
        leases: Sequence[Lease],
        on_done: Callable[[], Any] | None,
    ) -> None:
        self.event = event
        self.future = future
        self.lane = lane
        self.kind = kind
        self.leases = leases
        self.on_done = on_done
        self.finished = False
        self.given_at = 0.0

    def __str__(self) -> str:
        return self.lane if self.kind is None else f"{self.lane} {self.kind!r}"


class CompletionPort(ABC):
    """Futures for events. Belongs to one loop: the running one, where it is made.

    Events of a lane must complete in the order they are given (record them on one stream); their futures resolve in
    that order. Lanes do not wait for each other. Not safe to call from other threads.

    Attributes:
        name: of the kind of port.
        lost: leases that were never released, as the device failed or the port was closed before their work was
            done: the device may still write what they protect.
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
        """What the device failed with; None while it has not."""
        return self._problem

    @overload
    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = ...,
        kind: Hashable = ...,
        leases: Sequence[Lease] = ...,
        on_done: None = ...,
    ) -> asyncio.Future[None]: ...

    @overload
    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = ...,
        kind: Hashable = ...,
        leases: Sequence[Lease] = ...,
        on_done: Callable[[], T],
    ) -> asyncio.Future[T]: ...

    def completion(
        self,
        event: DeviceEvent,
        *,
        lane: str = "compute",
        kind: Hashable = None,
        leases: Sequence[Lease] = (),
        on_done: Callable[[], Any] | None = None,
    ) -> asyncio.Future[Any]:
        """A future that resolves, in a later turn of the loop, when the event is done.

        When that is seen, whoever waits or not: `on_done` runs, then the leases are released, then the future gets
        what `on_done` returned (None without one). So what the device wrote to a leased buffer is read in `on_done`;
        what nobody reads (the event itself, staging buffers) is only named in `leases`. Cancelling the future ends
        the waiting and nothing else. What `on_done` or a release raises is the future's error; if that was
        cancelled, it goes to the loop's exception handler.

        Args:
            event: recorded already, on the stream behind the work.
            lane: whose order it belongs to; few, with fixed names.
            kind: works of one kind in one lane take about the same time; None is a kind too.
            leases: the port's own from here on, unless this raises.

        The future fails with `DeviceFailed` once the device has, also for events given later, and with
        `DeadlineExceeded` if the port is closed before the event is done; `on_done` does not run then, and the leases
        are lost. Raises InvariantBroken when the port is closed or closing, and OSError if a new lane needs an fd or a
        thread and there is none; nothing was taken then.
        """
        if self._closing:
            raise InvariantBroken(f"work for the {lane} lane was given to a closed completion port")
        future: asyncio.Future[Any] = self._loop.create_future()
        work = Work(event, future, lane, kind, leases, on_done)
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
        """Wait for what is in flight, then give back every fd, timer and handle.

        Cancelling it closes at once. Later calls do nothing.

        Raises DeadlineExceeded, naming what is in flight, if that did not end in time; everything is given back then
        too, and those futures have failed with the same error.
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
        """A work was appended to its lane: see to it that `_drain` is called, later, once it may be done."""

    def _seen(self, work: Work) -> None:  # noqa: B027
        """The oldest of its lane was just seen done, and was taken from the lane; it is finished next."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop watching and give everything back: the port was closed, or the device failed. Called once."""

    def _is_done(self, work: Work) -> bool:
        return work.event.query()

    def _drain(self, lane: str) -> None:
        """Finish what is done in this lane, oldest first; fail everything where the device has failed."""
        works = self._lanes[lane]
        while works:
            work = works[0]
            try:
                done = self._is_done(work)
            except Exception as error:  # torch has no narrower type for it in all of its versions
                self._fail(f"{type(error).__name__}: {error}")
                return
            if not done:
                return
            works.popleft()
            self._seen(work)
            self._finish(work)

    def _fail(self, problem: str) -> None:
        """The device failed: every future that waits, of all lanes, does too."""
        if self._problem is not None or self._stopped:
            return
        self._problem = problem
        for work in self._all():
            self._give_up(work, DeviceFailed(problem))
        self._end()

    # -- inside

    def _all(self) -> list[Work]:
        """What is in flight, lane by lane; the lanes are empty afterwards."""
        left = [work for works in self._lanes.values() for work in works]
        for works in self._lanes.values():
            works.clear()
        self._in_flight -= len(left)
        return left

    def _finish(self, work: Work) -> None:
        work.finished = True
        result, error = None, None
        if work.on_done is not None:
            try:
                result = work.on_done()
            except Exception as raised:
                error = raised
        for lease in work.leases:
            try:
                lease.release()
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
        work.finished = True
        self.lost += len(work.leases)
        if not work.future.done():
            work.future.set_exception(error)
            # every later call, or `aclose`, says the same: nobody has to have waited for this one
            work.future.exception()

    def _abandon(self, after_s: float) -> DeadlineExceeded | None:
        """Close now. The error for what was in flight, or None where nothing was."""
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
