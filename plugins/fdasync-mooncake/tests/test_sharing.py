"""Several stores on one pool, as several machines have it: they see each other's objects, and keep the contract."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_mooncake.testing import MasterProcess, MemoryProcess
from mooncake_bench import Blocks, get_one, put_one, store_process

from fdasync.cache.store import Item
from fdasync.ipc.shared_memory import Part

pytestmark = pytest.mark.usefixtures("nothing_left", "network")


@pytest.fixture
def blocks():
    blocks = Blocks(64)
    yield blocks
    blocks.region.close()


@pytest.mark.heavy("a Mooncake master and two clients, once")
async def test_what_one_puts_the_other_gets(pool, blocks):
    other = Blocks(8)
    async with (
        store_process(pool, blocks, prefix="fleet/a") as one,
        store_process(pool, other, prefix="fleet/a") as two,
        store_process(pool, blocks, prefix="fleet/b") as stranger,
    ):
        assert one.capabilities.shared
        assert one.capabilities.durability == "process"
        assert await put_one(one, blocks, "shared") == "done"
        assert await two.exists_prefix(["shared", "not"]) == 1
        assert await put_one(two, other, "shared") == "exists"
        assert await get_one(two, other, "shared") == "done"
        # the master protects the object after the get; a damaged one must go all the same, and a good one take its
        # place
        assert await one.delete(["shared"]) == 1
        assert await get_one(two, other, "shared") == "miss"
        assert await put_one(two, other, "shared") == "done"
        assert await get_one(one, blocks, "shared") == "done"
        await one.aclose()
        assert await get_one(two, other, "shared") == "done"
        # a fleet with another prefix neither sees nor drops it
        assert await get_one(stranger, blocks, "shared") == "miss"
        assert await stranger.delete(["shared"]) == 0
        assert await get_one(two, other, "shared") == "done"
    other.region.close()


@pytest.mark.ci
async def test_writers_on_several_machines_leave_one_whole_object(pool, blocks):
    other = Blocks(64)
    async with store_process(pool, blocks) as one, store_process(pool, other) as two:
        for turn in range(5):
            keys = [f"race-{turn}-{number}" for number in range(8)]
            for place, key in enumerate(keys):
                blocks.filled(key, place)
                other.filled(key, place)
            answers = await asyncio.gather(
                one.put([blocks.item(key, place) for place, key in enumerate(keys)]),
                two.put([other.item(key, place) for place, key in reversed(list(enumerate(keys)))]),
            )
            assert all(outcome.ok for outcomes in answers for outcome in outcomes)
            assert [await get_one(one, blocks, key, 9) for key in keys] == ["done"] * len(keys)
    other.region.close()


async def takes_blocks(store, blocks):
    """Wait until the pool's memory is mounted: until then a pool is full, whatever its master says."""
    async with asyncio.timeout(300):
        while (await store.put([blocks.filled("first", 0)]))[0].status != "done":  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.05)


@pytest.mark.ci
async def test_a_full_pool_forgets_and_stays_right(network, blocks):
    with MasterProcess(port=50151, metrics_port=9103, protect_ms=100) as master, MemoryProcess(master, 32 << 20, 50152):
        async with store_process(master, blocks, metrics=master.metrics) as store:
            assert store.capabilities.capacity_nbytes == 32 << 20
            await takes_blocks(store, blocks)
            answers = {"first": "done"}
            for turn in range(40):
                keys = [f"b-{turn}-{number}" for number in range(4)]
                outcomes = await store.put([blocks.filled(key, place) for place, key in enumerate(keys)])
                answers |= {key: outcome.status for key, outcome in zip(keys, outcomes, strict=True)}
            assert set(answers.values()) <= {"done", "full"}
            found = [await get_one(store, blocks, key, 9) for key in answers]
            assert set(found) == {"done", "miss"}
            assert "full" not in {answers[key] for key, state in zip(answers, found, strict=True) if state == "done"}
            usage = await store.usage()
            assert usage.objects == found.count("done")
            assert usage.nbytes <= 32 << 20


@pytest.mark.ci
async def test_a_reader_never_sees_what_took_the_place_of_a_dropped_object(network, blocks):
    """Removal is forced, and its memory is the next put's: within one store it waits for who reads."""
    half = 32 << 20
    one, other = (Item(name, (Part(0, place * half, half),)) for place, name in enumerate(("one", "other")))
    blocks.region.view(0, half)[:] = b"\x11" * half
    with MasterProcess(port=50151, metrics_port=9103) as master, MemoryProcess(master, 40 << 20, 50152):
        async with store_process(master, blocks) as store:

            async def replace():
                assert await store.delete(["one"]) == 1
                return await store.put([other])

            for _ in range(4):
                assert (await store.put([one]))[0].status == "done"
                # what is read goes over what was put, so the same bytes must come
                blocks.region.view(half, half)[:] = b"\x22" * half
                (got,), (put,) = await asyncio.gather(store.get_into([one]), replace())
                assert (got.status, put.status) == ("done", "done")
                assert blocks.region.view(0, half) == b"\x11" * half
                await store.delete(["other"])
