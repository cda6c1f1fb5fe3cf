"""The guard around a store full of faults."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, Item
from fdasync.errors import StoreTimeout, StoreUnavailable
from fdasync.ipc.shared_memory import Part
from fdasync.testing.harness.bounded import turns
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.cache.store.guard.scripted_store import NBYTES, Guarded, item, memory, now, opened, simulated
from tests.support.helpers import case_settings

# -- all of them ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30), hang=st.sampled_from([0.0, 0.02]))
@case_settings(60)
@simulated
async def test_around_a_store_full_of_faults_every_call_ends_and_what_is_read_is_right(seed, hang):
    random = Random(seed)
    plan = StoreFaults(
        seed=seed, fail_call=0.1, lose_answer=0.1, fail_item=0.1, drop_put=0.1, delay=0.3, delay_s=3.0, hang=hang
    )
    faults = FaultyStore(memory(), plan)
    limits = {"max_calls": 3, "max_nbytes": 5 * NBYTES, "call_s": 2.0, "retry_s": 2.0, "max_retry_s": 10.0}
    store = Guarded(faults, close_s=4.0, **limits)
    leased = set()

    async def one(region, place):
        """A call on a part of its own, which is not used again before the call has really ended."""
        key = str(random.randrange(8))
        mine = Item(key, (Part(0, place * 500, 500),))
        try:
            if random.random() < 0.5:
                region.map[place * 500 : place * 500 + 500] = value(key, 500)
                await store.put([mine])
                region.map[place * 500 : place * 500 + 500] = bytes(500)
            else:
                region.map[place * 500 : place * 500 + 500] = bytes(500)
                (outcome,) = await store.get_into([mine])
                found = region.map[place * 500 : place * 500 + 500]
                assert outcome.status != "done" or found == value(key, 500)
        except StoreTimeout as error:
            leased.add(place)
            error.ended.add_done_callback(lambda _: leased.discard(place))
        except StoreUnavailable:
            return

    async with opened(store) as region:
        begun = now()
        for _ in range(30):
            free = [place for place in range(20) if place not in leased]
            await asyncio.gather(*[one(region, place) for place in free[:5]])
            assert now() - begun < 4.1, "a call ended later than its bound"
            if len(leased) >= 3:
                assert await store.kill("it hangs")
                await turns(5)
            await asyncio.sleep(1.0)
            begun = now()
        faults.plan = StoreFaults()
        await store.kill("the end of the faults")
        await asyncio.sleep(60.0)
        assert store.breaker.state == "closed"
        mine = item("last", 500)
        assert (await store.put([mine])) == [DONE]
        assert (await store.get_into([mine])) == [DONE]
        await turns(3)
        assert not leased
        assert faults.hanging == 0
    assert len(store.told) > 60
