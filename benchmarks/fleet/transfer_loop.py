"""What a hand-over costs the instance's loop: blocks received and hashed on it, and in the process beside it.

Used by `benchmarks/fleet/transports.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

from fdasync_fleet.transfer.base import checksum_parts
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport
from fdasync_fleet.transfer.process.proxy import TransferProcess

from benchmarks.lib.timed_loop import TimedLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.fleet.transport_bench import Bench
    from benchmarks.lib.report import Report

#: of a hand-over, on one side
AIM_MS = 30.0
WARM_ROUNDS = 2


async def measure_loop_share(report: Report, bench: Bench, name: str, rounds: int) -> None:
    """Add the milliseconds of CPU that the loop spends, and wall times, both ways in turn."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    here = make_transport(TransportSpec(name))
    process = TransferProcess([TransportSpec(name)])
    there = process.transports[0]
    parts = [part for copy_spec in bench.copy_specs for part in copy_spec.parts]
    arms: dict[str, Callable[[], Awaitable[object]]] = {
        "receive_loop": partial(bench.ours, here),
        "receive_process": partial(bench.ours, there),
        "hash_loop": partial(checksum_parts, bench.regions, parts),
        "hash_process": partial(process.checksums, parts),
    }
    spent: dict[str, list[float]] = {arm: [] for arm in arms}
    wall: dict[str, list[float]] = {arm: [] for arm in arms}
    await here.open(bench.regions)
    await there.open(bench.regions)
    try:
        for round_ in range(WARM_ROUNDS + rounds):
            for arm, work in arms.items() if round_ % 2 else reversed(arms.items()):
                bench.spoil()
                # a callback that began before the reset is counted whole when it ends
                await asyncio.sleep(0)
                loop.reset()
                started = time.perf_counter()
                await work()
                ended = time.perf_counter()
                await asyncio.sleep(0)
                if round_ >= WARM_ROUNDS:
                    spent[arm].append(loop.spent_s * 1e3)
                    wall[arm].append((ended - started) * 1e3)
    finally:
        await there.aclose()
        await here.aclose()
    for arm, values in spent.items():
        report.add(f"{name}_{arm}_ms", values, **({"aim": AIM_MS} if arm.endswith("process") else {}))
    for arm, values in wall.items():
        report.conditions[f"{name}_{arm}_wall_ms"] = round(statistics.median(values), 1)
