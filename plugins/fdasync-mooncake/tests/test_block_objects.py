"""Block objects on a pool: their headers and checksums are made in the plugin's threads, where the bytes move."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from fdasync.cache.store import DONE, EXISTS, MISS, Item
from fdasync.cache.store.block_format import BlockSchema, Section, object_key, read_header
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion

pytestmark = pytest.mark.usefixtures("nothing_left", "network")

ZEROS, TRASH = Part(0, 0, PAGE_NBYTES), Part(0, PAGE_NBYTES, PAGE_NBYTES)
SCHEMA = BlockSchema(
    layout="pages", kv_dtype="uint8", block_tokens=4, zeros=ZEROS, trash=TRASH,
    sections=(Section("kv", "uint8", (300_000,), 300_000), Section("routing", "uint8", (8,), 8)),
)  # fmt: skip
_STRIDE = 80 * PAGE_NBYTES
_KV_AT, _AUX_AT = PAGE_NBYTES, 79 * PAGE_NBYTES
_BLOCKS = 24
# a header that no test wrote
_UNTOUCHED = b"\xa5" * PAGE_NBYTES


class Bench:
    """A region of blocks, and what their headers and sections hold."""

    def __init__(self) -> None:
        self.region = SharedRegion.create("objects", 2 * PAGE_NBYTES + _BLOCKS * _STRIDE)

    def item(self, name: str, block: int) -> Item:
        at = self._at(block)
        parts = (Part(0, at, PAGE_NBYTES), Part(0, at + _KV_AT, 300_000), Part(0, at + _AUX_AT, 8))
        return Item(object_key(b"mooncake-objects", name.encode().ljust(16, b".")), parts)

    def fill(self, block: int, byte: int) -> None:
        at = self._at(block)
        self.region.view(at, PAGE_NBYTES)[:] = _UNTOUCHED
        self.region.view(at + _KV_AT, 300_000)[:] = bytes([byte]) * 300_000
        self.region.view(at + _AUX_AT, 8)[:] = bytes([byte]) * 8

    def header(self, block: int) -> bytes:
        return bytes(self.region.view(self._at(block), PAGE_NBYTES))

    def holds(self, block: int, byte: int) -> bool:
        at = self._at(block)
        kv = self.region.view(at + _KV_AT, 300_000) == bytes([byte]) * 300_000
        return kv and self.region.view(at + _AUX_AT, 8) == bytes([byte]) * 8

    def _at(self, block: int) -> int:
        return 2 * PAGE_NBYTES + block * _STRIDE


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.region.close()


@asynccontextmanager
async def opened(pool, bench, schema):
    store = ProcessStore("mooncake", {"master": pool.address}, schema, close_deadline_s=0.05)
    try:
        await store.open([bench.region])
        yield store
    finally:
        await store.aclose()


@pytest.mark.ci
async def test_blocks_go_and_come(pool, bench):
    async with opened(pool, bench, SCHEMA) as store:
        for block in range(_BLOCKS):
            bench.fill(block, block)
        items = [bench.item(f"many-{block}", block) for block in range(_BLOCKS)]
        assert await store.put(items) == [DONE] * _BLOCKS
        assert all(read_header(bench.header(block)).rank == 0 for block in range(_BLOCKS))
        for block in range(_BLOCKS):
            bench.fill(block, 255)
        # another order, one that is not there, and one twice
        asked = [*reversed(items[1:]), bench.item("nowhere", 0), bench.item("many-0", 0)]
        outcomes = await store.get_into(asked)
        assert outcomes == [*[DONE] * (_BLOCKS - 1), MISS, DONE]
        assert all(bench.holds(block, block) for block in range(_BLOCKS))


@pytest.mark.ci
async def test_what_is_there_is_not_hashed_again(pool, bench):
    async with opened(pool, bench, SCHEMA) as store:
        for block in range(4):
            bench.fill(block, block)
        assert await store.put([bench.item("there", 0)]) == [DONE]
        bench.fill(0, 0)
        items = [bench.item("there", 0), bench.item("new", 1), bench.item("new", 2), bench.item("other", 3)]
        assert await store.put(items) == [EXISTS, DONE, EXISTS, DONE]
        untouched = [bench.header(block) == _UNTOUCHED for block in range(4)]
        assert untouched == [True, False, True, False]
        # of a key that a call names twice the first counts
        assert await store.get_into([bench.item("new", 3)]) == [DONE]
        assert bench.holds(3, 1)


@pytest.mark.ci
async def test_damage_is_told_and_deleted(pool, bench):
    # what the pool has under these keys was put past the block format
    keys = [bench.item(name, 0).key for name in ("flipped", "moved", "short", "whole")]
    async with opened(pool, bench, SCHEMA) as store, opened(pool, bench, None) as raw:
        bench.fill(0, 7)
        assert await store.put([bench.item("whole", 0)]) == [DONE]
        nbytes = SCHEMA.object_nbytes
        everything = Part(0, 2 * PAGE_NBYTES + _STRIDE, nbytes)
        assert await raw.get_into([Item(keys[3], (everything,))]) == [DONE]
        assert await raw.put([Item(keys[1], (everything,))]) == [DONE]
        assert await raw.put([Item(keys[2], (Part(0, everything.offset, nbytes - PAGE_NBYTES),))]) == [DONE]
        bench.region.view(everything.offset + 150_000, 1)[0] ^= 4
        assert await raw.put([Item(keys[0], (everything,))]) == [DONE]
        items = [bench.item(name, 4 + number) for number, name in enumerate(("flipped", "moved", "short", "whole"))]
        outcomes = await store.get_into(items)
        answers = [(outcome.status, outcome.problem.partition(":")[0]) for outcome in outcomes]
        assert answers[1:] == [("damaged", "key"), ("damaged", "store"), ("done", "")]
        assert answers[0][0] == "damaged"
        assert bench.holds(7, 7)
        # gone, so that a good one can take its place
        assert [await raw.exists_prefix([key]) for key in keys] == [0, 0, 0, 1]
        bench.fill(4, 9)
        assert await store.put([bench.item("flipped", 4)]) == [DONE]
        assert await store.get_into([bench.item("flipped", 5)]) == [DONE]
        assert bench.holds(5, 9)
        # the same bytes under their own key, but for the flip: this is the checksum's
        assert await raw.delete([keys[3]]) == 1
        assert await raw.put([Item(keys[3], (everything,))]) == [DONE]
        (outcome,) = await store.get_into([bench.item("whole", 6)])
        assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", "checksum")
