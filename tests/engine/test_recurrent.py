"""Engines of a recurrent model: whatever is cached, swapped, preempted or asleep, answers are the oracle's."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.snapshots import StateSpec
from fdasync.engine.config import host_snapshots
from fdasync.engine.prepare import namespace_of
from fdasync.errors import ConfigError
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config, synthetic_engine, until

MODEL = {"state_words": 3, "num_snapshots": 8, "num_blocks": 48}


def config(model=None, **fields):
    return synthetic_config({**MODEL, **(model or {})}, **{"max_running": 6, **fields})


async def ask(engine: Engine, prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    result = await engine.complete(prompt, params)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle_of(engine.config))
    return list(result.token_ids)


async def conversations(engine: Engine, seed: int, count: int = 12) -> None:
    """Requests that share beginnings, and follow each other's answers."""
    random = Random(seed)
    prefaces = [[random.randrange(60) for _ in range(random.randint(5, 30))] for _ in range(2)]

    async def one() -> None:
        prompt = random.choice(prefaces) + [random.randrange(60) for _ in range(random.randint(1, 9))]
        answer = await ask(engine, prompt, random.randint(1, 20))
        await ask(engine, [*prompt, *answer, 1, 2], 4)

    await asyncio.gather(*[one() for _ in range(count)])


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("host_blocks", [0, 40])
@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_do_not_depend_on_what_is_cached(depth, host_blocks):
    async with synthetic_engine(config(pipeline_depth=depth, host_blocks=host_blocks)) as engine:
        await conversations(engine, seed=depth)
        stats = engine.stats().scheduler
        assert stats.resumed_snapshots > 0
        assert stats.hit_tokens > 0
        check_idle(engine)


@pytest.mark.ci
async def test_a_worker_keeps_states_and_snapshots():
    async with synthetic_engine(config({"num_blocks": 20}, process="worker", host_blocks=40)) as engine:
        # one after the other, so that what is on the host does not depend on how fast the worker is
        for first in (0, 20, 40, 0):
            await ask(engine, list(range(first, first + 41)), 4)
        assert engine.stats().scheduler.hit_tokens_host == 40
        await conversations(engine, seed=3)


@pytest.mark.ci
async def test_ranks_write_each_snapshot_once():
    model = {"num_blocks": 20, "kv_shares": 2}
    wide = config(model, process="worker", tensor_parallel=2, host_blocks=40)
    async with synthetic_engine(wide) as engine:
        for first in (0, 20, 40, 0):
            await ask(engine, list(range(first, first + 41)), 4)
        assert engine.stats().scheduler.hit_tokens_host == 40
        await conversations(engine, seed=4, count=8)


async def test_an_engine_that_slept_goes_on_from_the_host():
    async with synthetic_engine(config(host_blocks=40)) as engine:
        prompt = list(range(20))
        running = [asyncio.ensure_future(ask(engine, [*prompt, number], 30)) for number in range(4)]
        await until(lambda: engine.stats().scheduler.steps > 5)
        await engine.sleep(level=1)
        await engine.wake()
        await asyncio.gather(*running)
        check_idle(engine)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": "memory", "host_blocks": 8, "host_snapshots": 0}, "host_snapshots"),
        ({"host_snapshots": 3}, "host_snapshots"),
        ({"role": "mixed", "host_blocks": 8, "host_snapshots": 0}, "host_snapshots"),
        ({"state_every_tokens": 6}, "state_every_tokens"),
    ],
)
async def test_what_it_cannot_do_yet_is_refused_by_name(fields, field):
    with pytest.raises(ConfigError, match=f"config.{field}"):
        async with synthetic_engine(config(**fields)):
            pass


async def test_by_itself_it_keeps_a_snapshot_for_each_host_block_but_no_more_than_memory_is_for():
    async with synthetic_engine(config(store="memory", host_blocks=24)) as engine:
        assert engine.stats().scheduler.num_host_snapshots == 24
        capacity = engine.capacity
    # of 256 MiB each, and of 64 MiB with the page that each has on the host
    for words, count in ((1 << 26, 8), ((1 << 24) - 1024, 16)):
        large = msgspec.structs.replace(capacity, state_specs=(StateSpec("recurrent", (words,), "float32", (0,)),))
        assert host_snapshots(engine.config, large) == count


async def test_blocks_of_models_with_and_without_state_never_match():
    capacities = []
    for words in (0, 3):
        async with synthetic_engine(config({"state_words": words})) as engine:
            capacities.append(engine.capacity)
    plain, recurrent = capacities
    bare = msgspec.structs.replace(recurrent, state_specs=())
    # blocks whose objects have a state, and the same blocks without
    seldom = msgspec.structs.replace(recurrent, state_every_tokens=2 * recurrent.state_every_tokens)
    assert len({namespace_of(one) for one in (plain, recurrent, bare, seldom)}) == 4
