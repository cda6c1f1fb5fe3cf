"""The conformance suite for completion ports: what `gpu/completion.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyPort(PortTests):
        def make(self):
            return MyPort()

Events are fired by hand, so nothing depends on how long work takes; `new_event` can give events of a real device.
Every test makes a port on a loop of its own, bounded, fires the remaining events, closes the port, and looks for leaks.
No test needs an async plugin or settings. What a device cannot do is skipped with the reason. Knows the contract only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.errors import DeadlineExceeded, DeviceFailed, InvariantBroken
from fdasync.gpu.ports.fake import FakeEvent
from fdasync.testing.harness.bounded import LoopHooks, on_loop, skip, turns
from fdasync.testing.harness.leaks import Resources

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fdasync.gpu.completion import CompletionPort

__all__ = ["PortTests"]

T = TypeVar("T")

_PROBLEM = "an illegal address"


class CountedHold:
    """Counts its releases, and logs them among other entries.

    Attributes:
        released: how often `release` was called.
        gone: done with the first release.
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


class PortHooks(LoopHooks):
    """What an adopter of `PortTests` says about its port.

    Attributes:
        can_fail: its events have `fail`, as a `FakeEvent` has.
        many: events in flight at a time in `test_many_in_flight`.
        bound_s: how soon a port must see that an event was fired, in seconds. It bounds hangs alone: busy machines are
            slow.
    """

    can_fail = True
    many = 1000
    bound_s = 120.0
    # every event of the running test
    _made: list[Any]

    def make(self) -> CompletionPort:
        """A port on the running loop."""
        raise NotImplementedError

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """asyncio's own: a port must not need another one."""
        return asyncio.new_event_loop()

    def new_event(self, lane: str) -> Any:  # noqa: ARG002
        """An event in this lane, with `fire`; it is done once it and the events before it are fired."""
        return FakeEvent()

    def event(self, lane: str = "compute") -> Any:
        """`new_event`, fired at the end of the test at the latest."""
        event = self.new_event(lane)
        self._made.append(event)
        return event

    async def within(self, waited: Awaitable[T]) -> T:
        """Wait, for `bound_s` at most."""
        return await asyncio.wait_for(waited, self.bound_s)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop go on until this holds, for `bound_s` at most."""
        async with asyncio.timeout(self.bound_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def on_port(self) -> AsyncIterator[CompletionPort]:
        """A port; at the end it is closed, and must have left nothing behind."""
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

                def resolved(_: asyncio.Future[None], number: int = number) -> None:
                    seen.append(f"resolved {number}")

                future.add_done_callback(resolved)
            for event in reversed(events):
                assert not futures[0].done()
                event.fire()
            await self.within(asyncio.wait(futures))
            await turns(2)
            for word in ("done", "resolved"):
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
            bare = port.completion(event)
            assert not future.done()
            assert not seen
            await self.within(asyncio.wait([future, bare]))
            assert seen == [1]
            assert (future.result(), bare.result()) == (None, None)

    @on_loop
    async def test_buffers_are_read_then_holds_end_then_the_future_resolves(self) -> None:
        async with self.on_port() as port:
            log: list[str] = []
            event, hold = self.event(), CountedHold(log)

            def read() -> int:
                log.append("read")
                return 7

            future = port.completion(event, holds=(hold,), on_done=read)
            future.add_done_callback(lambda _: log.append("resolved"))
            event.fire()
            assert await self.within(future) == 7
            await turns(2)
            assert log == ["read", "release", "resolved"]

    @on_loop
    async def test_an_error_of_on_done_is_the_futures_and_the_port_goes_on(self) -> None:
        async with self.on_port() as port:
            events, hold = [self.event(), self.event()], CountedHold()
            first = port.completion(events[0], holds=(hold,), on_done=lambda: 1 // 0)
            second = port.completion(events[1], on_done=lambda: "fine")
            for event in events:
                event.fire()
            await self.within(second)
            assert isinstance(first.exception(), ZeroDivisionError)
            assert hold.released == 1
            assert second.result() == "fine"

    @on_loop
    async def test_cancelling_ends_the_waiting_only(self) -> None:
        async with self.on_port() as port:
            event, hold, other = self.event(), CountedHold(), self.event()
            read: list[int] = []
            future = port.completion(event, holds=(hold,), on_done=lambda: read.append(hold.released))
            after = port.completion(other)
            future.cancel()
            await turns(20)
            assert (hold.released, read) == (0, [])
            assert sum(port.in_flight().values()) == 2
            event.fire()
            await self.within(hold.gone)
            other.fire()
            await self.within(after)
            assert (hold.released, read) == (1, [0])
            assert future.cancelled()

    @on_loop
    async def test_an_error_that_nobody_waits_for_goes_to_the_loop(self) -> None:
        said: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        async with self.on_port() as port:
            event, hold = self.event(), CountedHold()
            future = port.completion(event, holds=(hold,), on_done=lambda: 1 // 0)
            future.cancel()
            event.fire()
            await self.within(hold.gone)
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
            holds = [CountedHold() for _ in lanes]
            read: list[int] = []
            futures = [
                port.completion(self.event(lane), lane=lane, holds=(hold,), on_done=lambda: read.append(1))
                for lane, hold in zip(lanes, holds, strict=True)
            ]
            futures[0].cancel()
            await turns(3)
            self._fail_all()
            await self.within(asyncio.wait(futures))
            for future in futures[1:]:
                error = future.exception()
                assert isinstance(error, DeviceFailed)
                assert _PROBLEM in error.problem
            await turns(10)
            assert [hold.released for hold in holds] == [0] * 6
            assert (read, port.lost) == ([], 6)
            assert port.in_flight() == {}
            late = CountedHold()
            future = port.completion(self.event(), holds=(late,))
            await self.within(asyncio.wait([future]))
            assert isinstance(future.exception(), DeviceFailed)
            assert (late.released, port.lost) == (0, 7)

    @on_loop
    async def test_an_error_is_seen_where_nobody_waits(self) -> None:
        self._needs_failure()
        async with self.on_port() as port:
            hold = CountedHold()
            port.completion(self.event(), holds=(hold,)).cancel()
            await turns(3)
            self._fail_all()
            await self.until(lambda: port.lost == 1)
            assert hold.released == 0

    @on_loop
    async def test_what_was_done_before_an_error_is_kept(self) -> None:
        self._needs_failure()
        async with self.on_port() as port:
            event, hold = self.event(), CountedHold()
            first = port.completion(event, holds=(hold,))
            second = port.completion(self.event())
            event.fire()
            await self.within(first)
            self._fail_all()
            await self.within(asyncio.wait([second]))
            assert (hold.released, port.lost) == (1, 0)
            assert isinstance(second.exception(), DeviceFailed)

    @on_loop
    async def test_closing_waits_for_what_is_in_flight(self) -> None:
        async with self.on_port() as port:
            unused = self.make()
            await unused.aclose()
            with expect(InvariantBroken):
                # never fired: nothing else may wait behind it
                unused.completion(self.event("copy_out"))
            events, hold = [self.event(lane) for lane in ("compute", "copy_in")], CountedHold()
            future = port.completion(events[0], holds=(hold,), on_done=lambda: 5)
            port.completion(events[1], lane="copy_in").cancel()
            closing = asyncio.ensure_future(port.aclose(self.bound_s))
            await turns(5)
            assert not closing.done()
            with expect(InvariantBroken):
                port.completion(self.event())
            for event in events:
                event.fire()
            await self.within(closing)
            assert (future.result(), hold.released, port.lost) == (5, 1, 0)

    @on_loop
    async def test_closing_does_not_wait_for_ever(self) -> None:
        async with self.on_port() as port:
            event, hold = self.event(), CountedHold()
            future = port.completion(event, kind=("decode", 8), holds=(hold,))
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
            # the port watches no more: memory that the device may still write stays held
            assert (hold.released, port.lost) == (0, 1)

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
    async def test_many_in_flight(self) -> None:
        async with self.on_port() as port:
            lanes = ["compute", "copy_out"]
            events = [self.event(lanes[number % 2]) for number in range(self.many)]
            holds = [CountedHold() for _ in events]
            seen: list[int] = []
            futures = [
                port.completion(
                    event,
                    lane=lanes[number % 2],
                    kind=number % 5,
                    holds=(holds[number],),
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
            assert {hold.released for hold in holds} == {1}

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
            skip("this device cannot be made to fail and used again")

    def _fail_all(self) -> None:
        """The device fails: every event that was not fired is lost."""
        for event in self._made:
            event.fail(_PROBLEM)


async def spin() -> None:
    """Keep the loop busy until cancelled."""
    while True:
        sum(range(500))
        await asyncio.sleep(0)


@contextlib.contextmanager
def expect(kind: type[Exception]) -> Any:
    """The body must raise this; the error is put in the list."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__} was raised"
