"""Engines with a host tier and a store, in virtual time: what comes back, what it costs, what may go wrong."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, EngineFailed, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cache.store.wrappers import FaultyStore, StoreFaults
from fdasync.errors import DeadlineExceeded, StoreUnavailable
from fdasync.events.catalog import BlockDamaged, BreakerChanged, FetchEnded, LookedUp, StoreCalled, SwapDone
from fdasync.testing import (
    LetterTokenizer,
    check_idle,
    check_sample,
    no_leaks,
    oracle_of,
    run_sim,
    synthetic_config,
    synthetic_engine,
    until,
)

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
COSTS = {"step_s": 0.01, "token_s": 0.002, "copy_s": 0.001}


def prompt(number, length=40):
    """Prompts that share nothing: their first tokens differ."""
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, length)]]


def tiers_config(runner=None, **values):
    """12 device blocks of 4 tokens: one prompt of 40 fits, two do not."""
    own = {"num_blocks": 12, "max_context_tokens": 48, **COSTS, **(runner or {})}
    return synthetic_config(own, **{"host_blocks": 64, "max_step_tokens": 64, **values})


def kept_memory(plan=None):
    """A memory store with faults that outlives the engine that opens it."""

    class Kept(FaultyStore):
        async def aclose(self):
            self.end()

    return Kept(MemoryStore(MemoryConfig()), plan or StoreFaults())


async def ask(engine, tokens, params=PARAMS, **arguments):
    result = await engine.complete(tokens, params, **arguments)
    check_sample(result.samples[0], tokens, params, oracle_of(engine.config))
    return result


def play(work):
    with no_leaks():
        run_sim(work())


# -- the host tier


def test_what_leaves_the_device_comes_back_from_the_host_with_its_rows():
    async def work():
        async with Engine(tiers_config()) as engine, engine.bus.subscribe(SwapDone) as swaps:
            for number in range(3):
                assert (await ask(engine, prompt(number))).cached.total == 0
            again = await ask(engine, prompt(0))
            assert (again.cached.device, again.cached.host, again.cached.store) == (0, 36, 0)
            assert (await ask(engine, prompt(0))).cached.device == 36
            books = engine.stats().scheduler
            assert books.swapped_in_blocks == 9
            assert books.swapped_out_blocks >= 9
            assert books.hit_tokens_host == 36
            done = [await anext(swaps) for _ in range(swaps.pending)]
            assert sum(swap.kv_nbytes for swap in done) == (books.swapped_in_blocks + books.swapped_out_blocks) * 12 * 4
            assert sum(swap.aux_nbytes for swap in done) == 0
            engine.check()
        check_idle(engine)

    play(work)


def test_a_copy_holds_up_who_needs_it_and_nobody_else():
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
            books = engine.stats().scheduler
            assert books.host_evictions > 0
            assert books.free_host_blocks <= 20
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


# -- bounded regret, and what hangs


def recompute_alone(tokens):
    """Seconds to the end of a request that only computes."""

    async def work():
        async with Engine(tiers_config(host_blocks=0)) as engine:
            # the engine that is compared has learnt the same
            await ask(engine, prompt(50))
            begun = asyncio.get_running_loop().time()
            await ask(engine, tokens)
            return asyncio.get_running_loop().time() - begun

    return run_sim(work())


@pytest.mark.parametrize("verb", ["lookup", "fetch"])
def test_a_store_that_hangs_costs_a_request_a_tenth_of_its_recompute_time(verb):
    alone_s = recompute_alone(prompt(0))

    async def work():
        store = kept_memory()
        config = tiers_config(store="memory", store_deadline_s=1.0, lease_kill_s=2.0)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        loop = asyncio.get_running_loop()
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(50))
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
            if verb == "lookup":
                store.plan = StoreFaults(hang=1.0)
            else:
                get_into = store.inner.get_into

                async def hangs(items):
                    await loop.create_future()
                    return await get_into(items)

                store.inner.get_into = hangs
            begun = loop.time()
            result = await ask(engine, prompt(0))
            took_s = loop.time() - begun
            assert result.cached.total == 0
            # its own estimate of reading is some milliseconds
            assert took_s <= alone_s * 1.1 + 0.02, f"{took_s} s, alone {alone_s} s"
            assert engine.stats().scheduler.fetch_cut_offs == 1
            store.inner.__dict__.pop("get_into", None)
            store.plan = StoreFaults()
            if verb == "fetch":
                assert engine.stats().scheduler.late_leases == 1
                # who holds blocks for longer than `lease_kill_s` is killed: a store in this process ends its calls
            async with asyncio.timeout(30):
                while engine.stats().scheduler.late_leases or engine.stats().scheduler.writing:
                    await asyncio.sleep(0.5)
                    if verb == "fetch":
                        for task in asyncio.all_tasks():
                            if "get_into" in task.get_name():
                                task.cancel()
            engine.check()
        check_idle(engine)

    play(work)


def test_no_request_ends_later_than_its_bound_while_the_breaker_opens_and_closes():
    async def work():
        store = kept_memory()
        config = tiers_config(store="memory", store_deadline_s=0.5, store_retry_s=1.0, lease_kill_s=3.0)
        async with Engine(config, store=store) as engine, engine.bus.subscribe(BreakerChanged) as changes:
            await ask(engine, prompt(50))
            store.plan = StoreFaults(hang=1.0)
            loop = asyncio.get_running_loop()
            slowest = 0.0
            for number in range(30):
                begun = loop.time()
                await ask(engine, prompt(number))
                slowest = max(slowest, loop.time() - begun)
                await asyncio.sleep(0.05)
            assert slowest <= recompute_s * 1.1 + 0.02
            first = await anext(changes)
            assert first.state == "open"
            store.plan = StoreFaults()
            await store.kill("the fault is over")
            async with asyncio.timeout(60):
                while (await anext(changes)).state != "closed":
                    pass
            before = engine.stats().scheduler.written_blocks
            await ask(engine, prompt(60))
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
            assert engine.stats().scheduler.written_blocks > before, "it is used again"

    recompute_s = recompute_alone(prompt(0))
    play(work)


def test_a_late_block_that_arrives_whole_serves_the_next_request():
    async def work():
        store = kept_memory()
        config = tiers_config(store="memory", store_deadline_s=10.0)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
        async with Engine(config, store=store) as engine, engine.bus.subscribe(FetchEnded, LookedUp) as ends:
            await ask(engine, prompt(50))
            plan = StoreFaults(delay=1.0, delay_s=0.6)
            # lookups are answered, reads are late
            get_into = store.get_into

            async def slow(items):
                store.plan = plan
                try:
                    return await get_into(items)
                finally:
                    store.plan = StoreFaults()

            store.get_into = slow
            assert (await ask(engine, prompt(0))).cached.total == 0
            told = [await anext(ends) for _ in range(ends.pending)]
            assert [end.late for end in told if isinstance(end, FetchEnded)] == [True]
            await until(lambda: not engine.stats().scheduler.late_leases, 60, 0.1)
            del store.get_into
            books = engine.stats().scheduler
            # its own computation was indexed meanwhile: what came late is dropped, an identity has one (DECISIONS 7)
            assert books.late_fetched_blocks == 9
            engine.check()
            assert (await ask(engine, prompt(0))).cached.total == 36

    play(work)


def test_a_late_write_counts_when_it_is_done():
    async def work():
        store = kept_memory()
        put = store.put

        async def slow(items):
            await asyncio.sleep(2.0)
            return await put(items)

        store.put = slow
        config = tiers_config(store="memory", store_deadline_s=0.5, store_retry_s=60.0, lease_kill_s=30.0)
        async with Engine(config, store=store) as engine:
            # the first calls are late, and by then the store is left alone
            await ask(engine, prompt(0))
            await until(lambda: engine.stats().scheduler.late_leases > 0, 60, 0.05)
            assert engine.stats().scheduler.written_blocks == 0
            await until(lambda: not engine.stats().scheduler.late_leases, 60, 0.1)
            books = engine.stats().scheduler
            assert books.written_blocks > 0
            assert books.written_blocks + books.dropped_writes == 10
            assert len(store.inner._objects) == books.written_blocks
            engine.check()

    play(work)


def test_computing_is_preferred_where_it_is_faster():
    async def work():
        store = kept_memory()
        config = tiers_config({"step_s": 0.0001, "token_s": 0.000001}, store="memory")
        async with Engine(config, store=store) as engine:
            for number in range(4):
                await ask(engine, prompt(number))
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.01)
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(7))
            # it knows by now that a token costs a microsecond, and a lookup more than forty
            engine._runtime.driver.scheduler.storer.rates._lookup.value = 0.01
            assert (await ask(engine, prompt(0))).cached.total == 0
            assert engine.stats().scheduler.fetched_blocks == 0

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
            books = engine.stats().scheduler
            assert books.preemptions > 0
            assert books.swapped_out_blocks > 0
            assert books.swapped_in_blocks > 0
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
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
            books = engine.stats().scheduler
            assert books.preemptions > 0
            assert books.swapped_out_blocks > 0
            assert books.written_blocks == 0

    play(work)


# -- ends


def test_closing_does_not_wait_for_a_store_that_hangs():
    async def work():
        store = kept_memory(StoreFaults(hang=1.0))
        config = tiers_config(store="memory", store_deadline_s=100.0, close_deadline_s=1.0)
        loop = asyncio.get_running_loop()
        async with Engine(config, store=store) as engine:
            await ask(engine, prompt(0))
            begun = loop.time()
        assert loop.time() - begun <= 1.01
        assert engine.stats().scheduler.written_blocks == 0

    play(work)


class HoldsOn(MemoryStore):
    """Reads of it end when they want to, whoever asks."""

    async def put(self, items):
        held = asyncio.get_running_loop().create_future()
        self.held = held
        while not held.done():
            try:
                await asyncio.shield(held)
            except asyncio.CancelledError:
                if held.cancelled():
                    raise
        return await super().put(items)

    async def kill(self, why):
        return False


def test_a_store_that_cannot_let_go_of_its_blocks_is_named_at_the_close():
    async def work():
        store = HoldsOn(MemoryConfig())
        config = tiers_config(store="memory", store_deadline_s=0.2, close_deadline_s=1.0, store_calls=1)
        engine = Engine(config, store=store)
        await engine.start()
        await ask(engine, prompt(0))
        with pytest.raises((DeadlineExceeded, StoreUnavailable, ExceptionGroup)) as caught:
            await engine.aclose()
        assert "put" in str(caught.value) or "write" in str(caught.value)
        store.held.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)

    run_sim(work())


def test_an_engine_that_fails_lets_go_of_the_store():
    async def work():
        store = kept_memory(StoreFaults(delay=1.0, delay_s=0.01))
        config = tiers_config({"fail_step": 3}, store="memory")
        engine = Engine(config, store=store)
        await engine.start()
        with pytest.raises(EngineFailed):
            await engine.complete(prompt(0), SamplingParams(max_tokens=8))
        await engine.aclose()

    play(work)


def test_a_store_whose_lookups_are_slow_but_worth_it_is_learnt():
    async def work():
        store = kept_memory()
        config = tiers_config({"token_s": 0.02}, store="memory")
        async with Engine(config, store=store) as engine:
            for number in range(6):
                await ask(engine, prompt(number))
        exists_prefix = store.exists_prefix

        async def slow(keys):
            await asyncio.sleep(0.2)
            return await exists_prefix(keys)

        store.exists_prefix = slow
        async with Engine(config, store=store) as engine:
            results = [await ask(engine, prompt(number)) for number in range(6)]
            del store.exists_prefix
            # 0.8 s to compute: a lookup of 0.2 s is given up once, and waited for from then on
            assert results[0].cached.total == 0
            assert [result.cached.store for result in results[2:]] == [36] * 4

    play(work)
