"""The JSON log: what is written, what never is, and that nobody who reads it can hold up an engine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import socket
from datetime import datetime, timedelta

import pytest

from fdasync import SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.engine.engine import Engine
from fdasync.errors import ConfigError, EngineClosed, EngineFailed
from fdasync.events import catalog
from fdasync.events.catalog import BlockDamaged, BreakerChanged, Event, FetchEnded, LookedUp, RequestEnded, StoreCalled
from fdasync.telemetry.json_log import LEVELS, JsonLogTap, level_of, summary
from fdasync.testing import held_engine, run_sim, synthetic_config, synthetic_engine, until
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.telemetry.lines import read_all

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


# what a test counts in real time: a busy machine holds up loops, and a log tells of it
COUNTED = (RequestEnded, BlockDamaged, catalog.EngineDied)


def parse(data: bytes) -> list[dict]:
    """Each line is one object, whole."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def damage(key: str = "k") -> BlockDamaged:
    return BlockDamaged(store="s", key=key, problem="checksum: x")


def tiers_config(**values):
    runner = {"num_blocks": 16, "step_s": 0.1, "max_context_tokens": 64}
    defaults = {"host_blocks": 16, "store": "memory", "max_running": 2, "store_deadline_s": 5.0, "store_kill_s": 8.0}
    return synthetic_config(runner, **{**defaults, **values})


# -- what is written ----------------------------------------------------------------------------------


async def _bad_day(noted: bytearray, all_: bytearray, results: list) -> None:
    memory = MemoryStore(MemoryConfig())
    faults = FaultyStore(memory, StoreFaults())
    engine = Engine(tiers_config(), store=faults)
    every = [kind for kind in vars(catalog).values() if isinstance(kind, type) and issubclass(kind, Event)]
    async with (
        engine,
        JsonLogTap(engine, noted.extend, name="noted", wall=lambda: 1e9 + asyncio.get_running_loop().time()),
        JsonLogTap(engine, all_.extend, kinds=every),
    ):

        async def ask(number: int) -> None:
            results.append(await engine.complete([number] * 40, GREEDY, cache_salt="secret salt"))

        for number in (81, 82, 83, 84, 85, 86, 81):
            await ask(number)
        memory._objects = {key: bytes(len(value)) for key, value in memory._objects.items()}
        await ask(82)
        faults.plan = StoreFaults(hang=1.0)
        for number in (83, 84, 85):
            await ask(number)
        await asyncio.sleep(6)
        await ask(86)
        faults.plan = StoreFaults()
        await asyncio.sleep(20)
        await engine.update_weights(5, [("weights", "uint64", (1,), bytes(8))])


def test_a_bad_day():
    noted, all_, results = bytearray(), bytearray(), []
    run_sim(_bad_day(noted, all_, results))
    lines = parse(noted)
    found = {line["event"] for line in lines}
    assert found >= {"RequestEnded", "BlockDamaged", "BreakerChanged", "LookedUp", "StoreEnded", "LateTransferEnded"}
    assert found >= {"WeightsChanged", "PauseRequested", "ResumeRequested"}
    assert not found & {"StepDone", "RequestPrepared", "StoreCalled", "SwapDone", "LinesDropped"}

    ends = [line for line in lines if line["event"] == "RequestEnded"]
    assert len(ends) == len(results)
    for line, result in zip(ends, results, strict=True):
        assert line["request_id"] == result.request_id
        assert line["reasons"] == {"length": 1}
        assert (line["prompt_tokens"], line["output_tokens"]) == (40, 4)
        assert line["total_s"] == pytest.approx(result.total_s, abs=1e-6)
        cached = result.cached
        assert line["cached"] == {"device": cached.device, "host": cached.host, "store": cached.store}
        assert line["level"] == "info"
    assert ends[6]["cached"]["store"] > 0

    # only the noteworthy of their kind
    assert all(line["late"] for line in lines if line["event"] in ("FetchEnded", "StoreEnded"))
    assert all(not line["answered"] for line in lines if line["event"] == "LookedUp")
    states = [line["state"] for line in lines if line["event"] == "BreakerChanged"]
    assert states[0] == "open"
    assert states[-1] == "closed"
    # while the store is left alone, calls without an answer are not logged
    opened = next(at for at, line in enumerate(lines) if line["event"] == "BreakerChanged")
    cut = [at for at, line in enumerate(lines) if line["event"] == "LookedUp"]
    assert cut
    assert max(cut) < opened
    assert len([line for line in parse(all_) if line["event"] == "LookedUp" and not line["answered"]]) > len(cut)

    moments = [datetime.fromisoformat(line["time"]) for line in lines]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"]) for line in lines)
    first = datetime.fromisoformat("2001-09-09T01:46:40Z")
    for moment, line in zip(moments, lines, strict=True):
        assert abs(moment - first - timedelta(seconds=line["at"])) < timedelta(milliseconds=1)
        assert list(line)[:5] == ["time", "at", "level", "engine", "event"]
        assert line["engine"] == "noted"
    assert [line["seq"] for line in lines] == sorted(line["seq"] for line in lines)

    damaged = [line for line in lines if line["event"] == "BlockDamaged"]
    assert {line["level"] for line in damaged} == {"warning"}
    assert all(re.fullmatch(r"[0-9a-f]{16}/[0-9a-f]{16}", line["key"]) for line in damaged)
    assert all(line["problem"].startswith("magic: ") for line in damaged)
    assert len(damaged) == len([line for line in parse(all_) if line["event"] == "BlockDamaged"])


def test_what_never_is_written():
    noted, all_ = bytearray(), bytearray()
    run_sim(_bad_day(noted, all_, []))
    lines = parse(all_)
    assert {line["event"] for line in lines} >= {"RequestPrepared", "StepDone", "SwapDone", "FetchEnded", "StoreCalled"}
    text = all_.decode()
    assert "secret" not in text
    assert "sampler" not in text
    # no list anywhere, so no tokens; nothing longer than a name
    for line in lines:
        for name, value in line.items():
            assert not isinstance(value, list) or len(value) <= 16, (name, value)
            assert "token" not in name or isinstance(value, int)
    prepared = next(line for line in lines if line["event"] == "RequestPrepared")
    assert (prepared["num_tokens"], prepared["num_block_keys"], prepared["salted"]) == (40, 10, True)
    assert re.fullmatch(r"[0-9a-f]{16}", prepared["namespace"])
    assert not re.search(r"[0-9a-f]{17}", re.sub(r'"request_id":"\w+"', "", text))
    step = next(line for line in lines if line["event"] == "StepDone")
    assert isinstance(step["num_tokens"], int)
    fetched = next(line for line in lines if line["event"] == "FetchEnded")
    assert fetched["blocks"] >= fetched["arrived"] > 0


def test_levels():
    ended = {"request_id": "r", "group": 0, "prompt_tokens": 1, "output_tokens": 1, "cached": (0, 0, 0)}
    ended |= {"ttft_s": None, "total_s": 1.0}
    called = {"store": "s", "verb": "put", "items": 1, "nbytes": 0, "seconds": 0.0}
    fetched = {"fetch_id": 0, "arrived": (True,), "seconds": 0.0, "nbytes": 0}
    cases = {
        "debug": [
            LookedUp(lookup_id=0, count=0, seconds=0.0, answered=True),
            FetchEnded(late=False, **fetched),
            StoreCalled(done=1, **called),
            catalog.StepDone(step_id=0, tokens=()),
        ],
        "info": [
            RequestEnded(reasons=("abort",), **ended),
            BreakerChanged(store="s", state="closed", problem=""),
            catalog.WeightsChanged(version="1", namespace=b"", weights_id="a" * 32),
            catalog.WeightsRelabelled(version="best"),
            catalog.LateTransferEnded(transfer_id=1, arrived=()),
        ],
        "warning": [
            LookedUp(lookup_id=0, count=0, seconds=0.0, answered=False),
            FetchEnded(late=True, **fetched),
            RequestEnded(reasons=("failed",), **ended),
            RequestEnded(reasons=("abort",), error="DecodeFailed", **ended),
            BreakerChanged(store="s", state="open", problem=""),
            StoreCalled(error="StoreTimeout", **called),
            StoreCalled(failed=1, **called),
            StoreCalled(damaged=1, **called),
            damage(),
            catalog.LoopHeldUp(seconds=1.0),
        ],
        "error": [catalog.StepFailed(step_id=0, problem=""), catalog.EngineDied(problem="")],
    }
    assert tuple(cases) == LEVELS
    assert {level: [level_of(event) for event in events] for level, events in cases.items()} == {
        level: [level] * len(events) for level, events in cases.items()
    }


def test_words_that_are_no_text():
    found = summary(damage("\ud800" * 3 + "/" + "ab" * 16 + ".0"))
    assert found["key"] == "???/abababababababab"
    long = summary(BreakerChanged(store="s", state="open", problem="x\n" * 5000))
    assert len(long["problem"]) == 500
    assert (
        summary(catalog.WeightsChanged(version="1", namespace=b"\xff" * 16, weights_id="a" * 32))["namespace"]
        == "f" * 16
    )
    assert summary(catalog.LoopHeldUp(seconds=float("inf")))["seconds"] is None
    assert summary(catalog.AbortRequested(keys=tuple(range(100)))) == {
        "num_keys": 100, "begun_only": False, "reason": "abort"
    }  # fmt: skip


async def test_what_is_asked_for():
    lines, names = bytearray(), bytearray()
    async with synthetic_engine() as engine:
        async with (
            JsonLogTap(engine, lines.extend, kinds=COUNTED, level="warning"),
            JsonLogTap(engine, names.extend, kinds=[catalog.RequestPrepared, RequestEnded]) as tap,
        ):
            engine.bus.publish(damage())
            await engine.complete([1, 2, 3], GREEDY, request_id="ü\n")
        assert tap.lines == 2
        assert engine.bus._taps == []
        # a trace holds it too
        assert "ü".encode() in engine.trace().encode()
    assert [line["event"] for line in parse(lines)] == ["BlockDamaged"]
    assert [(line["event"], line["level"]) for line in parse(names)] == [
        ("RequestPrepared", "debug"),
        ("RequestEnded", "info"),
    ]
    assert parse(names)[1]["request_id"] == "ü\n"
    assert {line["engine"] for line in parse(names)} == {"synthetic"}


async def _late_lines(lines: bytearray) -> None:
    async with synthetic_engine() as engine, JsonLogTap(engine, lines.extend, wall=lambda: 1e9) as tap:
        await asyncio.sleep(10.0)
        lines += tap._line(7.5, "info", "Late", {})


def test_the_time_is_the_events_and_not_the_writers():
    lines = bytearray()
    run_sim(_late_lines(lines))
    (line,) = [line for line in parse(lines) if line["event"] == "Late"]
    assert datetime.fromisoformat("2001-09-09T01:46:40Z") - datetime.fromisoformat(line["time"]) == timedelta(
        seconds=2.5
    )


async def test_an_engines_death_is_the_last_line():
    lines = bytearray()
    engine, faults = held_engine()
    async with engine:
        async with JsonLogTap(engine, lines.extend, kinds=COUNTED):
            faults.hold()
            call = asyncio.create_task(engine.complete([1, 2, 3], GREEDY, request_id="mine"))
            await until(lambda: engine.stats().steps_in_flight > 0)
            engine._fail(OSError("the end"))
            with pytest.raises(EngineFailed):
                await call
        faults.release()
    ended, died = parse(lines)
    assert (ended["event"], ended["request_id"], ended["reasons"]) == ("RequestEnded", "mine", {"failed": 1})
    assert (ended["level"], ended["error"]) == ("warning", "OSError")
    assert (died["event"], died["level"], died["problem"]) == ("EngineDied", "error", "OSError: the end")


async def test_two_engines_two_logs():
    logs = {name: bytearray() for name in ("one", "two")}
    async with (
        synthetic_engine() as one,
        synthetic_engine() as two,
        JsonLogTap(one, logs["one"].extend, name="one", kinds=COUNTED),
        JsonLogTap(two, logs["two"].extend, name="two", kinds=COUNTED),
    ):
        await asyncio.gather(one.complete([1], GREEDY), two.complete([1, 2], GREEDY), two.complete([1], GREEDY))
    for name, count in (("one", 1), ("two", 2)):
        assert [(line["engine"], line["event"]) for line in parse(logs[name])] == [(name, "RequestEnded")] * count


async def test_a_function_that_raises_is_told_at_the_end():
    def broken(line: bytes) -> None:
        raise OSError("full")

    async with synthetic_engine() as engine:
        tap = await JsonLogTap(engine, broken).__aenter__()
        await engine.complete([1], GREEDY)
        # the engine does not care
        await engine.complete([1], GREEDY)
        with pytest.raises(OSError, match="full"):
            await tap.__aexit__(None, None, None)
        assert engine.bus._taps == []


async def test_what_cannot_be(tmp_path):
    async with synthetic_engine() as engine:
        with pytest.raises(ConfigError, match="level"):
            JsonLogTap(engine, 2, level="loud")
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        closed, other = os.pipe()
        os.close(closed)
        os.close(other)
        for target in (tmp_path / "none" / "log", tmp_path, fifo, closed, -1, "a\0b"):
            with pytest.raises(ConfigError, match="cannot write to"):
                await JsonLogTap(engine, target).__aenter__()
        assert engine.bus._taps == []
        async with JsonLogTap(engine, bytearray().extend) as tap:
            with pytest.raises(ConfigError, match="entered before"):
                await tap.__aenter__()
    with pytest.raises(EngineClosed):
        await JsonLogTap(synthetic_engine(), tmp_path / "log").__aenter__()
    with pytest.raises(FileNotFoundError):
        os.open(tmp_path / "log", os.O_RDONLY)


# -- where it is written ------------------------------------------------------------------------------


def flags_of(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["path", "file", "pipe", "socket", "terminal"])
async def test_every_kind_of_target(kind, tmp_path):
    path = tmp_path / "log"
    close = []
    if kind in ("path", "file"):
        end = os.open(path, os.O_RDWR | os.O_CREAT)
        target = path if kind == "path" else end
        os.pwrite(end, b'{"event": "before"}\n', 0)
        close = [end]
    elif kind == "pipe":
        end, target = os.pipe()
        close = [end, target]
    elif kind == "socket":
        ours, theirs = socket.socketpair()
        end, target = ours.detach(), theirs.detach()
        close = [end, target]
    else:
        end, target = os.openpty()
        close = [end, target]
    before = None if kind == "path" else flags_of(target)
    async with synthetic_engine() as engine, JsonLogTap(engine, target, kinds=COUNTED) as tap:
        for _ in range(3):
            await engine.complete([1, 2, 3], GREEDY)
    if before is not None:
        # others use it too
        assert flags_of(target) == before
        assert os.get_blocking(target)
    if kind == "file":
        told = os.lseek(end, 0, os.SEEK_CUR)
        assert told == os.lseek(end, 0, os.SEEK_END) > 0, "what others write stands behind the lines"
        os.lseek(end, 0, os.SEEK_SET)
    text = read_all(end)
    names = [line["event"] for line in parse(text.replace(b"\r\n", b"\n"))]
    assert names == ["before"] * (kind in ("path", "file")) + ["RequestEnded"] * 3
    assert (tap.lines, tap.dropped, tap.problem) == (3, 0, "")
    for fd in close:
        os.close(fd)


@pytest.mark.ci(after=1)
@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["pipe", "socket"])
async def test_a_reader_that_is_stuck_costs_lines_and_no_time(kind):
    if kind == "pipe":
        end, target = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        end, target = ours.detach(), theirs.detach()
    async with synthetic_engine() as engine, engine.bus.subscribe(BlockDamaged, limit=1 << 20) as seen:
        tap = JsonLogTap(engine, target, kinds=COUNTED, max_nbytes=8192, close_s=0.05, limit=1 << 20)
        async with tap:
            for _ in range(200):
                for _ in range(20):
                    engine.bus.publish(damage())
                # the engine serves on
                assert len((await engine.complete([1], SamplingParams(max_tokens=1))).token_ids) == 1
            # the end of the last request is told in the turn after it
            await until(lambda: tap.lines + tap.dropped == 4200)
            stuck = tap.dropped
            assert stuck > 0
            assert tap._writer.waiting_nbytes <= 8192
            # somebody reads again, after a long time
            text = read_all(end)
            await until(lambda: tap._writer.waiting_nbytes == 0)
            before = tap.lines
            engine.bus.publish(damage("last"))
            await until(lambda: tap.lines == before + 1 and tap._writer.waiting_nbytes == 0)
            text += read_all(end)
    lines = parse(text)
    told = [line["count"] for line in lines if line["event"] == "LinesDropped"]
    # a burst may overrun the buffer before the kernel's own is full: that is told at once, and the rest at the end
    assert sum(told) == stuck
    assert lines[-2]["event"] == "LinesDropped"
    assert lines[-1]["key"] == "last"
    count = len([line for line in lines if line["event"] in ("BlockDamaged", "RequestEnded")])
    assert count + stuck == seen.pending + 200
    assert count == tap.lines == tap._writer.written
    seqs = [line["seq"] for line in lines if "seq" in line]
    assert seqs == sorted(set(seqs))
    os.close(end)
    os.close(target)


async def _served(stuck: bool, times: list[float]) -> None:
    end, target = os.pipe()
    async with synthetic_engine(synthetic_config({"step_s": 0.01})) as engine:
        async with contextlib.AsyncExitStack() as stack:
            if stuck:
                tap = JsonLogTap(engine, target, max_nbytes=4096, close_s=7.0, kinds=[Event])
                await stack.enter_async_context(tap)
                os.set_blocking(target, False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(target, bytes(4096))
            results = await asyncio.gather(*[engine.complete([number] * 9, GREEDY) for number in range(40)])
            times += [result.total_s for result in results]
            left_at = asyncio.get_running_loop().time()
        if stuck:
            assert tap.dropped > 0
            # leaving waits for the reader, as long as it was told to
            assert asyncio.get_running_loop().time() - left_at == pytest.approx(7.0, abs=0.1)
    os.close(end)
    os.close(target)


def test_a_stuck_reader_takes_no_moment_from_the_engine():
    free, stuck = [], []
    run_sim(_served(False, free))
    run_sim(_served(True, stuck))
    assert stuck == pytest.approx(free, abs=1e-6)


async def test_leaving_a_stuck_reader_counts_what_is_left():
    end, target = os.pipe()
    async with synthetic_engine() as engine:
        async with JsonLogTap(engine, target, kinds=COUNTED, close_s=0.01) as tap:
            for _ in range(3000):
                engine.bus.publish(damage())
            await until(lambda: tap.lines + tap.dropped == 3000)
        assert tap.dropped > 0
        lines = read_all(end).split(b"\n")
        # the last one may be out in part; all others are whole
        assert len(parse(b"\n".join(lines[:-1]) + b"\n")) == 3000 - tap.dropped
    os.close(end)
    os.close(target)


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["pipe", "socket"])
async def test_a_reader_that_leaves(kind):
    if kind == "pipe":
        end, target = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        end, target = ours.detach(), theirs.detach()
    async with synthetic_engine() as engine, JsonLogTap(engine, target, kinds=COUNTED) as tap:
        await engine.complete([1], GREEDY)
        await until(lambda: tap._writer.written == 1)
        os.close(end)
        for _ in range(3):
            await engine.complete([1], GREEDY)
        await until(lambda: tap.dropped >= 3)
        assert "Broken pipe" in tap.problem
    os.close(target)


async def test_a_full_disk():
    async with synthetic_engine() as engine, JsonLogTap(engine, "/dev/full", kinds=COUNTED) as tap:
        await engine.complete([1], GREEDY)
        await until(lambda: tap.dropped == 1)
        assert "No space left" in tap.problem


@pytest.mark.parametrize("kind", ["function", "path"])
async def test_what_a_slow_tap_loses_is_told(kind, tmp_path):
    lines = bytearray()
    target = lines.extend if kind == "function" else tmp_path / "log"
    async with synthetic_engine() as engine, JsonLogTap(engine, target, kinds=COUNTED, limit=10) as tap:
        for _ in range(25):
            engine.bus.publish(damage())
        await until(lambda: tap.lines == 10)
        assert tap.dropped == 15
    if kind == "path":
        fd = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
        lines += read_all(fd)
        os.close(fd)
    told = [line for line in parse(lines) if line["event"] == "LinesDropped"]
    assert [(line["count"], line["level"]) for line in told] == [(15, "warning")]
