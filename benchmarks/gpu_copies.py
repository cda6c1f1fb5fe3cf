"""Block copies between the device pool and a registered host arena, by each way to launch them; needs a CUDA GPU.

Blocks of 1.5 MiB (16 tokens x 48 layers x K,V x 4 heads x 128 x bf16), a pool of 2,000, an arena of 512. Every round
does everything once, so that a slow moment of the machine falls on all of it; the first round warms up.

    limit_*            one copy of the same bytes between the pool and one pinned buffer
    out_*, in_*        GB/s of n scattered blocks by the device's clock, the launch included
    cpu_us_*           CPU of the launching thread for one block of n
    part<n>_*          GB/s of the part of n scattered blocks that one of n ranks holds
    call_*             GB/s of `await BlockCopies.out(...)` by the host's clock, through the adaptive port
    gap_us_1000_*      longest stop of the loop while 1,000 blocks are copied in by one call
    start_us_1000_*    of that, the call itself: ids and the first submission
    ids_us_1000        of that, the ids
    gap_us_idle        longest stop of a loop that does nothing for 30 ms: the machine's own
    slow_*             time of a step beside copies over its time alone: 20 products of 8192^3, or passes over 4 GiB;
                       the copies begin before and end after it, beside_gbps_* is how fast they were
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import uvloop

from benchmarks._block_kernel import KernelWay
from benchmarks._gpu_copy_parts import Parts
from benchmarks._gpu_copy_rig import Rig, Sizes, submit, timed
from benchmarks._report import Report, calibrate_us
from fdasync.cache.host_arena import HostArena
from fdasync.gpu.block_copies import BatchWay, BlockCopies, SingleWay
from fdasync.gpu.cudart import Driver
from fdasync.gpu.pools import EventPool
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.gpu.block_copies import Way
    from fdasync.gpu.block_rows import Lane

MEASURED: tuple[tuple[Lane, str], ...] = (("copy_out", "out"), ("copy_in", "in"))
PRODUCTS = 20
PASSES = 12


def check(rig: Rig) -> None:
    """Every way moves the right bytes both ways; void otherwise."""
    pool = rig.pool.view(torch.uint8)
    for name, way in rig.ways.items():
        device, host = rig.scattered(7)
        timed(rig, "copy_out", lambda way=way, device=device, host=host: submit(way, "copy_out", device, host))
        if not np.array_equal(rig.host.kv[host], pool[torch.from_numpy(device).to(rig.device)].cpu().numpy()):
            raise SystemExit(f"{name} copied other bytes out: nothing was measured")
        other, _ = rig.scattered(7)
        timed(rig, "copy_in", lambda way=way, other=other, host=host: submit(way, "copy_in", other, host))
        if not np.array_equal(rig.host.kv[host], pool[torch.from_numpy(other).to(rig.device)].cpu().numpy()):
            raise SystemExit(f"{name} copied other bytes in: nothing was measured")


def speeds(rig: Rig, kept: bool) -> None:
    """One round of bare copies."""
    block_nbytes = rig.host.block_nbytes
    for lane, short in MEASURED:
        for count in rig.sizes.counts:
            nbytes = count * block_nbytes
            pinned = rig.pinned[: count * rig.sizes.block_elements]
            flat = rig.pool[:count].reshape(-1)
            ends = (pinned, flat) if lane == "copy_out" else (flat, pinned)
            took, _ = timed(rig, lane, lambda ends=ends: ends[0].copy_(ends[1], non_blocking=True))
            if kept:
                rig.values[f"limit_{short}_{count}"].append(nbytes / took / 1e9)
            for name, way in rig.ways.items():
                device, host = rig.scattered(count)
                took, cpu = rig.timed(lane, way, device, host)
                if kept:
                    rig.values[f"{short}_{name}_{count}"].append(nbytes / took / 1e9)
                    rig.values[f"cpu_us_{short}_{name}_{count}"].append(cpu * 1e6 / count)


async def gaps(stop: asyncio.Event) -> float:
    """The longest turn of the loop, in seconds."""
    longest, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def idle_gap() -> float:
    """The longest turn of a loop that nobody uses, in seconds."""
    stop = asyncio.Event()
    watch = asyncio.ensure_future(gaps(stop))
    await asyncio.sleep(0.03)
    stop.set()
    return await watch


async def calls(rig: Rig, kept: bool) -> None:
    """One round through BlockCopies, each way in turn."""
    own = rig.copies._way
    for name, way in rig.ways.items():
        rig.copies._way = way
        for lane, short in MEASURED:
            device, host = rig.scattered(64 if max(rig.sizes.counts) >= 64 else 2)
            ids = device.tolist(), host.tolist()
            began = time.perf_counter()
            nbytes = await (rig.copies.out(*ids) if lane == "copy_out" else rig.copies.back(ids[1], ids[0]))
            took = time.perf_counter() - began
            if kept:
                rig.values[f"call_{short}_{name}_64"].append(nbytes / took / 1e9)
        # more than the arena has: blocks may be read twice
        device = rig.rng.permutation(rig.sizes.blocks)[: rig.sizes.long_call]
        ids = rig.rng.integers(0, rig.sizes.host_blocks, rig.sizes.long_call).tolist(), device.tolist()
        stop = asyncio.Event()
        watch = asyncio.ensure_future(gaps(stop))
        await asyncio.sleep(0)
        began = time.perf_counter()
        moved = rig.copies.back(*ids)
        start = time.perf_counter() - began
        await moved
        stop.set()
        longest = await watch
        if kept:
            rig.values[f"gap_us_1000_{name}"].append(longest * 1e6)
            rig.values[f"start_us_1000_{name}"].append(start * 1e6)
    began = time.perf_counter()
    rig.copies._rows.ids("copy_in", ids[1], ids[0])
    took, longest = time.perf_counter() - began, await idle_gap()
    if kept:
        rig.values["ids_us_1000"].append(took * 1e6)
        rig.values["gap_us_idle"].append(longest * 1e6)
    # a way by kernel holds views of the pages
    rig.copies._way = own


def steps(rig: Rig) -> dict[str, Callable[[], None]]:
    """The two steps that copies run beside."""
    side = rig.sizes.product
    left, right = (torch.randn((side, side), device=rig.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    wide = torch.ones(rig.sizes.loop_nbytes // 4, device=rig.device)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)

    def passes() -> None:
        for _ in range(PASSES):
            wide.add_(1.0)

    return {"products": products, "passes": passes}


def beside(rig: Rig, step: Callable[[], None], lanes: tuple[Lane, ...], way: Way | None, alone_s: float) -> Any:
    """Seconds of a step beside copies on these lanes, and GB/s of the slowest lane."""
    half = rig.sizes.host_blocks // 2
    # copies outlast the step, were they as fast as the bus
    rounds = max(2, math.ceil(alone_s * 1.8 * 60e9 / (half * rig.host.block_nbytes)))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    marks = {lane: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for lane in lanes}
    for lane in lanes:
        # the two directions share no block
        high = lane == "copy_in"
        places = np.arange(half, dtype=np.int64) + half * high
        with rig.streams.on(lane):
            rig.streams.record(lane, marks[lane][0])
            for _ in range(rounds):
                blocks = rig.rng.permutation(rig.sizes.blocks // 2)[:half] + rig.sizes.blocks // 2 * high
                submit(way, lane, blocks, places)  # type: ignore[arg-type]
            rig.streams.record(lane, marks[lane][1])
    with rig.streams.on("compute"):
        rig.streams.record("compute", start)
        step()
        rig.streams.record("compute", end)
    end.synchronize()
    outlasted = not any(mark.query() for _, mark in marks.values())
    for _, mark in marks.values():
        mark.synchronize()
    nbytes = rounds * half * rig.host.block_nbytes
    slowest = min((nbytes / first.elapsed_time(last) / 1e6 for first, last in marks.values()), default=0.0)
    return start.elapsed_time(end) / 1e3, slowest, outlasted


def slowdowns(rig: Rig, rounds: int, names: list[str]) -> int:
    """Steps alone and beside copies, interleaved; returns how often copies ended before the step."""
    early = 0
    for step_name, step in steps(rig).items():
        beside(rig, step, (), None, 0.0)
        alone = statistics.median(beside(rig, step, (), None, 0.0)[0] for _ in range(3))
        for _ in range(rounds):
            base, _, _ = beside(rig, step, (), None, 0.0)
            rig.values[f"alone_ms_{step_name}"].append(base * 1e3)
            for name in names:
                cases: dict[str, tuple[Lane, ...]] = {
                    "out": ("copy_out",),
                    "in": ("copy_in",),
                    "both": ("copy_out", "copy_in"),
                }
                for short, lanes in cases.items():
                    took, speed, outlasted = beside(rig, step, lanes, rig.ways[name], alone)
                    early += not outlasted
                    rig.values[f"slow_{step_name}_{short}_{name}"].append(took / base)
                    rig.values[f"beside_gbps_{step_name}_{short}_{name}"].append(speed)
    return early


async def measure(
    device: torch.device, sizes: Sizes, rounds: int, report: Report, driver: Driver | None, *, steps_too: bool = True
) -> Rig:
    """All of it, or all but steps beside copies; the rig has the values. `driver` is for rehearsals."""
    shape = (sizes.blocks, sizes.block_elements)
    pool = torch.randint(-30_000, 30_000, shape, dtype=torch.int16, device=device)
    host = HostArena.create(sizes.host_blocks, pool.shape[1] * pool.element_size())
    # nobody pays for fresh pages later
    host.kv[:] = 1
    streams = Streams(device)
    port = AdaptivePort()
    driver = driver or Driver()
    began = time.perf_counter()
    events = EventPool(torch.cuda.Event)
    copies = BlockCopies(pool, host, streams, events, port, driver=driver)
    report.conditions["register_s"] = round(time.perf_counter() - began, 3)
    registered = copies._registered
    assert registered is not None
    rows = pool.view(torch.uint8)
    ways: dict[str, Way] = {"single": SingleWay(driver, rows, registered.addresses, streams)}
    if driver.has_batch:
        ways["batch"] = BatchWay(driver, rows, registered.addresses, streams)
    if registered.same:
        ways.update({f"kernel{number}": KernelWay(rows, host, programs=number) for number in (8, 16, 32)})
    report.conditions["ways"] = list(ways)
    pinned = torch.empty(max(sizes.counts) * sizes.block_elements, dtype=pool.dtype, pin_memory=device.type == "cuda")
    rig = Rig(device, sizes, pool, host, streams, copies, ways, pinned, np.random.default_rng(1))
    check(rig)
    kind = BatchWay if driver.has_batch else SingleWay
    parts = Parts(rig, registered.addresses, lambda rows, places: kind(driver, rows, places, streams))
    parts.check()
    for number in range(rounds + 1):
        speeds(rig, number > 0)
        parts.measure(MEASURED, number > 0)
        await calls(rig, number > 0)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    names = [name for name in ways if name not in ("kernel8", "kernel32")]
    if steps_too:
        report.conditions["copies_ended_before_the_step"] = slowdowns(rig, max(3, rounds // 2), names)
    began = time.perf_counter()
    rig.ways.clear()
    await copies.aclose()
    report.conditions["unregister_s"] = round(time.perf_counter() - began, 3)
    await port.aclose()
    host.close()
    return rig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=9, help="of everything but slowdowns, which take half (default 9)"
    )
    parser.add_argument("--alone", action="store_true", help="no steps beside copies")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_copies needs a CUDA GPU, and torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    report = Report("block copies, 1.5 MiB each")
    report.conditions["calibration_us"] = calibrate_us()
    report.conditions["gpu"] = torch.cuda.get_device_name(device)
    report.conditions["torch"] = torch.__version__
    rig = uvloop.run(measure(device, Sizes(), options.rounds, report, None, steps_too=not options.alone))
    for name, values in rig.values.items():
        report.add(name, values)
    report.finish(options.json_path)


if __name__ == "__main__":
    main()
