"""A store that has no room: what it refused and why stands in its answer, in the engine's stats and in one log line."""

from __future__ import annotations

import json
import subprocess

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.base import DONE, EXISTS, Outcome
from fdasync.engine.refusals import TELL_EVERY_S, Refusals
from fdasync.events.catalog import WritesRefused
from fdasync.telemetry.json_log import JsonLogTap
from fdasync.testing import check_idle, no_leaks, run_sim, synthetic_config, until

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
FULL = Outcome("full", "5 bytes never fit in 3")
FAILED = Outcome("failed", "broken", transient=True)


def prompt(number):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, 40)]]


def test_every_refused_block_counts_and_each_reason_is_told_once_in_a_while():
    refusals = Refusals()
    assert refusals.add("s", [DONE, EXISTS], 0.0) == []
    assert (refusals.blocks, refusals.problem) == (0, "")
    assert refusals.add("s", [DONE, FULL, FULL], 1.0) == [WritesRefused(store="s", items=2, problem=FULL.problem)]
    assert refusals.add("s", [FULL], 2.0) == []
    # another reason is no repetition
    assert refusals.add("s", [FULL, FAILED], 3.0) == [WritesRefused(store="s", items=1, problem="broken")]
    assert (refusals.blocks, refusals.problem) == (5, "broken")
    (told,) = refusals.add("s", [FULL], 1.0 + TELL_EVERY_S)
    assert (told.items, told.problem) == (3, FULL.problem)


def test_a_store_whose_cap_is_too_small_says_so_in_stats_and_in_one_log_line():
    async def work():
        lines = []
        config = synthetic_config(
            {"max_context_tokens": 48}, host_blocks=64, store="memory", store_config={"max_nbytes": 9}
        )
        async with Engine(config) as engine:
            async with JsonLogTap(engine, lines.append, kinds=[WritesRefused]):
                for number in range(3):
                    await engine.complete(prompt(number), PARAMS)
                    await until(lambda: not engine.stats().scheduler.writing, every_s=0.001)
            stats = engine.stats()
            assert stats.scheduler.written_blocks == 0
            assert stats.refused_writes > 0
            assert "never fit in 9" in stats.refused_why
        check_idle(engine)
        (line,) = [json.loads(line) for line in b"".join(lines).splitlines()]
        assert (line["event"], line["level"], line["store"]) == ("WritesRefused", "warning", "memory")
        assert "never fit in 9" in line["problem"]

    with no_leaks():
        run_sim(work())


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_that_is_too_small_is_told_with_what_is_needed_and_what_is_free(small_disk):
    lines = []
    config = synthetic_config(
        {"max_context_tokens": 48}, host_blocks=64, store="file", store_config={"path": str(small_disk / "kv")}
    )
    async with Engine(config) as engine, JsonLogTap(engine, lines.append, kinds=[WritesRefused]):
        for number in range(3):
            await engine.complete(prompt(number), PARAMS)
            await until(lambda: not engine.stats().scheduler.writing, every_s=0.001)
        stats = engine.stats()
        assert stats.scheduler.written_blocks == 0
        assert stats.scheduler.dropped_writes >= stats.refused_writes > 0
    check_idle(engine)
    (line,) = [json.loads(line) for line in b"".join(lines).splitlines()]
    for told in (stats.refused_why, line["problem"]):
        assert "No space left on device: a new file takes" in told
        # a segment is 64 MiB; a page or two of the filesystem are its own
        needed, free = [int(word) for word in told.split() if word.isdecimal()][:2]
        assert needed > 60 << 20
        assert 900_000 < free <= 1 << 20
        assert str(small_disk / "kv") in told
