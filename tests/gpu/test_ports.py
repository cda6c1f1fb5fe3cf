"""Completion ports: the suite on each of them, with events fired by hand, and what is special about one."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import DeadlineExceeded, DeviceFailed, InvariantBroken
from fdasync.gpu.ports.adaptive import AdaptivePort, Estimate
from fdasync.gpu.ports.native import Notifier, TimerFd, cuda_launcher
from fdasync.gpu.ports.other import AlreadyDone, FakeEvent, FakePort, HostFunctionPort, ThreadPort, make_port
from fdasync.testing import PortTests
from fdasync.testing.harness.leaks import Resources
from fdasync.testing.sim.loop import SimLoop

WOKEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module", autouse=True)
def cuda_is_up() -> None:
    """What a driver opens, maps and loads at its first use is nobody's leak, and must not wait behind closed gates."""
    if not torch.cuda.is_available():
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
    flush = ctypes.cast(ctypes.CDLL(None).fflush, ctypes.c_void_p).value
    # of no file: of all
    cuda_launcher()(stream.cuda_stream, flush, 0)
    word = torch.ones(1, dtype=torch.int32, pin_memory=True)
    assert wait_value()(stream.cuda_stream, word.data_ptr(), 1, 0) == 0
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()
    torch.cuda.synchronize()


def wait_value():
    """`cuStreamWaitValue32(stream, address, value, flags)`; flags 0: the stream waits until the word is that large."""
    call = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return call


class HostStreams:
    """Streams of a device that is this process: they wait for fake events and call native functions, in order."""

    def __init__(self) -> None:
        self.made: list[HostStream] = []

    def stream(self, lane: str) -> HostStream:
        stream = HostStream(len(self.made))
        self.made.append(stream)
        return stream

    def launch(self, stream: int, function: int, argument: int) -> None:
        self.made[stream].add(None, function, argument)


class HostStream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.queue: list[tuple[FakeEvent | None, int, int]] = []
        self.called = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event, 0, 0)
        event.watch(self.run)

    def add(self, event: FakeEvent | None, function: int, argument: int) -> None:
        self.queue.append((event, function, argument))
        self.run()

    def run(self) -> None:
        while self.queue:
            event, function, argument = self.queue[0]
            if event is None:
                # what a driver does: a call of an address, from nowhere
                assert WOKEN(function)(argument) == 0
                self.called += 1
            else:
                try:
                    if not event.query():
                        return
                except DeviceFailed:
                    # after an error the callbacks behind it never come
                    return
            self.queue.pop(0)


class TestAdaptive(PortTests):
    def make(self):
        return AdaptivePort()


class TestAdaptiveUvloop(PortTests):
    def make(self):
        return AdaptivePort()

    def new_loop(self):
        return uvloop.new_event_loop()


class TestHostFunction(PortTests):
    def make(self):
        streams = HostStreams()
        return HostFunctionPort(streams.stream, launch=streams.launch)


class TestHostFunctionUvloop(TestHostFunction):
    def new_loop(self):
        return uvloop.new_event_loop()


class TestThread(PortTests):
    def make(self):
        return ThreadPort()


class TestFake(PortTests):
    def make(self):
        return FakePort()


class TestFakeInVirtualTime(PortTests):
    def make(self):
        return FakePort()

    def new_loop(self):
        return SimLoop()


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
    port = make_port("fake")
    event = AlreadyDone()
    event.record()
    event.synchronize()
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


async def test_ports_by_name():
    for name in ("adaptive", "thread", "fake"):
        port = make_port(name)
        assert port.name == name
        await port.aclose()
    with pytest.raises(InvariantBroken, match="'odd'"):
        make_port("odd")


# -- what the driver calls


@pytest.mark.both_loops
async def test_a_native_call_wakes_the_loop_and_files_are_used_again():
    news: asyncio.Queue[int] = asyncio.Queue()
    notifier = Notifier(asyncio.get_running_loop(), news.put_nowait, limit=2)
    used = set()
    for _ in range(10):
        files = [notifier.load(), notifier.load()]
        assert notifier.load() is None
        assert notifier.out == 2
        used.update(files)
        for file in files:
            WOKEN(notifier.function)(file)
        assert await asyncio.wait_for(news.get(), 5) == 2
        assert notifier.out == 0
    assert len(used) == 2
    notifier.close()
    notifier.close()


async def test_a_native_call_after_the_end_touches_no_fd():
    told: list[int] = []
    notifier = Notifier(asyncio.get_running_loop(), told.append)
    file = notifier.load()
    notifier.close()
    # somebody else gets the numbers that were given back
    pipes = [os.pipe() for _ in range(4)]
    before = Resources.now().fds
    assert WOKEN(notifier.function)(file) == 0
    await asyncio.sleep(0)
    assert not told
    assert Resources.now().fds == before
    for readable, writable in pipes:
        os.close(writable)
        os.set_blocking(readable, False)
        assert os.read(readable, 8) == b""
        os.close(readable)


async def test_a_host_function_port_needs_few_files():
    streams = HostStreams()
    # the watchdog would finish them too
    port = HostFunctionPort(streams.stream, launch=streams.launch, watchdog_s=60.0)
    before = len(Resources.now().fds)
    events = [FakeEvent() for _ in range(200)]
    futures = [port.completion(event) for event in events]
    assert len(Resources.now().fds) - before <= 33
    for event, future in zip(events, futures, strict=True):
        event.fire()
        await asyncio.wait_for(future, 5)
    # each had its own call: none was left to the luck of a neighbour's
    assert streams.made[0].called == 200
    await port.aclose()


async def test_the_watchdog_sees_what_the_driver_does_not_tell():
    port = HostFunctionPort(HostStreams().stream, launch=lambda *_: None, watchdog_s=0.01)
    event = FakeEvent()
    future = port.completion(event)
    event.fire()
    await asyncio.wait_for(future, 5)
    await port.aclose()


async def test_a_launch_that_is_refused_fails_the_port():
    def refuse(*_: int) -> None:
        raise OSError(700, "cuLaunchHostFunc: CUDA_ERROR_ILLEGAL_ADDRESS")

    port = HostFunctionPort(HostStreams().stream, launch=refuse)
    future = port.completion(FakeEvent())
    with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS"):
        await future
    await port.aclose()


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
        assert await asyncio.wait_for(fired.get(), 5) - began >= delay_s
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


# -- on a GPU


class GatedEvent(torch.cuda.Event):
    """A real event behind a wait for a word of host memory, which the test writes."""

    gate = None

    def fire(self) -> None:
        words, index = self.gate
        words[index] = 1


@pytest.mark.gpu
class OnGpu(PortTests):
    __test__ = False

    can_fail = False
    # two operations each on a stream that waits: some hundred of them block the caller, whose turn it is to go on
    many = 32
    bound_s = 5.0

    @pytest.fixture(autouse=True)
    def gates(self):
        self.wait = wait_value()
        self.words = torch.zeros(4096, dtype=torch.int32, pin_memory=True)
        self.taken = 0
        self.streams: dict[str, torch.cuda.Stream] = {}
        yield
        self.words.fill_(1)
        torch.cuda.synchronize()

    def new_loop(self):
        return uvloop.new_event_loop()

    def new_event(self, lane):
        if lane not in self.streams:
            self.streams[lane] = torch.cuda.Stream()
        stream = self.streams[lane]
        index = self.taken
        self.taken += 1
        status = self.wait(stream.cuda_stream, self.words.data_ptr() + 4 * index, 1, 0)
        assert status == 0, f"cuStreamWaitValue32: {status}"
        event = GatedEvent(blocking=True)
        event.gate = (self.words.numpy(), index)
        event.record(stream)
        return event


class TestAdaptiveOnGpu(OnGpu):
    __test__ = True

    def make(self):
        return make_port("adaptive")


class TestHostFunctionOnGpu(OnGpu):
    __test__ = True

    def make(self):
        return make_port("hostfunc", torch.device("cuda"))


class TestThreadOnGpu(OnGpu):
    __test__ = True

    def make(self):
        return make_port("thread")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adaptive", "hostfunc", "thread"])
async def test_real_steps_complete_when_they_end(name):
    port = make_port(name, torch.device("cuda"))
    stream = torch.cuda.Stream()
    seen_s, device_s = [], []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
        began = time.perf_counter()
        start.record(stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(6_000_000)
        end.record(stream)
        await asyncio.wait_for(port.completion(end, kind="sleep"), 10)
        seen_s.append(time.perf_counter() - began)
        device_s.append(start.elapsed_time(end) / 1000)
    late = sorted(seen - device for seen, device in zip(seen_s, device_s, strict=True))
    # never early, as far as two clocks can tell; and not late by much, where other tests leave the device alone
    assert late[0] > -50e-6
    assert late[0] < 2e-3
    if name == "adaptive":
        assert min(device_s) * 0.7 < port.predicted_s("compute", "sleep") < max(seen_s) * 1.3
    await port.aclose()


BROKEN_DEVICE = """
import asyncio, json, os, sys, time
import torch, uvloop
from fdasync.errors import DeviceFailed
from fdasync.gpu.ports.other import make_port

class Lease:
    released = 0
    def release(self):
        self.released += 1

async def main():
    port = make_port(sys.argv[1], torch.device("cuda"))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    table = torch.zeros(8, device="cuda")
    right = torch.tensor([1], device="cuda")
    wrong = torch.tensor([1 << 20], device="cuda")
    events = [torch.cuda.Event(blocking=True) for _ in range(6)]
    # kernels are loaded before the clock starts
    torch.index_select(table, 0, right)
    torch.cuda._sleep(1000)
    for event in events:
        event.record(streams[0])
    torch.cuda.synchronize()
    leases = [Lease() for _ in events]
    futures = []
    for number, event in enumerate(events):
        stream = streams[number % 2]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
            if number == 3:
                torch.index_select(table, 0, wrong)
        event.record(stream)
        futures.append(port.completion(event, lane=f"lane {number % 2}", leases=(leases[number],)))
    began = time.monotonic()
    _, waiting = await asyncio.wait(futures, timeout=10)
    took_s = time.monotonic() - began
    late = port.completion(events[0])
    await asyncio.wait([late], timeout=10)
    failed = [isinstance(future.exception(), DeviceFailed) for future in futures if future.done()]
    await port.aclose(1.0)
    print(json.dumps({
        "waiting": len(waiting), "took_s": took_s, "failed": failed, "late": isinstance(late.exception(), DeviceFailed),
        "problem": str(late.exception()), "released": [lease.released for lease in leases], "lost": port.lost,
    }), flush=True)

uvloop.run(main())
# what the device left behind cannot be taken down in order
os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adaptive", "hostfunc", "thread"])
def test_an_error_of_the_device_fails_all_futures_soon(name):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BROKEN_DEVICE), name],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["waiting"] == 0
    assert said["took_s"] < 2.0
    # what came before the error on its lane may have been seen done; from it on nothing was
    assert said["failed"][3:] == [True, True, True] or said["failed"][3::2] == [True, True], said
    assert said["late"], said
    assert [not failed for failed in said["failed"]] == [count == 1 for count in said["released"]]
    assert said["lost"] == sum(said["failed"])
    assert "cuda" in said["problem"].lower()
