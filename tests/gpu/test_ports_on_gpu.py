"""Completion ports on a real device: the suite, real steps, and an error of the device."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import uvloop

from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.testing import PortTests
from tests.gpu.port_events import wait_value

pytestmark = pytest.mark.usefixtures("cuda_is_up")


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
        return AdaptivePort()


@pytest.mark.gpu
async def test_real_steps_complete_when_they_end():
    port = AdaptivePort()
    stream = torch.cuda.Stream()
    seen_s, device_s = [], []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
        began = time.perf_counter()
        start.record(stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(6_000_000)
        end.record(stream)
        await asyncio.wait_for(port.completion(end, kind="sleep"), 300)
        seen_s.append(time.perf_counter() - began)
        device_s.append(start.elapsed_time(end) / 1000)
    late = sorted(seen - device for seen, device in zip(seen_s, device_s, strict=True))
    # never early, as far as two clocks can tell; and not late by more than a few slices of time of other processes
    assert late[0] > -50e-6
    assert late[0] < 10e-3
    assert min(device_s) * 0.7 < port.predicted_s("compute", "sleep") < max(seen_s) * 1.3
    await port.aclose()


BROKEN_DEVICE = """
import asyncio, json, os, sys, time
import torch, uvloop
from fdasync.errors import DeviceFailed
from fdasync.gpu.ports.adaptive import AdaptivePort

class Hold:
    released = 0
    def release(self):
        self.released += 1

async def main():
    port = AdaptivePort()
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
    holds = [Hold() for _ in events]
    futures = []
    for number, event in enumerate(events):
        stream = streams[number % 2]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
            if number == 3:
                torch.index_select(table, 0, wrong)
        event.record(stream)
        futures.append(port.completion(event, lane=f"lane {number % 2}", holds=(holds[number],)))
    began = time.monotonic()
    _, waiting = await asyncio.wait(futures, timeout=10)
    took_s = time.monotonic() - began
    late = port.completion(events[0])
    await asyncio.wait([late], timeout=10)
    failed = [isinstance(future.exception(), DeviceFailed) for future in futures if future.done()]
    await port.aclose(1.0)
    print(json.dumps({
        "waiting": len(waiting), "took_s": took_s, "failed": failed, "late": isinstance(late.exception(), DeviceFailed),
        "problem": str(late.exception()), "released": [hold.released for hold in holds], "lost": port.lost,
    }), flush=True)

uvloop.run(main())
# what the device left behind cannot be taken down in order
os._exit(0)
"""


@pytest.mark.gpu
def test_an_error_of_the_device_fails_all_futures_soon():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BROKEN_DEVICE)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["waiting"] == 0
    assert said["took_s"] < 2.0
    # work before the error on its lane may have been seen done; the failed work and all behind it were not
    assert said["failed"][3:] == [True, True, True] or said["failed"][3::2] == [True, True], said
    assert said["late"], said
    assert [not failed for failed in said["failed"]] == [count == 1 for count in said["released"]]
    assert said["lost"] == sum(said["failed"])
    assert "cuda" in said["problem"].lower()
