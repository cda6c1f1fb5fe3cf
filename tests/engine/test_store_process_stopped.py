"""Engines whose store lives in a process of its own, which is stopped or killed: for real, in real time."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import pytest

from fdasync import Engine, SamplingParams
from fdasync.events.catalog import BreakerChanged
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config, until
from fdasync.testing.harness.processes import stop_process
from tests.support import skips

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


def prompt(number):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, 40)]]


def file_config(tmp_path, **values):
    runner = {"num_blocks": 24, "max_context_tokens": 48, "step_s": 0.01, "token_s": 0.005}
    return synthetic_config(
        runner, max_step_tokens=64, host_blocks=64, store="file", store_config={"path": str(tmp_path / "kv")}, **values
    )


async def ask(engine, number):
    result = await engine.complete(prompt(number), PARAMS)
    check_sample(result.samples[0], prompt(number), PARAMS, oracle_of(engine.config))
    return result


async def closes_again(changes):
    while (await anext(changes)).state != "closed":
        pass


@pytest.mark.ci
async def test_a_restarted_engine_reads_what_the_last_one_wrote(tmp_path):
    async with Engine(file_config(tmp_path)) as engine:
        for number in range(3):
            await ask(engine, number)
    async with Engine(file_config(tmp_path)) as engine:
        # the first ones teach it what things cost here
        results = [await ask(engine, number % 3) for number in range(6)]
        assert sum(result.cached.store for result in results) >= 36
    check_idle(engine)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("busy", [True, False], ids=["writing", "idle"])
async def test_a_store_that_is_stopped_costs_a_deadline_at_the_close_and_nothing_else(tmp_path, busy):
    engine = Engine(file_config(tmp_path, close_deadline_s=0.5, store_deadline_s=3600.0))
    await engine.start()
    await ask(engine, 0)
    if not busy:
        await until(lambda: not engine.stats().scheduler.writing)
    pid = engine.store_pid
    stop_process(pid)
    if busy:
        await ask(engine, 1)
    begun = asyncio.get_running_loop().time()
    await engine.aclose()
    # far below what its verbs may take
    assert asyncio.get_running_loop().time() - begun < 300
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.ci
async def test_a_store_that_is_killed_is_started_again_and_no_request_notices(tmp_path):
    config = file_config(tmp_path, store_retry_s=0.05)
    async with Engine(config) as engine:
        await ask(engine, 0)
        first = engine.store_pid
        os.kill(first, signal.SIGKILL)
        for number in range(3):
            await ask(engine, number)
        written = engine.stats().scheduler.written_blocks
        async with asyncio.timeout(300):
            for number in itertools.count(3):
                await ask(engine, number % 90)
                if engine.stats().scheduler.written_blocks > written and engine.store_pid not in (first, -1):
                    break
        assert engine.store_pid not in (first, -1)
        assert engine.stats().scheduler.written_blocks > written
    check_idle(engine)


@pytest.mark.ci
@pytest.mark.skips
async def test_a_store_that_hangs_is_left_alone_and_used_again_when_it_is_back(tmp_path):
    config = file_config(
        tmp_path, store_deadline_s=skips.LIMIT_S, store_kill_s=1e6, request_deadline_s=1e6, close_deadline_s=1e6
    )
    async with Engine(config) as engine, engine.bus.subscribe(BreakerChanged) as changes:
        await ask(engine, 0)
        await until(lambda: not engine.stats().scheduler.writing)
        pid = engine.store_pid
        stop_process(pid)
        try:
            for number in range(1, 4):
                asking = asyncio.ensure_future(ask(engine, number))
                await skips.go_on(asking.done, lambda: skips.is_left_or_stuck(engine, pid))
                await asking
            await skips.go_on(lambda: changes.pending, lambda: skips.is_left_or_stuck(engine, pid))
            assert (await anext(changes)).state == "open"
        finally:
            os.kill(pid, signal.SIGCONT)
        state = asyncio.ensure_future(closes_again(changes))
        # it answers what it was asked, and is asked once more
        breaker = engine._runtime.store.breaker
        await skips.go_on(state.done, lambda: breaker.state == "open")
        written = engine.stats().scheduler.written_blocks
        await ask(engine, 5)
        await until(lambda: engine.stats().scheduler.written_blocks > written)
    check_idle(engine)
