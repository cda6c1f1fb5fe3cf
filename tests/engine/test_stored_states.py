"""Engines of a recurrent model with a store: states come back with their blocks, or not at all."""

from __future__ import annotations

import pytest

from fdasync import Engine
from fdasync.cache.store.block_format import read_header
from fdasync.events.catalog import BlockDamaged
from fdasync.ipc.shared_memory import PAGE_NBYTES
from fdasync.testing import check_idle, synthetic_engine, until
from tests.engine.test_recurrent import config, conversations
from tests.engine.tiers import ask, kept_memory, play, prompt, tiers_config

MODEL = {"state_words": 3, "num_snapshots": 8, "num_blocks": 24, "max_context_tokens": 80}
# states are kept behind each third block
STORED = {"store": "memory", "state_every_tokens": 12, "host_snapshots": 10}


def make_config(**fields):
    return tiers_config(MODEL, **{**STORED, **fields})


def test_a_second_engine_goes_on_from_the_last_state_that_the_first_stored():
    async def work():
        store = kept_memory()
        own = make_config()
        async with Engine(own, store=store) as engine:
            first = await ask(engine, prompt(0, 43))
            await until(lambda: engine.stats().scheduler.written_blocks == 11)
        async with Engine(own, store=store) as engine:
            second = await ask(engine, prompt(0, 43))
            assert second.token_ids == first.token_ids
            assert (second.cached.device, second.cached.host, second.cached.store) == (0, 0, 36)
            check_idle(engine)
        async with Engine(make_config(state_every_tokens=24), store=store) as engine:
            # an engine that keeps states elsewhere shares no block
            assert (await ask(engine, prompt(0, 43))).cached.total == 0

    play(work)


def damage_states(store) -> int:
    """Change a bit in the state of each object that has one; returns how many do."""
    count = 0
    for key, value in store.inner._objects.items():
        section = read_header(value[:PAGE_NBYTES]).sections[-1]
        if section.name == "state":
            data = bytearray(value)
            data[section.offset + section.nbytes - 1] ^= 4
            store.inner._objects[key] = bytes(data)
            count += 1
    return count


def test_a_state_that_was_damaged_costs_its_block_and_is_written_anew():
    async def work():
        store = kept_memory()
        async with Engine(make_config(), store=store) as engine:
            first = await ask(engine, prompt(0, 43))
            await until(lambda: engine.stats().scheduler.written_blocks == 11)
        assert damage_states(store) == 3
        async with Engine(make_config(), store=store) as engine, engine.bus.subscribe(BlockDamaged) as seen:
            second = await ask(engine, prompt(0, 43))
            assert second.token_ids == first.token_ids
            assert second.cached.total == 0
            problems = [(await anext(seen)).problem for _ in range(seen.pending)]
            assert len(problems) == 3
            assert all("section 'state'" in problem for problem in problems)
            await until(lambda: engine.stats().scheduler.written_blocks >= 3)
        async with Engine(make_config(), store=store) as engine:
            assert (await ask(engine, prompt(0, 43))).cached.store == 36

    play(work)


@pytest.mark.ci
async def test_conversations_by_way_of_files(tmp_path):
    # segments of the cap's size would leave none for the objects with a state, which have their own
    files = {"path": str(tmp_path), "max_nbytes": 1 << 24, "segment_nbytes": 1 << 20}
    own = config(host_blocks=60, state_every_tokens=12, host_snapshots=10, store="file", store_config=files)
    for _ in range(2):
        async with synthetic_engine(own) as engine:
            # whether the store is asked depends on how fast files are; what is answered does not
            await conversations(engine, seed=7)
            await until(lambda: engine.stats().scheduler.writing == 0)
            assert engine.stats().scheduler.written_blocks > 0
            check_idle(engine)
