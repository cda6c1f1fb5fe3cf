"""The store that checks blocks, around stores that answer oddly, slowly, or to large batches."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import xxhash

from fdasync.cache.store.base import DONE, EXISTS, Item
from fdasync.cache.store.block_format import Section, read_header
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from tests.cache.store.block_objects import (
    GOOD,
    HEADER_AT,
    KV,
    NAME,
    REGION_NBYTES,
    ROUTING,
    SCHEMA,
    Bench,
    changed,
)

# -- the store around it ----------------------------------------------------------------------------


class Odd(MemoryStore):
    """A store with a fault: `fault` names it."""

    fault = ""

    async def delete(self, keys):
        if self.fault == "delete":
            raise StoreUnavailable("odd", "not now")
        if self.fault == "defect":
            raise ZeroDivisionError
        return await super().delete(keys)

    async def get_into(self, items):
        outcomes = await super().get_into(items)
        if self.fault == "exists":
            return [EXISTS] * len(items)
        return outcomes[1:] if self.fault == "short" else outcomes

    async def put(self, items):
        outcomes = await super().put(items)
        return [*outcomes, DONE] if self.fault == "long" else outcomes


async def odd(fault: str, **limits: int) -> Bench:
    inner = Odd(MemoryConfig())
    inner.fault = fault
    inner.capabilities = msgspec.structs.replace(inner.capabilities, **limits)
    return Bench(inner=inner)


@pytest.mark.parametrize(("fault", "words"), [("delete", "store odd: not now"), ("defect", "could not be deleted")])
async def test_damage_that_cannot_be_deleted_says_so(fault, words):
    async with await odd(fault) as bench:
        await bench.plant(NAME, b"x" * SCHEMA.object_nbytes)
        for _ in range(2):
            outcome = await bench.get()
            assert outcome.status == "damaged"
            assert outcome.problem.startswith("magic: ")
            assert words in outcome.problem


async def test_a_store_that_answers_oddly_is_not_believed():
    async with await odd("exists") as bench:
        await bench.plant(NAME, GOOD)
        outcome = await bench.get()
        assert (outcome.status, outcome.ok, outcome.transient) == ("failed", False, False)
    for fault in ("short", "long"):
        async with await odd(fault) as bench:
            with pytest.raises(StoreUnavailable, match="outcomes for 1 items"):
                await (bench.store.get_into if fault == "short" else bench.store.put)([bench.item()])


async def test_items_that_are_no_blocks_are_refused_before_anything_happens():
    async with Bench() as bench:
        item = bench.item()
        header, kv, routing, values = item.parts
        wrong = [
            Item("no/block.0", item.parts),
            Item(NAME, (header, kv, routing)),
            Item(NAME, (header, kv, values, routing)),
            Item(NAME, (Part(0, HEADER_AT, 4095), kv, routing, values)),
            Item(NAME, (header, kv, routing, Part(0, REGION_NBYTES - 7, 8))),
            Item(NAME, (header, kv, routing, Part(0, -8, 8))),
            Item(NAME, (header, kv, routing, Part(1, 0, 8))),
        ]
        before = bytes(bench.region.view())
        for bad in wrong:
            for verb in (bench.store.put, bench.store.get_into):
                with pytest.raises(StoreRejected):
                    await verb([item, bad])
        assert bytes(bench.region.view()) == before
        assert await bench.store.exists_prefix([NAME]) == 0


@pytest.mark.parametrize(
    "schema",
    [
        changed(sections=()),
        changed(sections=(ROUTING, KV)),
        changed(sections=(KV, ROUTING, ROUTING)),
        changed(sections=(KV, Section("routing", "uint8", (0,), 0))),
        changed(sections=(KV, Section("routing", "uint8", (-1,), 8))),
        changed(sections=(KV, *(Section(f"aux{number}", "uint8", (1,), 1) for number in range(150)))),
        changed(layout="x" * 4096),
        changed(layout="\ud800"),
        changed(block_tokens=-1),
        changed(zeros=Part(0, 0, 100)),
        changed(trash=Part(0, 0, 100)),
    ],
)
def test_a_schema_that_cannot_be_stored_is_refused(schema):
    with pytest.raises(StoreRejected):
        CheckedStore(MemoryStore(MemoryConfig()), schema)


@pytest.mark.parametrize("limits", [{"max_parts": 5}, {"max_item_nbytes": 6 * PAGE_NBYTES - 1}, {"max_key_chars": 66}])
async def test_a_store_that_cannot_take_blocks_is_refused(limits):
    bench = await odd("", **limits)
    with pytest.raises(StoreRejected):
        await bench.store.open([bench.region])
    await bench.store.aclose()
    bench.region.close()


async def test_limits_are_those_of_blocks():
    async with await odd("", max_parts=6, max_item_nbytes=6 * PAGE_NBYTES, max_key_chars=67) as bench:
        item = bench.item()
        assert bench.store.capabilities.max_parts == len(item.parts)
        assert bench.store.capabilities.max_item_nbytes == item.nbytes
        assert await bench.store.put([item]) == [DONE]


async def test_closing_closes_the_store_inside():
    async with Bench() as bench:
        assert await bench.store.kill("why") is True
        await bench.store.aclose()
        # its memory may be gone from now on
        bench.region.close()
        for verb in (bench.store.put, bench.store.get_into, bench.inner.put):
            with pytest.raises(StoreUnavailable):
                await verb([bench.item()])
        await bench.store.aclose()


async def test_the_loop_goes_on_while_much_is_hashed():
    """One callback hashes a block, or 4 MiB of a section."""
    nbytes = (16 << 20) + 100
    schema = changed(sections=(Section("kv", "uint8", (nbytes,), nbytes),))
    region = SharedRegion.create("big", 3 * PAGE_NBYTES + nbytes)
    store = CheckedStore(MemoryStore(MemoryConfig()), schema)
    await store.open([region])
    region.view(3 * PAGE_NBYTES, nbytes)[:] = bytes(range(256)) * (nbytes // 256) + bytes(100)
    item = Item(NAME, (Part(0, HEADER_AT, PAGE_NBYTES), Part(0, 3 * PAGE_NBYTES, nbytes)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.ensure_future(count())
    for verb in (store.put, store.get_into):
        turns = 0
        assert await verb([item]) == [DONE]
        assert turns >= nbytes // (4 << 20)
    counter.cancel()
    await asyncio.wait([counter])
    # slices give what the whole gives
    checksum = xxhash.xxh3_64_intdigest(region.view(3 * PAGE_NBYTES, nbytes))
    assert read_header(region.view(HEADER_AT, PAGE_NBYTES)).sections[0].checksum == checksum
    await store.aclose()
    region.close()
