"""What it costs to learn, on a loop, that a step of the device is done. Needs a CUDA GPU.

    WAY_late_p50/p99_us_5ms_idle   from the device's end to the code that awaits it, for steps of so many ms, on a loop
                                   with nothing else to do; `busy`: beside a coroutine that always has 50 us to do
    WAY_cpu_share_5ms              CPU time of the process over wall time while it waits, idle loop
    adaptive_over_spin_p50_5ms     the default port over the limit
    bubble_us                      what an event and a completion per step put between back-to-back kernels of 46 us,
                                   by the device's clock

The ways are the port, and the limit: `event.synchronize()`, which spins and blocks the loop. They take turns, step by
step. Late is the host's time of a step less the device's own between two events, so it contains the launch too,
for all ways alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
import uvloop

from benchmarks._report import Report, calibrate_us
from fdasync.gpu.pools import EventPool
from fdasync.gpu.ports.adaptive import AdaptivePort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync.gpu.completion import CompletionPort

PORT, SPIN = WAYS = ("adaptive", "spin")
STEPS_MS = (0.2, 1.0, 5.0, 15.0)
LOADS = ("idle", "busy")
KERNEL_US = 46.0
AIMS = {"adaptive_over_spin_p50_5ms": 2.5, "adaptive_cpu_share_5ms": 0.12, "bubble_us": 3.0}
# steps that teach a port before any is measured
_LEARN = 15
# what one way may take for one kind of step, and the steps that it takes in any case
_MOST_S = 2.5
_FEWEST = 5
_BUBBLE_STEPS = 2000
# more than the port is late by
_IN_FLIGHT = 64
_BUSY_S = 50e-6


def sleep_cycles_per_us() -> float:
    """How `torch.cuda._sleep` counts on this device."""
    stream = torch.cuda.Stream()
    cycles = 5_000_000
    took_ms = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        end.record(stream)
        end.synchronize()
        took_ms.append(start.elapsed_time(end))
    # the first ones wait for the clocks to come up
    return cycles / (statistics.median(took_ms[3:]) * 1000)


@contextlib.asynccontextmanager
async def load(kind: str) -> AsyncIterator[None]:
    """The loop has nothing else to do, or always 50 us of Python."""

    async def work() -> None:
        while True:
            until = time.perf_counter() + _BUSY_S
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    if kind == "idle":
        yield
        return
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class Waits:
    """What one way took, step by step."""

    def __init__(self) -> None:
        self.late_us: list[float] = []
        self.cpu_s = self.wall_s = 0.0


class Steps:
    """One kind of step, awaited in one of the ways."""

    def __init__(self, port: CompletionPort, cycles: int, kind: str) -> None:
        self._port = port
        self._cycles = cycles
        self._kind = kind
        self._stream = torch.cuda.Stream()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    async def one(self, way: str, waits: Waits | None) -> None:
        end = self._end
        cpu, began = time.process_time(), time.perf_counter()
        self._start.record(self._stream)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)
        end.record(self._stream)
        if way == SPIN:
            end.synchronize()
        else:
            await self._port.completion(end, kind=self._kind)
        ended, cpu_after = time.perf_counter(), time.process_time()
        if waits is not None:
            waits.late_us.append((ended - began) * 1e6 - self._start.elapsed_time(end) * 1000)
            waits.cpu_s += cpu_after - cpu
            waits.wall_s += ended - began


async def measure_waits(cycles_per_us: float, repeats: int) -> dict[tuple[str, float, str], Waits]:
    """By way, milliseconds and load."""
    found: dict[tuple[str, float, str], Waits] = {}
    port = AdaptivePort()
    try:
        for step_ms in STEPS_MS:
            for kind in LOADS:
                steps = Steps(port, int(step_ms * 1000 * cycles_per_us), f"{step_ms:g} {kind}")
                print(f"  steps of {step_ms:g} ms, {kind} loop", file=sys.stderr, flush=True)
                async with load(kind):
                    for turn in range(-_LEARN, repeats):
                        for way in WAYS:
                            waits = found.setdefault((way, step_ms, kind), Waits())
                            if waits.wall_s < _MOST_S or len(waits.late_us) < _FEWEST:
                                await steps.one(way, waits if turn >= 0 else None)
    finally:
        await port.aclose()
    return found


async def back_to_back_us(cycles: int, count: int, *, completions: bool) -> float:
    """Microseconds of the device for each of so many kernels, with a completion each or without."""
    port = AdaptivePort() if completions else None
    events = EventPool(torch.cuda.Event)
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    waiting: deque[asyncio.Future[None]] = deque()
    with torch.cuda.stream(stream):
        for number in range(-_IN_FLIGHT, count):
            if number == 0:
                start.record(stream)
            torch.cuda._sleep(cycles)
            if port is not None:
                hold = events.take()
                hold.event.record(stream)
                waiting.append(port.completion(hold.event, holds=(hold,)))
                if len(waiting) == _IN_FLIGHT:
                    await waiting.popleft()
            elif number % _IN_FLIGHT == 0:
                await asyncio.sleep(0)
        end.record(stream)
    for future in waiting:
        await future
    if port is not None:
        await port.aclose()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=100, help="steps of each kind and way in each run (default 100)")
    parser.add_argument("--runs", type=int, default=3, help="runs; medians are reported (default 3)")
    parser.add_argument("--quick", action="store_true", help="one run of 60 steps each, about 20 s")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_completion needs a CUDA GPU, and torch sees none")
    repeats, runs = (60, 1) if args.quick else (args.repeats, args.runs)
    report = Report("What it costs to learn that a step of the device is done")
    report.conditions |= {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
        "uvloop": uvloop.__version__,
        "repeats": repeats,
        "calibration_us": round(calibrate_us(), 1),
    }
    cycles_per_us = sleep_cycles_per_us()
    report.conditions["cycles_per_us"] = round(cycles_per_us, 1)
    found = [uvloop.run(measure_waits(cycles_per_us, repeats)) for _ in range(runs)]
    for step_ms in STEPS_MS:
        for kind in LOADS:
            for way in WAYS:
                waits = [run[way, step_ms, kind] for run in found]
                where = f"{step_ms:g}ms_{kind}"
                if (counted := min(len(each.late_us) for each in waits)) < repeats:
                    report.conditions[f"{way}_steps_{where}"] = counted
                report.add(f"{way}_late_p50_us_{where}", [percentile(each.late_us, 0.5) for each in waits])
                report.add(f"{way}_late_p99_us_{where}", [percentile(each.late_us, 0.99) for each in waits])
    for step_ms in STEPS_MS:
        for way in WAYS:
            waits = [run[way, step_ms, "idle"] for run in found]
            name = f"{way}_cpu_share_{step_ms:g}ms"
            report.add(name, [each.cpu_s / each.wall_s for each in waits], aim=AIMS.get(name))
    ratios = [
        percentile(run[PORT, 5.0, "idle"].late_us, 0.5) / percentile(run[SPIN, 5.0, "idle"].late_us, 0.5)
        for run in found
    ]
    report.add("adaptive_over_spin_p50_5ms", ratios, aim=AIMS["adaptive_over_spin_p50_5ms"])
    cycles = int(KERNEL_US * cycles_per_us)
    bubbles: list[float] = []
    plain = []
    for number in range(3 if args.quick else 9):
        print(f"  back to back, round {number + 1}", file=sys.stderr, flush=True)
        plain.append(uvloop.run(back_to_back_us(cycles, _BUBBLE_STEPS, completions=False)))
        took = uvloop.run(back_to_back_us(cycles, _BUBBLE_STEPS, completions=True))
        bubbles.append(took - plain[-1])
    report.add("kernel_us", plain)
    report.add("bubble_us", bubbles, aim=AIMS["bubble_us"])
    report.finish(args.json)
    print(json.dumps({"figures": report.figures, "conditions": report.conditions}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
