"""What a store costs beyond the raw path: the file store and Mooncake, each against the same bytes moved without us.

**File.** 256 blocks of 1.5 MiB of KV with their rows, moved by the engine's own objects (`tier.py`: store I/O,
wrappers, a process of its own, object format), against plain `pwritev` and `preadv` from as many threads in a process
of its own (`raw_file.py`). Both arms: the same shared memory, touched before; slots of the same segments, reused; no
syncs; one XXH3 pass; timed by the caller. Writes displace the blocks used longest ago; warm reads come from the page
cache; before cold reads both arms' files are synced and dropped from it.

Of both arms the CPU time of all their threads is taken as well, the caller's included: `cpu_ratio`. It is what the wall
clock's ratio comes to where all cores are busy, and other work on the machine moves it less.

**Loop.** The longest callback on the engine's loop (uvloop) while 256 blocks move: written, read, and half of them
written while the other half is read; in CPU time of its thread. Beside it, how late a 1 ms timer came.

**Mooncake.** 64 blocks of 1 MiB put and got by the engine's objects, against the same client called directly.

Arms take turns; the figure of a ratio is the ratio of the medians of MB/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from benchmarks.lib.report import Report, calibrate_us
from benchmarks.lib.timed_loop import Ticker, TimedLoop
from benchmarks.stores.page_cache import drop, settle
from benchmarks.stores.raw_file import RawFiles
from benchmarks.stores.tier import Blocks, Tier
from fdasync.cache.store.file.layout import Shape, slots_within
from fdasync.cache.store.file.store import FileConfig
from fdasync.ipc.shared_memory import HOST_REGION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RATIO_AIM = 0.9
LOOP_BLOCK_AIM_MS = 2.0
# every slot has been written and all memory is mapped in both processes
FILE_WARM_ROUNDS = 3
# the pool's memory is touched
MOONCAKE_WARM_ROUNDS = 3
MOONCAKE_BLOCKS, MOONCAKE_NBYTES = 64, 1 << 20
PHASES = ("write", "read_warm", "read_cold")


class Times:
    """Seconds of both arms, pair by pair, by what was done; of the clock, and of the CPU where that was measured."""

    def __init__(self) -> None:
        self.ours: dict[str, list[float]] = {}
        self.raw: dict[str, list[float]] = {}
        self.cpu_ours: dict[str, list[float]] = {}
        self.cpu_raw: dict[str, list[float]] = {}

    def report(self, report: Report, store: str, nbytes: int) -> None:
        """Report the ratio of each phase, and the rates behind it."""
        for phase, ours_s in self.ours.items():
            ours = [nbytes / 1e6 / seconds for seconds in ours_s]
            raw = [nbytes / 1e6 / seconds for seconds in self.raw[phase]]
            raw_rate = statistics.median(raw)
            name = f"{store}_{phase}_ratio"
            report.add(name, [rate / raw_rate for rate in ours], aim=RATIO_AIM)
            report.conditions[f"{store}_{phase}_mb_s"] = {
                "ours": [round(value) for value in (statistics.median(ours), min(ours), max(ours))],
                "raw": [round(value) for value in (raw_rate, min(raw), max(raw))],
            }
        for phase, ours_s in self.cpu_ours.items():
            raw_s = statistics.median(self.cpu_raw[phase])
            report.add(f"{store}_{phase}_cpu_ratio", [raw_s / seconds for seconds in ours_s])
            report.conditions[f"{store}_{phase}_cpu_ms"] = {
                "ours": round(statistics.median(ours_s) * 1e3, 1),
                "raw": round(raw_s * 1e3, 1),
            }


class FileArms:
    """The file store and the raw arm, side by side."""

    def __init__(self, tier: Tier, raw: RawFiles, blocks: Blocks, ours: Path, theirs: Path) -> None:
        self._tier = tier
        self._raw = raw
        self._blocks = blocks
        self._folders = (ours, theirs)
        self._all = range(blocks.count)

    async def pair(self, round_: int, times: Times | None) -> None:
        """Each phase once by both arms; the one that begins changes from round to round."""
        for folder in self._folders:
            settle(folder)
        for phase in PHASES:
            for ours in (True, False) if round_ % 2 else (False, True):
                if phase != "write":
                    self._blocks.spoil()
                started, cpu = time.perf_counter(), self._cpu_s(ours=ours)
                await self._move(phase, round_, ours=ours)
                spent, cpu = time.perf_counter() - started, self._cpu_s(ours=ours) - cpu
                if times is not None:
                    (times.ours if ours else times.raw).setdefault(phase, []).append(spent)
                    (times.cpu_ours if ours else times.cpu_raw).setdefault(phase, []).append(cpu)
                if phase == "write":
                    # the other arm's turn must not pay for this arm's pending writes
                    settle(self._folders[0 if ours else 1])
                else:
                    self._blocks.check()
            if phase == "read_warm":
                for folder in self._folders:
                    drop(folder)

    def _cpu_s(self, *, ours: bool) -> float:
        """CPU time of an arm so far: its process and this one."""
        store = self._tier.stack.process_store
        assert store is not None
        return cpu_s(store.pid if ours else self._raw.pid) + cpu_s(os.getpid())

    async def _move(self, phase: str, round_: int, *, ours: bool) -> None:
        if phase == "write":
            await self._tier.write(round_, self._all) if ours else self._raw.write()
        else:
            await self._tier.read(round_, self._all) if ours else self._raw.read()


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process that live, in seconds."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        # a thread may end meanwhile
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def file_config(folder: Path, blocks: Blocks) -> tuple[FileConfig, Shape, int]:
    """A store with room for little more than all blocks: writes displace the blocks used longest ago."""
    defaults = FileConfig(path=str(folder))
    stride = sum(part.nbytes for part in blocks.object_parts(0, blocks.host.zeros(HOST_REGION)))
    shape = Shape(stride, slots_within(stride, defaults.segment_nbytes), 0)
    segments = -(-(blocks.count + 1) // shape.slots)
    return FileConfig(path=str(folder), max_nbytes=segments * shape.nbytes), shape, segments


async def measure_file(folder: Path, blocks: Blocks, pairs: int) -> Times:
    ours, theirs = folder / "ours", folder / "raw"
    theirs.mkdir()
    config, shape, segments = file_config(ours, blocks)
    times = Times()
    with RawFiles(theirs, blocks, shape, segments, config.threads) as raw:
        async with Tier("file", {"path": config.path, "max_nbytes": config.max_nbytes}, blocks) as tier:
            arms = FileArms(tier, raw, blocks, ours, theirs)
            for round_ in range(FILE_WARM_ROUNDS + pairs):
                await arms.pair(round_, times if round_ >= FILE_WARM_ROUNDS else None)
    return times


async def measure_loop(folder: Path, blocks: Blocks, rounds: int) -> tuple[list[tuple[float, str]], list[float]]:
    """The longest callback of each round and its name; how late each tick was; in milliseconds."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    config, _, _ = file_config(folder / "loop", blocks)
    half = blocks.count // 2
    first, second = range(half), range(half, blocks.count)
    longest: list[tuple[float, str]] = []
    async with Tier("file", {"path": config.path, "max_nbytes": config.max_nbytes}, blocks) as tier:
        await tier.write(0, range(blocks.count))
        # garbage of the start is collected now; collections that moving blocks causes stay in the figure
        gc.collect()
        async with Ticker() as ticker:
            for round_ in range(1, rounds + 1):
                # a callback that began before the reset is counted whole when it ends
                await asyncio.sleep(0)
                loop.reset()
                # in the room of the last round's blocks: `second` is read before it is displaced
                await asyncio.gather(tier.read(round_ - 1, second), tier.write(round_, first))
                await tier.write(round_, second)
                await tier.read(round_, range(blocks.count))
                longest.append((loop.longest_s * 1e3, loop.longest))
    return longest, [late * 1e3 for late in ticker.late_s]


async def measure_mooncake(blocks: Blocks, pairs: int) -> Times:
    from fdasync_mooncake.direct import DirectProcess
    from fdasync_mooncake.testing import MasterProcess, MemoryProcess

    times = Times()
    numbers = range(blocks.count)
    zeros = blocks.host.zeros(HOST_REGION)
    parts = [[(part.offset, part.nbytes) for part in blocks.object_parts(n, zeros)] for n in numbers]
    with MasterProcess() as master, MemoryProcess(master, 4 * blocks.host.region.nbytes + (64 << 20)):
        direct = DirectProcess(master.address, blocks.host.region, parts, checksum=True)
        with direct:
            async with Tier("mooncake", {"master": master.address}, blocks) as tier:
                for round_ in range(MOONCAKE_WARM_ROUNDS + pairs):

                    async def ours(verb: Callable[..., Awaitable[None]], number: int = round_) -> float:
                        started = time.perf_counter()
                        await verb(number, numbers)
                        return time.perf_counter() - started

                    for phase in ("put", "get"):
                        for is_ours in (True, False) if round_ % 2 else (False, True):
                            if phase == "get":
                                blocks.spoil()
                            if is_ours:
                                spent = await ours(tier.write if phase == "put" else tier.read)
                            else:
                                spent = (direct.put if phase == "put" else direct.get)(str(round_))
                            if phase == "get":
                                blocks.check()
                            if round_ >= MOONCAKE_WARM_ROUNDS:
                                (times.ours if is_ours else times.raw).setdefault(phase, []).append(spent)
                    await tier.forget(round_, numbers)
                    direct.delete(str(round_))
    return times


def run_file(report: Report, folder: Path, count: int, nbytes: int, pairs: int) -> None:
    blocks = Blocks(count, nbytes)
    try:
        times = uvloop.run(measure_file(folder, blocks, pairs))
        times.report(report, "file", blocks.moved_nbytes)
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            longest, late = runner.run(measure_loop(folder, blocks, pairs))
    finally:
        blocks.close()
    worst, what = max(longest)
    report.add("file_loop_block_ms_max", [worst], aim=LOOP_BLOCK_AIM_MS)
    report.conditions["file_loop_block_ms_by_round"] = [round(value, 3) for value, _ in longest]
    report.conditions["file_loop_block_longest"] = what
    report.conditions["file_loop"] = "uvloop, CPU time of each callback in its thread"
    report.add("file_loop_late_ms_p99", [statistics.quantiles(late, n=100)[98]])


def why_no_mooncake() -> str:
    """Why no real pool can run here, or ""."""
    if importlib.util.find_spec("fdasync_mooncake") is None:
        return "fdasync-mooncake is not installed"
    from fdasync_mooncake.testing import why_not

    return why_not()


def run_mooncake(report: Report, pairs: int) -> None:
    why = why_no_mooncake()
    if why:
        report.conditions["mooncake_left_out"] = why
        return
    from fdasync_mooncake.testing import in_loopback_namespace

    blocks = Blocks(MOONCAKE_BLOCKS, MOONCAKE_NBYTES, rows=False)
    try:
        with in_loopback_namespace():
            times = uvloop.run(measure_mooncake(blocks, pairs))
    finally:
        blocks.close()
    times.report(report, "mooncake", blocks.moved_nbytes)
    report.conditions["mooncake"] = f"{MOONCAKE_BLOCKS} blocks of {MOONCAKE_NBYTES} bytes, tcp on loopback"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256, help="blocks that move (default 256)")
    parser.add_argument("--block-nbytes", type=int, default=3 << 19, help="KV of a block (default 1.5 MiB)")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of each figure (default 15)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary one)")
    parser.add_argument("--only", choices=["file", "mooncake"], help="these figures only")
    parser.add_argument("--json", metavar="FILE", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    report = Report("Stores against the raw path")
    report.conditions["calibration_us"] = round(calibrate_us(), 1)
    report.conditions["pairs"] = options.pairs
    load = os.getloadavg()[0]
    if options.only != "mooncake":
        report.conditions["file"] = (
            f"{options.blocks} blocks of {options.block_nbytes} bytes and rows of 48 layers x top-8 x 16 tokens, "
            f"{FileConfig(path='').threads} threads in both arms, sync none"
        )
        with tempfile.TemporaryDirectory(prefix="fdasync-stores-", dir=options.folder) as name:
            run_file(report, Path(name), options.blocks, options.block_nbytes, options.pairs)
    if options.only != "file":
        run_mooncake(report, options.pairs)
    # load of this machine by other processes, before and after
    report.conditions["load_1m"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    report.finish(options.json_path)
