"""The store in memory: the conformance suite, on both kinds of time, and what is its own."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cache.store.plugins import make_store
from fdasync.errors import ConfigError, StoreUnavailable
from fdasync.testing import SimLoop, StoreTests
from fdasync.testing.harness.bounded import on_loop, turns
from fdasync.testing.harness.guarded_memory import value


class TestMemory(StoreTests):
    def make(self):
        return MemoryStore(MemoryConfig())

    def make_capped(self, max_nbytes):
        return MemoryStore(MemoryConfig(max_nbytes=max_nbytes))

    @on_loop
    async def test_what_was_used_longest_ago_goes_first(self):
        async with self.on_store(self.make_capped(10_000)) as on:
            keys = [on.key(number) for number in range(5)]
            for key in keys[:3]:
                await on.keep(key, value(key, 3000))
            # used again: by a get, and by a put of what exists
            await on.fetch(keys[0], 3000)
            assert (await on.keep(keys[1], b"other")).status == "exists"
            await on.keep(keys[3], value(3, 3000))
            assert [await on.exists([key]) for key in keys] == [1, 1, 0, 1, 0]
            await on.keep(keys[4], value(4, 6001))
            assert [await on.exists([key]) for key in keys] == [0, 0, 0, 1, 1]
            usage = await on.store.usage()
            assert (usage.objects, usage.nbytes) == (2, 9001)
            assert (await on.keep(on.key("huge"), bytes(10_001))).status == "full"
            assert (await on.store.usage()).objects == 2, "nothing is dropped for what can never fit"

    @on_loop
    async def test_a_read_of_the_wrong_size_is_no_use(self):
        async with self.on_store(self.make_capped(6000)) as on:
            for name in "ab":
                await on.keep(on.key(name), value(name, 3000))
            assert await on.fetch(on.key("a"), 2999) == "damaged"
            await on.keep(on.key("c"), value("c", 3000))
            assert [await on.exists([on.key(name)]) for name in "abc"] == [0, 1, 1]

    @on_loop
    async def test_others_get_a_turn_after_every_mib(self):
        async with self.on_store() as on:
            items = [on.filled(on.key(number), value(number, 1 << 18)) for number in range(32)]
            putting = asyncio.ensure_future(on.store.put(items))
            spent = 0
            while not putting.done():
                await turns(1)
                spent += 1
            assert spent >= 8
            assert all(one.ok for one in putting.result())

    @on_loop
    async def test_a_kill_ends_what_runs_at_its_next_object(self):
        async with self.on_store() as on:
            items = [on.filled(on.key(number), value(number, 1 << 20)) for number in range(4)]
            putting = asyncio.ensure_future(on.store.put(items))
            await turns(2)
            assert await on.store.kill("a test")
            with pytest.raises(StoreUnavailable, match="ended"):
                await putting
            assert 1 <= await on.exists([item.key for item in items]) < 4

    @on_loop
    async def test_objects_end_with_it(self):
        async with self.on_store() as on:
            await on.keep(on.key("a"), b"a")
            await on.store.aclose()
            with pytest.raises(StoreUnavailable, match="closed"):
                await on.store.usage()


@pytest.mark.ci
class TestMemoryInVirtualTime(TestMemory):
    def new_loop(self):
        return SimLoop()


def test_it_is_found_by_name():
    store = make_store("memory", {"max_nbytes": 5})
    assert isinstance(store, MemoryStore)
    assert store.capabilities.capacity_nbytes == 5
    assert not store.blocking
    with pytest.raises(ConfigError, match="max_bytes"):
        make_store("memory", {"max_bytes": 5})
