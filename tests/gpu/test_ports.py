"""Completion ports: the suite on each of them, with events fired by hand, and what is special about one."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from fdasync.errors import DeadlineExceeded, InvariantBroken
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.at_once import AtOncePort
from fdasync.gpu.ports.fake import AlreadyDone, FakeEvent, FakePort
from fdasync.testing import PortTests
from fdasync.testing.sim.loop import SimLoop

pytestmark = pytest.mark.usefixtures("cuda_is_up")


class TestAdaptive(PortTests):
    def make(self):
        return AdaptivePort()


class TestAdaptiveUvloop(PortTests):
    def make(self):
        return AdaptivePort()

    def new_loop(self):
        return uvloop.new_event_loop()


class TestFake(PortTests):
    def make(self):
        return FakePort()


class TestFakeInVirtualTime(PortTests):
    def make(self):
        return FakePort()

    def new_loop(self):
        return SimLoop()


async def test_what_is_done_when_it_is_given_resolves_at_once():
    """Its hold is given back, and an error of `on_done` is the future's; after the close nothing is taken."""
    port, released = AtOncePort(), []

    class Held:
        def release(self):
            released.append(True)

    future = port.completion(AlreadyDone(), holds=[Held()], on_done=lambda: 5)
    assert (future.done(), future.result(), released) == (True, 5, [True])
    broken = port.completion(AlreadyDone(), on_done=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert port.in_flight() == {}
    await port.aclose()
    with pytest.raises(InvariantBroken, match="closed completion port"):
        port.completion(AlreadyDone())


# -- the device's own words


@pytest.mark.parametrize("make", [AdaptivePort, FakePort])
async def test_an_error_of_the_device_is_told_once(make):
    port = make()
    event = FakeEvent()
    future = port.completion(event)
    event.fail("an illegal address")
    await asyncio.wait([future], timeout=300)
    late = port.completion(FakeEvent())
    await asyncio.wait([late], timeout=300)
    for failed in (future, late):
        assert str(failed.exception()) == "the device failed: an illegal address"
    await port.aclose()


# -- the fake


def test_fake_works_take_time_one_after_the_other(run_sim):
    async def main():
        port = FakePort(done_after=lambda _, kind: {"short": 0.5, "long": 2.0}[kind])
        loop = asyncio.get_running_loop()
        ends: dict[str, float] = {}
        events = [FakeEvent() for _ in range(3)]
        futures = [
            port.completion(event, lane=lane, kind=kind, on_done=lambda name=name: ends.setdefault(name, loop.time()))
            for event, (name, lane, kind) in zip(
                [*events, AlreadyDone()],
                [("a", "compute", "long"), ("b", "compute", "short"), ("c", "copy", "short"), ("d", "copy", "long")],
                strict=True,
            )
        ]
        await asyncio.gather(*futures)
        assert all(event.query() for event in events)
        await port.aclose()
        return ends

    assert run_sim(main()) == pytest.approx({"a": 2.0, "b": 2.5, "c": 0.5, "d": 2.5}, abs=1e-6)


def test_a_closed_fake_fires_nothing(run_sim):
    async def main():
        port = FakePort(done_after=5.0)
        event = FakeEvent()
        future = port.completion(event)
        with pytest.raises(DeadlineExceeded):
            await port.aclose(1.0)
        assert isinstance(future.exception(), DeadlineExceeded)
        await asyncio.sleep(10.0)
        assert not event.query()

    run_sim(main())


async def test_what_is_already_done_completes_on_the_next_turn():
    port = FakePort()
    event = AlreadyDone()
    event.record()
    future = port.completion(event)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert future.done()
    await port.aclose()


async def test_the_fake_takes_fakes_only():
    port = FakePort()
    with pytest.raises(InvariantBroken, match="object was given to the fake"):
        port.completion(object())
    assert port.in_flight() == {}
    await port.aclose()
