"""Engines with a host tier and a store, in virtual time: what comes back, what it costs, what may go wrong."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, SamplingParams
from fdasync.events.catalog import BlockDamaged, StoreCalled, SwapDone
from fdasync.testing import LetterTokenizer, check_idle, synthetic_config, synthetic_engine, until
from fdasync.testing.stores.faults import StoreFaults
from tests.engine.tiers import COSTS, PARAMS, ask, kept_memory, play, prompt, tiers_config

# -- the host tier


def test_what_leaves_the_device_comes_back_from_the_host_with_its_rows():
    async def work():
        async with Engine(tiers_config()) as engine, engine.bus.subscribe(SwapDone) as swaps:
            for number in range(3):
                assert (await ask(engine, prompt(number))).cached.total == 0
            again = await ask(engine, prompt(0))
            assert (again.cached.device, again.cached.host, again.cached.store) == (0, 36, 0)
            assert (await ask(engine, prompt(0))).cached.device == 36
            counters = engine.stats().scheduler
            assert counters.swapped_in_blocks == 9
            assert counters.swapped_out_blocks >= 9
            assert counters.hit_tokens_host == 36
            done = [await anext(swaps) for _ in range(swaps.pending)]
            assert (
                sum(swap.kv_nbytes for swap in done)
                == (counters.swapped_in_blocks + counters.swapped_out_blocks) * 12 * 4
            )
            assert sum(swap.aux_nbytes for swap in done) == 0
            engine.check()
        check_idle(engine)

    play(work)


def test_a_copy_holds_up_the_request_that_needs_it_and_no_other():
    async def work():
        # an empty device, and the prompt in the store: it comes by way of the host, and that copy is slow
        store = kept_memory()
        config = tiers_config({"num_blocks": 30, "copy_s": 5.0}, store="memory", write_back=False)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        loop = asyncio.get_running_loop()
        async with Engine(config, store=store) as engine:
            begun = loop.time()
            back = asyncio.create_task(ask(engine, prompt(0)))
            await asyncio.sleep(0.1)
            assert engine.stats().scheduler.moving
            other = await ask(engine, prompt(9, 8), SamplingParams(max_tokens=20, temperature=0.0))
            assert loop.time() - begun < 1.0, "a request that needs no copy waited for one"
            assert len(other.token_ids) == 20
            assert not back.done()
            assert (await back).cached.store == 36
            # it starts as soon as its blocks are there
            assert 5.0 <= loop.time() - begun < 5.3

    play(work)


def test_a_hundred_requests_for_one_prefix_on_the_host_copy_it_once():
    async def work():
        config = tiers_config({"num_blocks": 200, "max_context_tokens": 100}, max_running=100, max_step_tokens=400)
        async with Engine(config) as engine:
            await ask(engine, prompt(0))
            for number in range(1, 22):
                await ask(engine, prompt(number))
            before = engine.stats().scheduler.swapped_in_blocks
            results = await asyncio.gather(*[ask(engine, prompt(0)) for _ in range(40)])
            assert all(result.cached.total == 36 for result in results)
            assert sum(result.cached.host for result in results) == 36, "only one of them brought it"
            assert engine.stats().scheduler.swapped_in_blocks - before == 9

    play(work)


def test_a_full_host_tier_forgets_what_was_used_longest_ago():
    async def work():
        async with Engine(tiers_config(host_blocks=20)) as engine:
            for number in range(6):
                await ask(engine, prompt(number))
            assert (await ask(engine, prompt(0))).cached.total == 0
            counters = engine.stats().scheduler
            assert counters.host_evictions > 0
            assert counters.free_host_blocks <= 20
        check_idle(engine)

    play(work)


# -- the store


def test_a_second_engine_finds_in_the_store_what_the_first_computed():
    async def work():
        store = kept_memory()
        config = tiers_config(store="memory")
        async with Engine(config, store=store) as engine:
            first = await ask(engine, prompt(0))
            assert first.cached.total == 0
        async with Engine(config, store=store) as engine:
            second = await ask(engine, prompt(0))
            assert (second.cached.device, second.cached.host, second.cached.store) == (0, 0, 36)
            assert second.token_ids == first.token_ids
            assert second.ttft_s is None or second.ttft_s < 0.1
            assert engine.stats().scheduler.hit_tokens_store == 36

    play(work)


def test_an_engine_for_tests_takes_a_store_and_a_tokenizer():
    async def work():
        store, texts = kept_memory(), LetterTokenizer()
        asked = "abcdefghijklmnopqrstuvwxyz"
        # a host tier and a name for the store are found for it
        async with synthetic_engine(store=store, tokenizer=texts) as engine:
            result = await engine.complete(asked, PARAMS)
            assert result.prompt_token_ids == tuple(range(26))
            assert result.text == texts.decode(result.token_ids)
        config = synthetic_config(COSTS, host_blocks=7, store="mine")
        async with synthetic_engine(config, store=store, tokenizer=texts) as engine:
            assert (await engine.complete(asked, PARAMS)).cached.store > 0
            assert (engine.config.store, engine.config.host_blocks) == ("mine", 7)

    play(work)


def test_a_hundred_requests_for_one_prefix_read_it_once():
    async def work():
        store = kept_memory()
        config = tiers_config({"num_blocks": 300}, store="memory", max_running=100, max_step_tokens=400)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        async with Engine(config, store=store) as engine, engine.bus.subscribe(StoreCalled, limit=4096) as calls:
            results = await asyncio.gather(*[ask(engine, prompt(0)) for _ in range(100)])
            assert all(result.cached.total == 36 for result in results)
            seen = [await anext(calls) for _ in range(calls.pending)]
            assert sum(call.items for call in seen if call.verb == "get_into") == 9
            # one that they waited for, and one that asked whether it is still there
            assert sum(call.verb == "exists_prefix" for call in seen) == 2

    play(work)


@pytest.mark.parametrize(("policy", "want"), [("all", 11), ("prompt", 9), ("off", 0)])
def test_what_is_written_through(policy, want):
    async def work():
        store = kept_memory()
        # 39 prompt tokens and 5 of the output are forwarded: 9 whole blocks of the prompt, 2 that end in the output
        params = SamplingParams(max_tokens=6, temperature=0.0)
        async with Engine(tiers_config(store="memory", write_through=policy), store=store) as engine:
            await ask(engine, prompt(0, 39), params)
        assert len(store.inner._objects) == want
        assert engine.stats().scheduler.written_blocks == want

    play(work)


def test_closing_lets_what_is_on_its_way_to_the_store_get_there():
    async def work():
        store = kept_memory(StoreFaults(delay=1.0, delay_s=2.0))
        config = tiers_config(store="memory", store_deadline_s=60.0, close_deadline_s=100.0)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        assert engine.stats().scheduler.written_blocks == 10
        assert engine.stats().scheduler.dropped_writes == 0

    play(work)


def test_damaged_objects_are_misses_told_by_name_and_replaced():
    async def work():
        store = kept_memory()
        config = tiers_config(store="memory")
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        objects = store.inner._objects
        keys = list(objects)
        for key in keys[3:5]:
            broken = bytearray(objects[key])
            broken[4096] ^= 1
            objects[key] = bytes(broken)
        async with Engine(config, store=store) as engine, engine.bus.subscribe(BlockDamaged) as damages:
            result = await ask(engine, prompt(0))
            assert result.cached.store == 12, "the blocks before the first damaged one"
            told = {(await anext(damages)).key for _ in range(2)}
            assert told == set(keys[3:5])
        async with Engine(config, store=store) as engine:
            assert (await ask(engine, prompt(0))).cached.store == 36, "good ones took their place"

    play(work)


# -- preempted requests


def test_preempted_requests_go_to_the_host_and_the_store_while_the_others_go_on():
    async def work():
        store = kept_memory()
        config = tiers_config(
            {"num_blocks": 16, "max_context_tokens": 64},
            store="memory",
            write_through="off",
            max_running=4,
            decode_reserve_blocks=0,
        )
        params = SamplingParams(max_tokens=24, temperature=0.0)
        prompts = [prompt(number, 16) for number in range(3)]
        copies = [list(tokens) for tokens in prompts]
        async with Engine(config, store=store) as engine:
            results = await asyncio.gather(*[ask(engine, tokens, params) for tokens in prompts])
            counters = engine.stats().scheduler
            assert counters.preemptions > 0
            assert counters.swapped_out_blocks > 0
            assert counters.swapped_in_blocks > 0
            await until(lambda: not engine.stats().scheduler.writing, 300, 0.1)
            assert engine.stats().scheduler.written_blocks > 0, "prompt and output blocks of who was preempted"
            # whole: the rows that were captured before are there
            assert all(len(result.routing.array) == 16 + 24 - 1 for result in results)
        assert prompts == copies
        check_idle(engine)

    play(work)


def test_without_write_back_preempted_blocks_still_go_to_the_host_but_not_to_the_store():
    async def work():
        store = kept_memory()
        config = tiers_config(
            {"num_blocks": 16, "max_context_tokens": 64},
            store="memory",
            write_through="off",
            write_back=False,
            max_running=4,
            decode_reserve_blocks=0,
        )
        params = SamplingParams(max_tokens=24, temperature=0.0)
        async with Engine(config, store=store) as engine:
            await asyncio.gather(*[ask(engine, prompt(number, 16), params) for number in range(3)])
            counters = engine.stats().scheduler
            assert counters.preemptions > 0
            assert counters.swapped_out_blocks > 0
            assert counters.written_blocks == 0

    play(work)
