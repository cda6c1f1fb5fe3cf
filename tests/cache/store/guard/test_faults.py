"""The wrapper that makes a store fail, as drawn from its seed."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, Item
from fdasync.errors import BadInput, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing import run_sim
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.cache.store.guard.scripted_store import NBYTES, item, items, memory, now, opened, simulated
from tests.support.helpers import case_settings

# -- faults ---------------------------------------------------------------------------------------------


def faulty(**plan):
    return FaultyStore(memory(), StoreFaults(**plan))


@simulated
async def test_a_fault_that_never_struck_fails_the_test_that_asks():
    store = faulty(fail_call=1e-9, drop_put=1.0)
    async with opened(store):
        await store.put(items("a", "b"))
        store.plan = StoreFaults(flip_bit=1.0)
        store.assert_struck("drop_put")
        scripted = r"faults of store memory never struck: fail_call, flip_bit \(struck: drop_put 2; calls: put 1\)"
        with pytest.raises(AssertionError, match=scripted):
            store.assert_struck()
        with pytest.raises(AssertionError, match="never struck: hang"):
            store.assert_struck("hang")
    nothing = faulty()
    with pytest.raises(AssertionError, match="no fault of store memory was planned"):
        nothing.assert_struck()
    # whatever was planned before is asked for, too
    sure = faulty(fail_call=1.0)
    async with opened(sure):
        with pytest.raises(StoreUnavailable):
            await sure.put(items("a"))
        sure.plan = StoreFaults()
        sure.assert_struck()


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"flip_bit": 1.5}, "StoreFaults.flip_bit: 1.5 is no rate"),
        ({"hang": -0.1}, "StoreFaults.hang: -0.1 is no rate"),
        ({"delay": 0.5}, "StoreFaults.delay: a delay of 0 s delays nothing; set delay_s"),
        ({"delay": 0.5, "delay_s": -1.0}, "StoreFaults.delay_s: -1.0 is no number of seconds"),
        ({"delay_s": float("nan")}, "StoreFaults.delay_s: nan is no number"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(plan, problem):
    with pytest.raises(BadInput, match=problem):
        StoreFaults(**plan)


def test_a_fault_that_does_not_exist_is_not_asked_for():
    with pytest.raises(BadInput, match=r"no fault 'flip'; faults: fail_call, .*flip_bit"):
        faulty().assert_struck("flip")


def test_a_plan_set_anew_is_drawn_from_its_own_seed():
    async def struck(before):
        store = faulty(fail_item=0.5, seed=before)
        async with opened(store):
            await store.put(items(*map(str, range(before))))
            store.plan = StoreFaults(fail_item=0.5, seed=7)
            return [outcome.status for outcome in await store.put(items(*map(str, range(100, 140))))]

    assert run_sim(struck(3)) == run_sim(struck(5))


@simulated
async def test_bytes_that_nobody_reads_are_not_spoiled():
    # as a sealed block lies: a header of a page, a section that fills a quarter of one, padding
    read_nbytes, nbytes = PAGE_NBYTES + 1024, 2 * PAGE_NBYTES
    parts = (Part(0, 0, PAGE_NBYTES), Part(0, PAGE_NBYTES, 1024), Part(0, read_nbytes, PAGE_NBYTES - 1024))

    store, region = faulty(), SharedRegion.create("spoiled", nbytes)
    await store.open([region])
    ones = b"\1" * nbytes
    region.view()[:] = ones
    await store.put([Item("a", parts)])
    for fault in ("flip_bit", "truncate"):
        for seed in range(40):
            store.plan = StoreFaults(seed=seed, **{fault: 1.0})
            await store.get_into([Item("a", parts)])
            assert region.view(0, read_nbytes) != ones[:read_nbytes]
            assert region.view(read_nbytes) == ones[read_nbytes:]
    assert store.counts == {"flip_bit": 40, "truncate": 40}
    # zeros instead of zeros are no fault
    region.view()[:] = bytes(nbytes)
    await store.put([Item("b", parts)])
    await store.get_into([Item("b", parts)])
    assert store.counts["truncate"] == 40
    await store.aclose()
    region.close()


@simulated
async def test_a_failed_call_did_nothing_and_a_lost_answer_did():
    store = faulty(fail_call=1.0)
    async with opened(store):
        with pytest.raises(StoreUnavailable, match="the call failed"):
            await store.put(items("a"))
        store.plan = StoreFaults(lose_answer=1.0)
        with pytest.raises(StoreUnavailable, match="the answer was lost"):
            await store.put(items("b"))
        store.plan = StoreFaults()
        assert [await store.exists_prefix([key]) for key in "ab"] == [0, 1]
        assert store.counts == {"fail_call": 1, "lose_answer": 1}


@simulated
async def test_failed_items_and_dropped_puts():
    store = faulty(fail_item=0.5, seed=3)
    async with opened(store):
        names = [str(number) for number in range(20)]
        outcomes = await store.put(items(*names))
        failed = [one.status == "failed" for one in outcomes]
        assert 0 < sum(failed) < 20
        assert all(one.transient and one.problem for one in outcomes if one.status == "failed")
        store.plan = StoreFaults()
        assert [not await store.exists_prefix([name]) for name in names] == failed
        store.plan = StoreFaults(drop_put=1.0)
        assert await store.put(items("dropped")) == [DONE]
        assert await store.exists_prefix(["dropped"]) == 0


@simulated
async def test_truncated_reads_and_flipped_bits_are_done_and_wrong():
    store = faulty()
    async with opened(store) as region:
        data = value("data", 3 * NBYTES)
        parts = msgspec.structs.replace(item("a"), parts=sum((one.parts for one in items(1, 2, 3)), ()))
        region.view(0, len(data))[:] = data
        await store.put([parts])
        for seed in range(20):
            store._random = Random(seed)
            store.plan = StoreFaults(flip_bit=1.0)
            assert await store.get_into([parts]) == [DONE]
            found = bytes(region.view(0, len(data)))
            wrong = [one ^ other for one, other in zip(data, found, strict=True) if one != other]
            assert len(wrong) == 1
            assert wrong[0].bit_count() == 1
            store.plan = StoreFaults(truncate=1.0)
            assert await store.get_into([parts]) == [DONE]
            found = bytes(region.view(0, len(data)))
            kept = len(found.rstrip(b"\0"))
            assert kept < len(data)
            assert found[:kept] == data[:kept]
        assert set(bytes(region.view(len(data), 5000))) == {0}


@simulated
async def test_delays_are_up_to_their_length():
    store = faulty(delay=1.0, delay_s=10.0)
    async with opened(store):
        spent = []
        for _ in range(50):
            begun = now()
            await store.exists_prefix(["a"])
            spent.append(now() - begun)
        assert 0 <= min(spent) < 1.5
        assert 8.5 < max(spent) <= 10.0


@pytest.mark.parametrize("how", ["kill", "aclose"])
@simulated
async def test_what_hangs_ends_by_kill_or_aclose_and_not_by_cancelling(how):
    store = faulty(hang=1.0)
    async with opened(store):
        calls = [store.put(items("a")), store.exists_prefix(["a"]), store.delete(["a"]), store.usage()]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(1000.0)
        tasks[0].cancel()
        await asyncio.sleep(1000.0)
        assert not any(task.done() for task in tasks)
        assert store.hanging == 4
        if how == "kill":
            assert await store.kill("a test")
        else:
            await store.aclose()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks[1:])
        assert store.hanging == 0


EVERY_RATE = ("fail_call", "lose_answer", "fail_item", "drop_put", "truncate", "flip_bit")


@given(
    rates=st.fixed_dictionaries({name: st.sampled_from([0.0, 0.3, 1.0]) for name in EVERY_RATE}),
    order=st.permutations(range(6)),
    seed=st.integers(0, 1000),
)
@case_settings(40)
def test_faults_by_key_do_not_depend_on_order(rates, order, seed):
    async def play(places):
        store = faulty(by="key", seed=seed, **rates)
        found = {}
        async with opened(store) as region:
            for place in places:
                one = item(place, 64, 64 * place)
                region.view(64 * place, 64)[:] = value(place, 64)
                for verb in (store.put, store.get_into):
                    try:
                        (outcome,) = await verb([one])
                        read = bytes(region.view(64 * place, 64)) if outcome.status == "done" else b""
                        found[place, verb.__name__] = (outcome.status, read)
                    except StoreUnavailable as error:
                        found[place, verb.__name__] = error.problem
            return found, store.counts

    assert run_sim(play(order)) == run_sim(play(range(6)))


def test_faults_are_those_of_their_seed():
    async def play(seed):
        store = faulty(seed=seed, fail_item=0.2, drop_put=0.2)
        async with opened(store):
            outcomes = await store.put(items(*range(60)))
            return [one.status for one in outcomes], await store.usage()

    assert run_sim(play(1)) == run_sim(play(1))
    assert run_sim(play(1)) != run_sim(play(2))
