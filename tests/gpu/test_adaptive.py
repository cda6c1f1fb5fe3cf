"""The port that sleeps until a step is about to end: its timer, its prediction, what it asks and when."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.gpu.ports.adaptive import AdaptivePort, Estimate
from fdasync.gpu.ports.fake import FakeEvent
from fdasync.gpu.ports.native import TimerFd

# -- the timer


@pytest.mark.both_loops
async def test_a_timer_fires_once_and_not_early():
    loop = asyncio.get_running_loop()
    fired: asyncio.Queue[float] = asyncio.Queue()
    timer = TimerFd(loop, lambda: fired.put_nowait(time.perf_counter()))
    for delay_s in (0.0, 200e-6, 3e-3):
        began = time.perf_counter()
        timer.arm(60.0)
        timer.arm(delay_s)
        assert await asyncio.wait_for(fired.get(), 300) - began >= delay_s
        assert fired.empty()
    timer.arm(60.0)
    timer.close()
    timer.close()


# -- prediction


class World:
    """A clock that a test moves, and the alarm that the port set by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: float | None = None
        self.arms = 0

    def clock(self) -> float:
        return self.now

    def alarm(self, loop, on_time):
        self.on_time = on_time
        return self

    def arm(self, delay_s: float) -> None:
        self.due = self.now + delay_s
        self.arms += 1

    def close(self) -> None:
        self.due = None

    def port(self) -> AdaptivePort:
        return AdaptivePort(clock=self.clock, alarm=self.alarm)


class CountedEvent(FakeEvent):
    """Done from a moment of the world on; counts who asks."""

    def __init__(self, world: World, end: float) -> None:
        super().__init__()
        self.world, self.end, self.asked = world, end, 0

    def query(self) -> bool:
        self.asked += 1
        return self.world.now >= self.end


async def play(world: World, port: AdaptivePort, took_s: float, *, turn_s: float = 20e-6, late_s: float = 0.0):
    """One work of this length to its completion: how late that was seen, and how often the port asked."""
    event = CountedEvent(world, world.now + took_s)
    future = port.completion(event, kind="step")
    while not future.done():
        asleep = port._turn is None
        if asleep:
            assert world.due is not None
            world.now = max(world.now, world.due) + late_s
            world.due = None
            world.on_time()
        else:
            world.now += turn_s
            await asyncio.sleep(0)
    return world.now - event.end, event.asked


async def test_a_known_step_is_slept_through_and_seen_at_once():
    world = World()
    port = world.port()
    for _ in range(12):
        await play(world, port, 5e-3)
    assert port.predicted_s("compute", "step") == pytest.approx(5e-3, rel=0.02)
    for _ in range(20):
        late_s, asked = await play(world, port, 5e-3)
        assert late_s <= 40e-6
        # half a millisecond of turns, of the five
        assert asked <= 40
    await port.aclose()


async def test_an_unknown_step_is_asked_for_rarely_and_seen_in_time():
    world = World()
    for took_s in (80e-6, 1e-3, 30e-3, 2.0):
        port = world.port()
        late_s, asked = await play(world, port, took_s)
        assert late_s <= min(1e-3, 0.5 * took_s + 60e-6) + 1e-9
        assert asked <= 12 + took_s / 1e-3
        await port.aclose()


async def test_a_step_that_hangs_burns_no_core():
    world = World()
    port = world.port()
    for _ in range(12):
        await play(world, port, 5e-3)
    late_s, asked = await play(world, port, 3.0)
    assert late_s <= 1e-3
    # the patience after the margin, then one a millisecond
    assert asked <= 3000 + 40 + 150
    await port.aclose()


@pytest.mark.parametrize("first_s", [12e-3, 1.0])
async def test_a_far_too_long_estimate_is_given_up_soon(first_s):
    world = World()
    port = world.port()
    for _ in range(12):
        await play(world, port, first_s)
    lates, asked = zip(*[await play(world, port, 5e-3) for _ in range(30)], strict=True)
    # the first sleeps are too long, the next step is an unknown one, and then all is learnt
    assert max(lates) <= min(first_s, 25e-3)
    assert max(lates[2:]) <= 1.5e-3
    assert max(lates[4:]) <= 40e-6
    # and what it was wrong by does not keep it asking
    assert max(asked[15:]) <= 60
    await port.aclose()


async def test_a_late_loop_does_not_spoil_the_estimate():
    world = World()
    port = world.port()
    for _ in range(12):
        await play(world, port, 5e-3)
    for _ in range(10):
        await play(world, port, 5e-3, late_s=20e-3)
    assert port.predicted_s("compute", "step") == pytest.approx(5e-3, rel=0.02)
    await port.aclose()


async def test_steps_in_flight_are_timed_from_the_end_of_the_one_before():
    world = World()
    port = world.port()
    for _ in range(12):
        await play(world, port, 5e-3)
    begun = world.now
    events = [CountedEvent(world, begun + 5e-3 * number) for number in (1, 2, 3)]
    futures = [port.completion(event, kind="step") for event in events]
    for event, future in zip(events, futures, strict=True):
        while not future.done():
            if port._turn is None:
                world.now = max(world.now, world.due or 0.0)
                world.due = None
                world.on_time()
            else:
                world.now += 20e-6
                await asyncio.sleep(0)
        assert world.now - event.end <= 40e-6
        assert event.asked <= 40
    await port.aclose()


async def test_kinds_and_lanes_are_learnt_apart_and_forgotten_at_last():
    world = World()
    port = world.port()
    await play(world, port, 5e-3)
    assert port.predicted_s("compute", "other") is None
    assert port.predicted_s("copy", "step") is None
    for number in range(1024):
        future = port.completion(CountedEvent(world, 0.0), kind=number)
        world.now += 1e-3
        world.on_time()
        await future
    assert port.predicted_s("compute", "step") is None
    assert len(port._estimates) == 1024
    await port.aclose()


async def test_an_idle_port_sets_no_alarm():
    world = World()
    port = world.port()
    await play(world, port, 5e-3)
    arms, world.due = world.arms, None
    for _ in range(10):
        await asyncio.sleep(0)
    world.on_time()
    assert (world.arms, world.due, port._turn) == (arms, None, None)
    await port.aclose()


def test_a_first_look_gives_a_margin_that_reaches_it():
    estimate = Estimate()
    estimate.learn(4e-3, 6e-3)
    assert estimate.duration_s == pytest.approx(5e-3)
    assert estimate.duration_s - estimate.margin_s() <= 4e-3


def test_what_is_over_too_early_once_makes_the_next_look_earlier():
    estimate = Estimate()
    for _ in range(20):
        estimate.learn(5e-3, 5e-3)
    estimate.learn(0.0, 4.5e-3)
    assert estimate.duration_s - estimate.margin_s() < 4.4e-3


def test_a_wide_look_around_the_estimate_says_nothing():
    estimate = Estimate()
    for duration_s in (5e-3, 6e-3, 5e-3):
        estimate.learn(duration_s, duration_s)
    before = (estimate.duration_s, estimate.error_s)
    estimate.learn(0.0, 1.0)
    assert (estimate.duration_s, estimate.error_s) == before


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60))
def test_estimates_stay_within_what_was_seen(pairs):
    estimate = Estimate()
    highest = 0.0
    for one, other in pairs:
        low, high = sorted((one, other))
        highest = max(highest, high)
        estimate.learn(low, high)
        assert estimate.duration_s is None or 0.0 <= estimate.duration_s <= highest
        assert 500e-6 <= estimate.margin_s() <= 4.0
