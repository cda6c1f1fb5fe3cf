"""What the file store costs beyond the raw path: against the same bytes moved without us.

256 blocks of 1.5 MiB of KV with their rows are moved by the engine's own objects (`tier.py`: store I/O, the guard, a
process of its own, object format), against plain `pwritev` and `preadv` from as many threads in a process of its own
(`raw_file.py`). Both arms: the same shared memory, touched before; slots of the same segments, reused; no syncs; one
XXH3 pass; timed by the caller. Writes displace the blocks used longest ago; warm reads come from the page cache; before
cold reads both arms' files are synced and dropped from it.

Of both arms the CPU time of all their threads is taken as well, the caller's included: `cpu_ratio`. It is what the wall
clock's ratio comes to where all cores are busy, and other work on the machine moves it less.

**Loop.** The longest callback on the engine's loop (uvloop) while 256 blocks move: written, read, and half of them
written while the other half is read; in CPU time of its thread. Beside it, how late a 1 ms timer came.

Arms take turns; the figure of a ratio is the ratio of the medians of MB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import uvloop

from benchmarks.lib.arguments import at_least_one, folder, need_memory, parser_of
from benchmarks.lib.rates import add_ratio
from benchmarks.lib.report import Report
from benchmarks.lib.timed_loop import Ticker, TimedLoop
from benchmarks.stores.page_cache import drop, settle
from benchmarks.stores.raw_file import RawFiles
from benchmarks.stores.tier import Blocks, Tier
from fdasync.cache.store.file.layout import Shape, slots_within
from fdasync.cache.store.file.store import FileConfig
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import HOST_REGION

RATIO_AIM = 0.9
LOOP_BLOCK_AIM_MS = 2.0
# every slot has been written and all memory is mapped in both processes
WARM_ROUNDS = 3
PHASES = ("write", "read_warm", "read_cold")


class Pairs:
    """The file store and the raw arm, side by side.

    Attributes:
        wall, cpu: seconds by phase and arm ("ours", "raw"), pair by pair; of the clock, and of the CPU.
    """

    def __init__(self, tier: Tier, raw: RawFiles, blocks: Blocks, folder: Path) -> None:
        self.wall: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.cpu: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._tier = tier
        self._raw = raw
        self._blocks = blocks
        self._folder = folder

    async def play(self, pairs: int) -> None:
        for round_ in range(WARM_ROUNDS + pairs):
            if round_ == WARM_ROUNDS:
                self.wall.clear()
                self.cpu.clear()
            # the arm that begins changes from round to round
            arms = ("ours", "raw") if round_ % 2 else ("raw", "ours")
            for arm in arms:
                settle(self._folder / arm)
            for phase in PHASES:
                if phase == "read_cold":
                    for arm in arms:
                        drop(self._folder / arm)
                for arm in arms:
                    await self._phase(phase, arm, round_)

    async def _phase(self, phase: str, arm: str, round_: int) -> None:
        if phase != "write":
            self._blocks.spoil()
        started, cpu = time.perf_counter(), self._cpu_s(arm)
        if arm == "ours":
            move = self._tier.write if phase == "write" else self._tier.read
            await move(round_, range(self._blocks.count))
        elif phase == "write":
            self._raw.write()
        else:
            self._raw.read()
        self.wall[phase, arm].append(time.perf_counter() - started)
        self.cpu[phase, arm].append(self._cpu_s(arm) - cpu)
        if phase == "write":
            # the other arm's turn must not pay for this arm's pending writes
            settle(self._folder / arm)
        else:
            self._blocks.check()

    def _cpu_s(self, arm: str) -> float:
        """CPU time of an arm so far: its process and this one."""
        store = self._tier.store.inner
        assert isinstance(store, ProcessStore)
        return cpu_s(store.pid if arm == "ours" else self._raw.pid) + cpu_s(os.getpid())

    def report(self, report: Report) -> None:
        for phase in PHASES:
            ours, raw = (phase, "ours"), (phase, "raw")
            moved = self._blocks.moved_nbytes
            add_ratio(report, f"file_{phase}_ratio", moved, self.wall[ours], self.wall[raw], RATIO_AIM)
            raw_s = statistics.median(self.cpu[raw])
            report.add(f"file_{phase}_cpu_ratio", [raw_s / seconds for seconds in self.cpu[ours]])


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


async def measure_pairs(report: Report, folder: Path, blocks: Blocks, pairs: int) -> None:
    (folder / "raw").mkdir()
    config, shape, segments = file_config(folder / "ours", blocks)
    with RawFiles(folder / "raw", blocks, shape, segments, config.threads) as raw:
        async with Tier(config, blocks) as tier:
            arms = Pairs(tier, raw, blocks, folder)
            await arms.play(pairs)
    arms.report(report)


async def measure_loop(report: Report, folder: Path, blocks: Blocks, rounds: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    config, _, _ = file_config(folder / "loop", blocks)
    half = blocks.count // 2
    first, second = range(half), range(half, blocks.count)
    longest: list[tuple[float, str]] = []
    async with Tier(config, blocks) as tier:
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
    worst, what = max(longest)
    report.add("file_loop_block_ms_max", [worst], aim=LOOP_BLOCK_AIM_MS)
    report.conditions["file_loop_block_ms_by_round"] = [round(value, 3) for value, _ in longest]
    report.conditions["file_loop_block_longest"] = what
    report.add("file_loop_late_ms_p99", [statistics.quantiles(ticker.late_s, n=100)[98] * 1e3])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=at_least_one, default=256, help="blocks that move")
    parser.add_argument("--block-nbytes", type=at_least_one, default=3 << 19, help="KV of a block")
    parser.add_argument("--pairs", type=at_least_one, default=15, help="interleaved pairs of each figure")
    parser.add_argument("--folder", type=folder, help="where the files go (default: a temporary one)")
    options = parser.parse_args()
    need_memory(options.blocks * options.block_nbytes, f"--blocks {options.blocks}")
    report = Report("The file store against the raw path")
    report.conditions |= {"pairs": options.pairs}
    report.conditions["file"] = (
        f"{options.blocks} blocks of {options.block_nbytes} bytes and rows of 48 layers x top-8 x 16 tokens, "
        f"{FileConfig(path='').threads} threads in both arms, sync none"
    )
    with (
        contextlib.closing(Blocks(options.blocks, options.block_nbytes)) as blocks,
        tempfile.TemporaryDirectory(prefix="fdasync-stores-", dir=options.folder) as name,
    ):
        uvloop.run(measure_pairs(report, Path(name), blocks, options.pairs))
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            runner.run(measure_loop(report, Path(name), blocks, options.pairs))
    report.finish(options.json_path)
