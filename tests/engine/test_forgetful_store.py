"""A store that loses everything under a live engine: after a bounded number of requests another engine finds a whole
prefix there again. In this process, and in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.scheduler.tiers.chains import TRUSTED_USES
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config, until
from fdasync.testing.stores.wrapper import Wrapper

pytestmark = pytest.mark.usefixtures("forked_children")

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
PROMPT = [7, *[at * 7 % 100 for at in range(1, 40)]]
# nine of its ten blocks can be hit
WHOLE = 36
BOUND = TRUSTED_USES + 1


class Kept(Wrapper):
    """A memory store that outlives the engines that open it."""

    def __init__(self):
        super().__init__(MemoryStore(MemoryConfig()))
        self.keys = {}

    async def put(self, items):
        self.keys.update({item.key: None for item in items})
        return await self.inner.put(items)

    async def aclose(self):
        pass


def make_config(store, config=None, **runner):
    own = {"max_context_tokens": 48, **runner}
    return synthetic_config(own, host_blocks=64, store=store, store_config=config or {})


async def ask(engine, tokens):
    result = await engine.complete(tokens, PARAMS)
    check_sample(result.samples[0], tokens, PARAMS, oracle_of(engine.config))
    return result


async def settled(engine):
    """Nothing is on its way to the store, nor about to be asked."""
    await until(lambda: not engine.stats().scheduler.writing, every_s=0.001)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("suffixes", [False, True], ids=["the same prompt", "other suffixes"])
def test_a_store_in_this_process_that_was_emptied_has_the_whole_prefix_again(suffixes):
    async def work():
        store = Kept()
        # there is something to win by the store
        config = make_config("memory", token_s=0.002, step_s=0.001)
        async with Engine(config, store=store) as engine:
            await ask(engine, PROMPT)
            await settled(engine)
            assert await store.delete(list(store.keys)) >= 10
            for number in range(BOUND):
                await ask(engine, [*PROMPT[:-3], number, number, number] if suffixes else PROMPT)
                await settled(engine)
            assert engine.stats().scheduler.forgotten_blocks >= 9
            assert engine.stats().scheduler.hit_tokens_store == 0
        check_idle(engine)
        async with Engine(config, store=store) as second:
            assert (await ask(second, PROMPT)).cached.store == WHOLE
        check_idle(second)

    with no_leaks():
        run_sim(work())


def empty(path):
    with contextlib.closing(sqlite3.connect(path, timeout=300.0)) as other, other:
        return other.execute("DELETE FROM objects").rowcount


async def hits_of_a_second_engine(config):
    """What a fresh engine finds in the store; asked again where the machine was too slow for its estimates."""
    hits = 0
    for _ in range(20):
        async with Engine(config) as engine:
            # teaches it what computing costs here: more than any read
            await ask(engine, PROMPT[::-1])
            hits = max(hits, (await ask(engine, PROMPT)).cached.store)
        check_idle(engine)
        if hits == WHOLE:
            break
    return hits


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["file", "file, its process killed", "sqlite"])
async def test_a_store_of_its_own_process_that_was_emptied_has_the_whole_prefix_again(tmp_path, kind):
    if kind == "sqlite":
        pytest.importorskip("fdasync_example")
    path = tmp_path / "kv"
    killed = "killed" in kind
    kind = kind.partition(",")[0]
    # a call that finds it gone fails; what is left alone for that is soon asked again
    config = msgspec.structs.replace(make_config(kind, {"path": str(path)}), store_retry_s=0.05)
    asked = 0
    async with Engine(config) as engine:
        await ask(engine, PROMPT)
        await until(lambda: engine.stats().scheduler.written_blocks >= 10)
        await settled(engine)
        if kind == "sqlite":
            assert await asyncio.to_thread(empty, path) >= 10
        else:
            if killed:
                os.kill(engine.store_pid, signal.SIGKILL)
            await asyncio.to_thread(shutil.rmtree, path)
        # the question may meet a store that is just being started again: then the next one counts
        while engine.stats().scheduler.forgotten_blocks < 10:
            asked += engine.store_pid != -1 and engine._runtime.store.breaker.state == "closed"
            await ask(engine, PROMPT)
            await asyncio.sleep(0.05)
        assert asked <= 4 * BOUND
        await until(lambda: engine.stats().scheduler.written_blocks >= 20)
    check_idle(engine)
    assert await hits_of_a_second_engine(make_config(kind, {"path": str(path)}, token_s=0.01)) == WHOLE
