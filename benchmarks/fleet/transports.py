"""What a transport costs beyond the raw path: blocks copied from another process, each way against plain calls.

**shm.** `ShmTransport.receive` against a memcpy of each part of the same memory, mapped read-only and touched before,
and an XXH3 pass over the copy. **tcp.** `TcpTransport.receive` against blocking `recv_into` on a plain socket over
127.0.0.1, whose other end is a process that does nothing but `sendall` from the same memory, and an XXH3 pass.

Both arms of each have the same source memory and the same destination, touched before; blocks are 1 MiB of KV with
their rows, and the sender's checksums are taken before. Arms take turns to begin; the figure of a ratio is the ratio of
the medians of MB/s. The longest callback is measured in rounds of its own, on a `TimedLoop`.

**tls.** (`--only tls` alone) The same blocks by TLS and in clear, in turns: `tls_over_tcp` is the ratio of the medians
of MB/s. Both ends encrypt on the cores that this machine has.

**mooncake.** (`--only mooncake` alone, as root) The same blocks by Mooncake's engine, tcp and shm, in turns, in a
network that has only loopback: `mooncake_over_tcp` and `mooncake_over_shm` are ratios of the medians of MB/s.

**The loop.** (`--only loop` alone) What receiving these blocks, and hashing as many, costs the loop of an instance, on
it and with the process beside it; `--blocks 206` is a hand-over of 216 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import time
from typing import TYPE_CHECKING

import uvloop
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport
from fdasync_fleet.transfer.shm import ShmTransport
from fdasync_fleet.transfer.tcp import TcpTransport

from benchmarks.fleet.transfer_loop import measure_loop_share
from benchmarks.fleet.transport_bench import Bench
from benchmarks.fleet.transport_sender import ROWS_NBYTES
from benchmarks.lib.report import Report, calibrate_us
from benchmarks.lib.timed_loop import TimedLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync_fleet.transfer.base import Transport

RATIO_AIM = 0.8
CALLBACK_AIM_MS = 0.5
WARM_ROUNDS = 2
TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": ShmTransport, "tcp": TcpTransport}


async def measure(bench: Bench, name: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of both arms, pair by pair."""
    times: dict[str, list[float]] = {"ours": [], "raw": []}
    raw = bench.raw_shm if name == "shm" else bench.raw_tcp
    transport = TRANSPORTS[name]()
    await transport.open(bench.regions)
    try:
        for round_ in range(WARM_ROUNDS + pairs):
            for arm in ("ours", "raw") if round_ % 2 else ("raw", "ours"):
                bench.spoil()
                started = time.perf_counter()
                if arm == "ours":
                    await bench.ours(transport)
                else:
                    raw()
                spent = time.perf_counter() - started
                if round_ >= WARM_ROUNDS:
                    times[arm].append(spent)
    finally:
        await transport.aclose()
    return times


async def measure_loop(bench: Bench, name: str, rounds: int) -> list[tuple[float, str]]:
    """The longest callback of each round, in milliseconds of CPU time, and its name."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    longest = []
    transport = TRANSPORTS[name]()
    await transport.open(bench.regions)
    try:
        await bench.ours(transport)
        gc.collect()
        for _ in range(rounds):
            # a callback that began before the reset is counted whole when it ends
            await asyncio.sleep(0)
            loop.reset()
            await bench.ours(transport)
            longest.append((loop.longest_s * 1e3, loop.longest))
    finally:
        await transport.aclose()
    return longest


async def measure_ours(bench: Bench, transports: dict[str, Transport], rounds: int) -> dict[str, list[float]]:
    """Seconds of one receive by each, round by round."""
    times: dict[str, list[float]] = {name: [] for name in transports}
    for transport in transports.values():
        await transport.open(bench.regions)
    try:
        for round_ in range(WARM_ROUNDS + rounds):
            for name in transports if round_ % 2 else reversed(transports):
                bench.spoil()
                started = time.perf_counter()
                await bench.ours(transports[name], name)
                if round_ >= WARM_ROUNDS:
                    times[name].append(time.perf_counter() - started)
    finally:
        for transport in transports.values():
            await transport.aclose()
    return times


def rates(nbytes: int, seconds: Sequence[float]) -> list[float]:
    return [nbytes / 1e6 / each for each in seconds]


def report_times(report: Report, name: str, nbytes: int, times: dict[str, list[float]]) -> None:
    ours, raw = (rates(nbytes, times[arm]) for arm in ("ours", "raw"))
    middle = statistics.median(raw)
    report.add(f"{name}_ratio", [rate / middle for rate in ours], aim=RATIO_AIM)
    report.add(f"{name}_mb_per_s", ours)
    report.conditions[f"{name}_raw_mb_per_s"] = [round(value) for value in (middle, min(raw), max(raw))]


def compare_slices(report: Report, bench: Bench, rounds: int) -> None:
    """Copy and hash in slices of so many KiB, with no loop in between: the reason for SLICE_NBYTES."""
    sizes = (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 40)
    spent: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            started = time.perf_counter()
            bench.raw_shm(size)
            spent[size].append(time.perf_counter() - started)
    report.conditions["copy_and_hash_mb_per_s_by_slice_kib"] = {
        "whole" if size == 1 << 40 else str(size >> 10): round(bench.moved_nbytes / 1e6 / statistics.median(each))
        for size, each in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256, help="blocks that move (default 256)")
    parser.add_argument("--block-nbytes", type=int, default=1 << 20, help="KV of a block (default 1 MiB)")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of each figure (default 15)")
    parser.add_argument("--only", choices=[*TRANSPORTS, "tls", "loop", "mooncake"], help="this part only")
    parser.add_argument("--json", metavar="FILE", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    report = Report("Transports against the raw path")
    report.conditions["calibration_us"] = round(calibrate_us(), 1)
    report.conditions["blocks"] = f"{options.blocks} of {options.block_nbytes} bytes, rows of {ROWS_NBYTES}"
    load = os.getloadavg()[0]
    if options.only == "mooncake":
        # of a plugin, which need not be installed
        from fdasync_mooncake.testing import in_loopback_namespace

        with in_loopback_namespace():
            measure_all(report, options)
    else:
        measure_all(report, options)
    # load of this machine by other processes, before and after
    report.conditions["load_1m"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    report.finish(options.json_path)


def measure_all(report: Report, options: argparse.Namespace) -> None:
    """Add the figures that were asked for."""
    bench = Bench(options.blocks, options.block_nbytes, ["mooncake"] if options.only == "mooncake" else [])
    try:
        for name in TRANSPORTS:
            if options.only in (None, name):
                report_times(report, name, bench.moved_nbytes, uvloop.run(measure(bench, name, options.pairs)))
        for name in TRANSPORTS:
            if options.only in (None, name):
                with asyncio.Runner(loop_factory=TimedLoop) as runner:
                    longest = runner.run(measure_loop(bench, name, options.pairs))
                worst, what = max(longest)
                report.add(f"{name}_callback_ms_max", [worst], aim=CALLBACK_AIM_MS)
                report.conditions[f"{name}_callback_ms_by_round"] = [round(value, 3) for value, _ in longest]
                report.conditions[f"{name}_callback_longest"] = what
        if options.only in (None, "tls"):
            both: dict[str, Transport] = {"tls": TcpTransport(tls=True), "tcp": TcpTransport()}
            found = uvloop.run(measure_ours(bench, both, options.pairs))
            tls, clear = (rates(bench.moved_nbytes, found[arm]) for arm in ("tls", "tcp"))
            report.add("tls_over_tcp", [rate / statistics.median(clear) for rate in tls])
            report.add("tls_mb_per_s", tls)
            report.add("tls_clear_mb_per_s", clear)
        if options.only == "mooncake":
            three = {name: make_transport(TransportSpec(name)) for name in ("mooncake", "tcp", "shm")}
            found = uvloop.run(measure_ours(bench, three, options.pairs))
            by_name = {name: rates(bench.moved_nbytes, seconds) for name, seconds in found.items()}
            for name, values in by_name.items():
                report.add(f"{name}_mb_per_s", values)
            for name in ("tcp", "shm"):
                middle = statistics.median(by_name[name])
                report.add(f"mooncake_over_{name}", [rate / middle for rate in by_name["mooncake"]])
        for name in TRANSPORTS if options.only in (None, "loop") else ():
            with asyncio.Runner(loop_factory=TimedLoop) as runner:
                runner.run(measure_loop_share(report, bench, name, options.pairs))
        if options.only in (None, "shm"):
            compare_slices(report, bench, options.pairs)
    finally:
        bench.close()
