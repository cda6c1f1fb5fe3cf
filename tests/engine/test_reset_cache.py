"""`Engine.reset_cache`, with a store behind the host, while others run, and when the engine ends."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import EngineClosed
from fdasync.scheduler.replay import replay
from fdasync.testing import check_idle, synthetic_config, until
from tests.engine.updates import PARAMS, PROMPT, ask, play

COSTS = {"step_s": 0.01, "token_s": 0.01}


def test_the_store_keeps_what_device_and_host_forget():
    async def work():
        config = synthetic_config(COSTS, store="memory", host_blocks=32, trace_turns=4096)
        async with Engine(config, store=MemoryStore(MemoryConfig())) as engine:
            await ask(engine, 1)
            assert (await ask(engine, 1)).cached.device == 16
            await until(lambda: not engine.stats().scheduler.writing, 300, 0.1)
            before = engine.stats().scheduler
            assert before.free_blocks < before.num_blocks
            await engine.reset_cache()
            stats = engine.stats().scheduler
            assert (stats.free_blocks, stats.free_host_blocks) == (stats.num_blocks, 32)
            cached = (await ask(engine, 1)).cached
            assert (cached.device, cached.host, cached.store) == (0, 0, 16)
            # nobody of another salt is served from it
            assert (await engine.complete(PROMPT, PARAMS, cache_salt="other")).cached.total == 0
            trace = engine.trace().encode()
            assert replay(trace) == len(trace.splitlines()) - 1
        check_idle(engine)

    play(work)


def test_resets_while_requests_come_and_go_change_no_token_and_no_row():
    async def work():
        async with Engine(synthetic_config(COSTS, max_running=3, host_blocks=8)) as engine:
            calls = []
            for number in range(8):
                calls.append(asyncio.create_task(ask(engine, 1, [number % 2, *PROMPT])))
                await asyncio.sleep(0.03)
                await engine.reset_cache()
                engine.check()
            results = await asyncio.gather(*calls)
            assert all(len(result.routing.array) == 36 for result in results)
            stats = engine.stats().scheduler
            assert stats.hit_tokens < 8 * 16
        check_idle(engine)

    play(work)


async def test_an_engine_that_is_not_open_has_nothing_to_forget():
    engine = Engine(synthetic_config())
    with pytest.raises(EngineClosed):
        await engine.reset_cache()
    async with engine:
        resetting = asyncio.create_task(engine.reset_cache())
        await asyncio.sleep(0)
        resetting.cancel()
        await asyncio.wait([resetting])
        await engine.reset_cache()
        assert engine._runtime.driver.scheduler.resets == 2
    with pytest.raises(EngineClosed):
        await engine.reset_cache()
