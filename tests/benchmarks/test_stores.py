"""The benchmark of stores runs, its figures can be believed, and its arms notice what would make them lie."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.rates import add_ratio
from benchmarks.lib.report import Report
from benchmarks.lib.timed_loop import Ticker, TimedLoop
from benchmarks.stores.page_cache import drop, settle
from benchmarks.stores.raw_file import RawFiles
from benchmarks.stores.tier import Blocks
from fdasync.cache.store.file.layout import Shape

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def run(out: Path, *arguments: str) -> dict[str, dict]:
    command = [sys.executable, "-m", "benchmarks", "stores", *arguments, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose files can be taken out of memory."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    cached = in_memory(fd)
    os.close(fd)
    path.unlink()
    if cached:
        pytest.skip(f"files in {tmp_path} stay in memory")
    return tmp_path


def in_memory(fd: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(4096)], 512 << 10, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def test_file_figures(disk: Path) -> None:
    sizes = ("--blocks", "8", "--block-nbytes", "65536", "--pairs", "2")
    report = run(disk / "out.json", "--folder", str(disk), *sizes)
    ratios = {"file_write_ratio", "file_read_warm_ratio", "file_read_cold_ratio"}
    of_cpu = {name.replace("ratio", "cpu_ratio") for name in ratios}
    assert all(0.005 < report["figures"][name] < 20 for name in of_cpu)
    assert set(report["figures"]) == ratios | of_cpu | {"file_loop_block_ms_max", "file_loop_late_ms_p99"}
    # so few small blocks say nothing of the cost; that nothing was moved would show
    for name in ratios:
        assert 0.005 < report["figures"][name] < 20
        ours, raw = (report["conditions"][f"{name}_mb_s"][arm] for arm in ("ours", "raw"))
        assert 1 < min(ours + raw) < max(ours + raw) < 100_000
        assert report["figures"][name] == pytest.approx(ours[0] / raw[0], rel=0.05, abs=0.01)
    assert 0 < report["figures"]["file_loop_block_ms_max"] < 1000
    assert len(report["conditions"]["file_loop_block_ms_by_round"]) == 2
    assert not list(disk.glob("fdasync-*")), "the files are still there"


def test_the_figure_is_the_ratio_of_the_medians() -> None:
    report = Report("some")
    add_ratio(report, "put_ratio", 12_000_000, [4.0, 1.0, 10.0], [2.0, 3.0, 1.0])
    # 3 MB/s over 6 MB/s, whichever pairs they are of
    assert report.figures == {"put_ratio": 0.5}
    assert report.conditions["put_ratio_mb_s"] == {"ours": [3, 1.2, 12], "raw": [6, 4, 12]}


# -- the raw arm --------------------------------------------------------------------------------


@pytest.fixture
def blocks():
    blocks = Blocks(6, 40_000)
    yield blocks
    blocks.close()


def raw_arm(folder: Path, blocks: Blocks) -> RawFiles:
    stride = sum(part.nbytes for part in blocks.object_parts(0, blocks.host.zeros(0)))
    return RawFiles(folder, blocks, Shape(stride, 4, 0), 2, 2)


def test_the_raw_arm_moves_the_bytes(tmp_path: Path, blocks: Blocks) -> None:
    before = bytes(blocks.host.kv)
    with raw_arm(tmp_path, blocks) as raw:
        for _ in range(4):  # there are 8 slots: round and round
            raw.write()
            blocks.host.kv[:] = 0
            with pytest.raises(RuntimeError, match="did not bring back"):
                blocks.check()
            raw.read()
            blocks.check()
            assert bytes(blocks.host.kv) == before
    # a block is not whole pages: what lies between is padding
    assert sorted(path.stat().st_size for path in tmp_path.glob("*.seg")) == [Shape(53248, 4, 0).nbytes] * 2


def test_the_raw_arm_writes_to_the_slots_used_longest_ago(tmp_path: Path, blocks: Blocks) -> None:
    with raw_arm(tmp_path, blocks) as raw:
        raw.write()
        assert sum(slots_in_use(tmp_path)) == 6
        raw.write()
        assert all(slots_in_use(tmp_path))


def slots_in_use(folder: Path) -> list[bool]:
    shape = Shape(53248, 4, 0)
    contents = [path.read_bytes() for path in sorted(folder.glob("*.seg"))]
    return [
        any(content[shape.value_at(slot) : shape.value_at(slot) + shape.stride])
        for content in contents
        for slot in range(shape.slots)
    ]


def test_the_raw_arm_checks_what_it_reads(tmp_path: Path, blocks: Blocks, capfd: pytest.CaptureFixture[str]) -> None:
    with raw_arm(tmp_path, blocks) as raw:
        raw.write()
        for path in tmp_path.glob("*.seg"):
            content = bytearray(path.read_bytes())
            content[20_000::10_000] = bytes(len(content[20_000::10_000]))
            path.write_bytes(content)
        with pytest.raises(RuntimeError, match="raw_file ended with status 1"):
            raw.read()
    assert "a checksum is wrong" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["kv", "routing"])
def test_a_read_that_brings_nothing_is_seen(blocks: Blocks, name: str) -> None:
    blocks.check()
    blocks.spoil()
    with pytest.raises(RuntimeError, match="did not bring back"):
        blocks.check()
    blocks.spoil()  # twice is never
    blocks.check()
    array = blocks.host.kv if name == "kv" else blocks.arena.rows[name]
    array[-1] ^= 1
    with pytest.raises(RuntimeError, match="did not bring back"):
        blocks.check()
    array[-1] ^= 1


# -- the page cache -----------------------------------------------------------------------------


def test_dropped_files_are_on_the_disk_only(disk: Path) -> None:
    path = disk / "one.seg"
    path.write_bytes(os.urandom(1 << 20))
    settle(disk)
    fd = os.open(path, os.O_RDONLY)
    assert in_memory(fd)
    os.close(fd)
    drop(disk)
    fd = os.open(path, os.O_RDONLY)
    assert not in_memory(fd)
    os.close(fd)


def test_where_files_stay_in_memory_nothing_is_measured() -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no tmpfs here")
    folder = memory / f"fdasync-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "one.seg").write_bytes(bytes(1 << 20))
        with pytest.raises(SystemExit, match="no read is cold there"):
            drop(folder)
    finally:
        (folder / "one.seg").unlink()
        folder.rmdir()


# -- the stopwatch ------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    """CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("way", ["task", "call_soon", "call_later", "call_at", "future", "reader", "writer"])
def test_every_kind_of_callback_is_timed(way: str) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        done: asyncio.Future[None] = loop.create_future()
        one, other = socket.socketpair()

        def busy(*_: object) -> None:
            loop.remove_reader(one)
            loop.remove_writer(one)
            burn(0.02)
            done.set_result(None)

        async def step() -> None:
            await asyncio.sleep(0)
            busy()

        await asyncio.sleep(0)
        loop.reset()
        trigger: asyncio.Future[None] = loop.create_future()
        task = None
        if way == "task":
            task = asyncio.create_task(step())
        elif way == "call_soon":
            loop.call_soon(busy)
        elif way == "call_later":
            loop.call_later(0.001, busy)
        elif way == "call_at":
            loop.call_at(loop.time() + 0.001, busy)
        elif way == "future":
            trigger.add_done_callback(busy)
            trigger.set_result(None)
        elif way == "reader":
            other.setblocking(False)
            other.send(b"x")
            loop.add_reader(one, busy)
        else:
            loop.add_writer(one, busy)
        await done
        if task is not None:
            await task
        one.close()
        other.close()
        assert loop.longest_s >= 0.02
        assert loop.callbacks > 0
        assert ("step" if way == "task" else "busy") in loop.longest
        loop.reset()
        assert (loop.longest_s, loop.longest, loop.callbacks) == (0.0, "", 0)

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(work())


def test_what_a_loop_waits_for_is_not_its_work() -> None:
    async def work() -> TimedLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        loop.reset()
        async with Ticker() as ticker:
            await asyncio.sleep(0.5)
        assert ticker.late_s
        return loop

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        assert runner.run(work()).longest_s < 0.25


async def test_a_late_tick_is_seen() -> None:
    async with Ticker() as ticker:
        await asyncio.sleep(0.005)
        burn(0.03)
        await asyncio.sleep(0.005)
    assert max(ticker.late_s) > 0.025
