"""The conformance suite for completion ports: what `gpu/completion.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyPort(PortTests):
        def make(self):
            return MyPort()

Events are fired by hand, so nothing depends on how long work takes; `event` and `fail` can be those of a real device.
Every test makes a port on a loop of its own, bounded, fires what is left, closes it, and looks for what it left
behind. None needs an async plugin or settings. What a device cannot do is skipped with the reason. For tests of
your own:

        @on_loop
        async def test_of_mine(self):
            async with self.on_port() as port:
                event = self.event("compute")
                future = port.completion(event)
                event.fire()
                await self.within(future)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fdasync.errors import DeadlineExceeded, DeviceFailed, InvariantBroken
from fdasync.gpu.ports.other import FakeEvent
from fdasync.testing.harness.leaks import Resources
from fdasync.testing.stores.harness import run_bounded, turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from fdasync.gpu.completion import CompletionPort

__all__ = ["CountedLease", "HandEvent", "PortTests", "on_loop"]

T = TypeVar("T")
S = TypeVar("S", bound="PortHooks")

_PROBLEM = "an illegal address"


class HandEvent(Protocol):
    """An event that a test fires."""

    def query(self) -> bool: ...
    def fire(self) -> None: ...


class CountedLease:
    """Says how often it was released, and in what order with other things.

    Attributes:
        released: how often.
        gone: done with the first.
    """

    def __init__(self, log: list[str] | None = None) -> None:
        self.released = 0
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = log

    def release(self) -> None:
        self.released += 1
        if self._log is not None:
            self._log.append("release")
        if not self.gone.done():
            self.gone.set_result(None)


class PortHooks:
    """What an adopter of `PortTests` says about its port.

    Attributes:
        can_fail: `fail` works.
        many: events in flight at a time, in the test of that.
        bound_s: how soon a port must see what happened, in seconds.
        limit_s: how long one test may take, in seconds.
    """

    can_fail = True
    many = 1000
    bound_s = 2.0
    limit_s = 30.0
    _made: list[Any]

    def make(self) -> CompletionPort:
        """A port on the running loop."""
        raise NotImplementedError

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def new_event(self, lane: str) -> HandEvent:  # noqa: ARG002
        """An event behind a work of this lane that is done once it is fired, and those before it are."""
        return FakeEvent()

    def fail(self) -> None:
        """Have the device fail: every event that was not fired is lost."""
        for event in self._made:
            event.fail(_PROBLEM)

    def event(self, lane: str = "compute") -> Any:
        """`new_event`, fired at the end of the test at the latest."""
        event = self.new_event(lane)
        self._made.append(event)
        return event

    async def within(self, waited: Awaitable[T]) -> T:
        """Wait for it, for `bound_s` at most."""
        return await asyncio.wait_for(waited, self.bound_s)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop go on until this holds, for `bound_s` at most."""
        async with asyncio.timeout(self.bound_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def on_port(self) -> AsyncIterator[CompletionPort]:
        """A port; afterwards it is closed, and has left nothing behind."""
        self._made = []
        before = Resources.now()
        port = self.make()
        try:
            yield port
        finally:
            for event in self._made:
                event.fire()
            await port.aclose(self.bound_s)
        left = [line for line in Resources.now().left_since(before) if not line.startswith("task ")]
        assert not left, left
        assert port.in_flight() == {}


def on_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An async test method as a plain one, on a new loop of `new_loop`, ended at `limit_s`, leaving no task behind."""

    @functools.wraps(test)
    def run(self: S) -> None:
        run_bounded(self.new_loop(), test(self), self.limit_s)

    # pytest must see a plain function, whatever plugin looks for coroutines
    del run.__wrapped__
    return run


class PortTests(PortHooks):
    """Subclass it, name the subclass Test..., define `make`; the other hooks are in `PortHooks`."""

    @on_loop
    async def test_events_of_a_lane_complete_in_order(self) -> None:
        async with self.on_port() as port:
            events = [self.event() for _ in range(6)]
            seen: list[str] = []
            futures = [
                port.completion(event, kind=number % 2, on_done=functools.partial(seen.append, f"done {number}"))
                for number, event in enumerate(events)
            ]
            for number, future in enumerate(futures):

                def told(_: asyncio.Future[None], number: int = number) -> None:
                    seen.append(f"told {number}")

                future.add_done_callback(told)
            for event in reversed(events):
                assert not futures[0].done()
                event.fire()
            await self.within(asyncio.wait(futures))
            await turns(2)
            for word in ("done", "told"):
                assert [line for line in seen if line.startswith(word)] == [f"{word} {number}" for number in range(6)]

    @on_loop
    async def test_lanes_do_not_wait_for_each_other(self) -> None:
        async with self.on_port() as port:
            stuck = port.completion(self.event("compute"), lane="compute")
            for _ in range(3):
                event = self.event("copy_out")
                future = port.completion(event, lane="copy_out")
                event.fire()
                await self.within(future)
            assert not stuck.done()
            assert port.in_flight() == {"compute": 1}

    @on_loop
    async def test_what_is_done_already_resolves_in_a_later_turn(self) -> None:
        async with self.on_port() as port:
            event = self.event()
            event.fire()
            seen: list[int] = []
            future = port.completion(event, on_done=lambda: seen.append(1))
            assert not future.done()
            assert not seen
            await self.within(future)

    @on_loop
    async def test_buffers_are_read_then_leases_end_then_the_future_resolves(self) -> None:
        async with self.on_port() as port:
            log: list[str] = []
            event, lease = self.event(), CountedLease(log)

            def read() -> int:
                log.append("read")
                return 7

            future = port.completion(event, leases=(lease,), on_done=read)
            future.add_done_callback(lambda _: log.append("told"))
            event.fire()
            assert await self.within(future) == 7
            await turns(2)
            assert log == ["read", "release", "told"]

    @on_loop
    async def test_without_on_done_the_result_is_none(self) -> None:
        async with self.on_port() as port:
            event = self.event()
            future = port.completion(event)
            event.fire()
            await self.within(asyncio.wait([future]))
            assert future.result() is None

    @on_loop
    async def test_an_error_of_on_done_is_the_futures_and_the_port_goes_on(self) -> None:
        async with self.on_port() as port:
            events, lease = [self.event(), self.event()], CountedLease()
            first = port.completion(events[0], leases=(lease,), on_done=lambda: 1 // 0)
            second = port.completion(events[1], on_done=lambda: "fine")
            for event in events:
                event.fire()
            await self.within(second)
            assert isinstance(first.exception(), ZeroDivisionError)
            assert lease.released == 1
            assert second.result() == "fine"

    @on_loop
    async def test_cancelling_ends_the_waiting_only(self) -> None:
        async with self.on_port() as port:
            event, lease, other = self.event(), CountedLease(), self.event()
            read: list[int] = []
            future = port.completion(event, leases=(lease,), on_done=lambda: read.append(lease.released))
            after = port.completion(other)
            future.cancel()
            await turns(20)
            assert (lease.released, read) == (0, [])
            assert sum(port.in_flight().values()) == 2
            event.fire()
            await self.within(lease.gone)
            other.fire()
            await self.within(after)
            assert (lease.released, read) == (1, [0])
            assert future.cancelled()

    @on_loop
    async def test_an_error_that_nobody_waits_for_goes_to_the_loop(self) -> None:
        said: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        async with self.on_port() as port:
            event, lease = self.event(), CountedLease()
            future = port.completion(event, leases=(lease,), on_done=lambda: 1 // 0)
            future.cancel()
            event.fire()
            await self.within(lease.gone)
            await self.until(lambda: bool(said))
            assert isinstance(said[0]["exception"], ZeroDivisionError)

    @on_loop
    async def test_work_may_be_given_while_work_completes(self) -> None:
        async with self.on_port() as port:
            events = [self.event() for _ in range(3)]
            given: list[asyncio.Future[None]] = []

            def more(number: int) -> None:
                if number < 3:
                    given.append(port.completion(events[number], on_done=functools.partial(more, number + 1)))

            more(0)
            for event in events:
                event.fire()
            await self.until(lambda: len(given) == 3)
            await self.within(asyncio.gather(*given))

    @on_loop
    async def test_an_error_of_the_device_fails_everything(self) -> None:
        self._needs_failure()
        async with self.on_port() as port:
            lanes = ["compute", "copy_out"] * 3
            leases = [CountedLease() for _ in lanes]
            read: list[int] = []
            futures = [
                port.completion(self.event(lane), lane=lane, leases=(lease,), on_done=lambda: read.append(1))
                for lane, lease in zip(lanes, leases, strict=True)
            ]
            futures[0].cancel()
            await turns(3)
            self.fail()
            await self.within(asyncio.wait(futures))
            for future in futures[1:]:
                error = future.exception()
                assert isinstance(error, DeviceFailed)
                assert _PROBLEM in error.problem
            await turns(10)
            assert [lease.released for lease in leases] == [0] * 6
            assert (read, port.lost) == ([], 6)
            assert port.in_flight() == {}
            late = CountedLease()
            future = port.completion(self.event(), leases=(late,))
            await self.within(asyncio.wait([future]))
            assert isinstance(future.exception(), DeviceFailed)
            assert (late.released, port.lost) == (0, 7)

    @on_loop
    async def test_an_error_is_seen_where_nobody_waits(self) -> None:
        self._needs_failure()
        async with self.on_port() as port:
            lease = CountedLease()
            port.completion(self.event(), leases=(lease,)).cancel()
            await turns(3)
            self.fail()
            await self.until(lambda: port.lost == 1)
            assert lease.released == 0

    @on_loop
    async def test_what_was_done_before_an_error_is_kept(self) -> None:
        self._needs_failure()
        async with self.on_port() as port:
            event, lease = self.event(), CountedLease()
            first = port.completion(event, leases=(lease,))
            second = port.completion(self.event())
            event.fire()
            await self.within(first)
            self.fail()
            await self.within(asyncio.wait([second]))
            assert (lease.released, port.lost) == (1, 0)
            assert isinstance(second.exception(), DeviceFailed)

    @on_loop
    async def test_closing_waits_for_what_is_in_flight(self) -> None:
        async with self.on_port() as port:
            events, lease = [self.event(lane) for lane in ("compute", "copy_in")], CountedLease()
            future = port.completion(events[0], leases=(lease,), on_done=lambda: 5)
            port.completion(events[1], lane="copy_in").cancel()
            closing = asyncio.ensure_future(port.aclose(self.bound_s))
            await turns(5)
            assert not closing.done()
            with refused():
                port.completion(self.event())
            for event in events:
                event.fire()
            await self.within(closing)
            assert (future.result(), lease.released, port.lost) == (5, 1, 0)

    @on_loop
    async def test_closing_does_not_wait_for_ever(self) -> None:
        async with self.on_port() as port:
            event, lease = self.event(), CountedLease()
            future = port.completion(event, kind=("decode", 8), leases=(lease,))
            loop = asyncio.get_running_loop()
            began = loop.time()
            with expect(DeadlineExceeded) as caught:
                await port.aclose(0.1)
            assert loop.time() - began < self.bound_s
            assert "compute ('decode', 8)" in str(caught[0])
            assert isinstance(future.exception(), DeadlineExceeded)
            await port.aclose()
            event.fire()
            await turns(20)
            # the port does not watch any more: nobody may use what the device may still write
            assert (lease.released, port.lost) == (0, 1)

    @on_loop
    async def test_closing_can_be_cancelled(self) -> None:
        async with self.on_port() as port:
            future = port.completion(self.event())
            closing = asyncio.ensure_future(port.aclose(60.0))
            await turns(3)
            closing.cancel()
            await self.within(asyncio.wait([closing, future]))
            assert closing.cancelled()
            assert isinstance(future.exception(), DeadlineExceeded)

    @on_loop
    async def test_a_port_that_was_not_used_is_closed(self) -> None:
        async with self.on_port() as port:
            await port.aclose()
            with refused():
                port.completion(self.event())

    @on_loop
    async def test_many_in_flight(self) -> None:
        async with self.on_port() as port:
            lanes = ["compute", "copy_out"]
            events = [self.event(lanes[number % 2]) for number in range(self.many)]
            leases = [CountedLease() for _ in events]
            seen: list[int] = []
            futures = [
                port.completion(
                    event,
                    lane=lanes[number % 2],
                    kind=number % 5,
                    leases=(leases[number],),
                    on_done=functools.partial(seen.append, number),
                )
                for number, event in enumerate(events)
            ]
            for event in events[: self.many // 2]:
                event.fire()
            await self.within(asyncio.wait(futures[: self.many // 2]))
            assert sum(port.in_flight().values()) == self.many - self.many // 2
            for event in events[self.many // 2 :]:
                event.fire()
            await self.within(asyncio.wait(futures))
            for parity in (0, 1):
                ours = [number for number in seen if number % 2 == parity]
                assert ours == list(range(parity, self.many, 2))
            assert {lease.released for lease in leases} == {1}

    @on_loop
    async def test_a_busy_loop_is_no_obstacle(self) -> None:
        async with self.on_port() as port:
            busy = asyncio.ensure_future(spin())
            for _ in range(20):
                event = self.event()
                future = port.completion(event, kind="step")
                await turns(3)
                event.fire()
                await self.within(future)
            busy.cancel()
            await asyncio.wait([busy])

    def _needs_failure(self) -> None:
        if not self.can_fail:
            import pytest

            pytest.skip("this device cannot be made to fail and used again")


async def spin() -> None:
    """Keep the loop busy until cancelled."""
    while True:
        sum(range(500))
        await asyncio.sleep(0)


@contextlib.contextmanager
def expect(kind: type[Exception]) -> Any:
    """What runs in it must raise this; the error is put in the list."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__} was raised"


@contextlib.contextmanager
def refused() -> Any:
    """What runs in it must raise InvariantBroken."""
    with expect(InvariantBroken):
        yield
