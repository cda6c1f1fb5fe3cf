"""Work that the file store does in its threads for others: `beside`, and the block format on top of it."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item, Moves
from fdasync.cache.store.block_format import BlockSchema, Section, object_key
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.file.store import FileStore
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing.harness.bounded import on_loop, turns
from fdasync.testing.harness.guarded_memory import value
from tests.cache.store.file.in_folder import InFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync.cache.store.base import Piece


class Noted(Moves):
    """Notes the keys, and `on_put` and `on_get` do the rest, in the store's threads; items move in pieces, from behind.

    Args:
        views: the bytes of an item.
    """

    def __init__(self, views: Callable[[Item], list[memoryview]]) -> None:
        self._views = views
        self.put: list[str] = []
        self.got: list[str] = []
        self.threads: set[int] = set()
        self.on_put: Callable[[Item], None] = lambda item: None  # noqa: ARG005
        self.on_get: Callable[[Item], str] = lambda item: ""  # noqa: ARG005

    def leave(self, item: Item) -> Iterator[Piece]:
        self.threads.add(threading.get_ident())
        self.put.append(item.key)
        self.on_put(item)
        yield from self.pieces(item)

    def arrive(self, item: Item) -> Arriving:
        self.threads.add(threading.get_ident())
        return Arriving(self, item)

    def pieces(self, item: Item) -> list[Piece]:
        (view,) = [view for view in self._views(item) if view.nbytes]
        middle = view.nbytes // 2
        return [(middle, [view[middle:]]), (0, [view[:1], view[1:middle]])]


class Arriving:
    def __init__(self, noted: Noted, item: Item) -> None:
        self.problem = "it was asked too early"
        self._noted = noted
        self._item = item

    def __iter__(self) -> Iterator[Piece]:
        yield from self._noted.pieces(self._item)
        self._noted.got.append(self._item.key)
        self.problem = self._noted.on_get(self._item)


def noted_of(store: FileStore) -> Noted:
    noted = Noted(store._views)
    assert store.beside(noted)
    return noted


def test_a_store_that_does_not_say_so_runs_nothing():
    assert not MemoryStore(MemoryConfig()).beside(Noted(lambda _: pytest.fail("it ran")))


class TestBeside(InFolder):
    """The sentence of the contract."""

    @pytest.mark.parametrize("sync", ["none", "data"])
    def test_a_put_is_completed_before_it_is_read_and_only_if_it_is(self, sync):
        self.sync = sync

        @on_loop
        async def play(self):
            store = self.store(max_nbytes=self.slots(20, 5000))
            noted = noted_of(store)
            async with self.on_store(store) as on:
                noted.on_put = lambda item: on.write(item, value(item.key, 5000))
                keys = [on.key(number) for number in range(12)]
                items = [on.filled(key, b"?" * 5000) for key in keys]
                again = on.filled(keys[0], b"?" * 5000)
                huge = on.filled(on.key("huge"), b"?" * 200_000)
                outcomes = await on.put([*items, again, huge])
                assert [outcome.status for outcome in outcomes] == ["done"] * 12 + ["exists", "full"]
                assert sorted(noted.put) == sorted(keys)
                assert await on.put([on.filled(key, b"?" * 5000) for key in keys]) == [EXISTS] * 12
                assert sorted(noted.put) == sorted(keys)
                for key in keys:
                    await on.assert_holds(key, value(key, 5000))
                assert threading.get_ident() not in noted.threads

        play(self)

    @on_loop
    async def test_what_came_is_looked_at_once_it_is_whole(self):
        store = self.store(max_nbytes=self.slots(20, 5000))
        noted = noted_of(store)
        async with self.on_store(store) as on:
            keys = [on.key(number) for number in range(8)]
            for key in keys:
                await on.keep(key, value(key, 5000))
            seen: dict[str, bytes] = {}

            def look(item: Item) -> str:
                seen[item.key] = on.read(item)
                return f"not liked: {item.key}" if item.key in keys[2:4] else ""

            noted.on_get = look
            items = [on.item(key, 5000) for key in (*keys, on.key("nowhere"))]
            wrong = on.item(keys[0], 4999)
            *outcomes, missed, other = await on.get([*items, wrong])
            assert [outcome.status for outcome in outcomes] == [*["done"] * 2, *["damaged"] * 2, *["done"] * 4]
            assert [outcomes[2].problem, outcomes[3].problem] == [f"not liked: {key}" for key in keys[2:4]]
            assert (missed, other.status) == (MISS, "damaged")
            # neither what is not there nor what does not fit
            assert sorted(noted.got) == sorted(keys)
            assert seen == {key: value(key, 5000) for key in keys}
            # the store goes by what it is told for this call only
            noted.on_get = lambda _: ""
            assert await on.get([on.item(keys[2], 5000)]) == [DONE]
            (path,) = await asyncio.to_thread(self.segments)
            await asyncio.to_thread(os.truncate, path, 4096)
            noted.got.clear()
            assert [outcome.status for outcome in await on.get([on.item(keys[5], 5000)])] == ["damaged"]
            assert noted.got == []

    @on_loop
    async def test_nothing_is_looked_at_after_the_end_of_a_cancelled_get(self):
        store = self.store(max_nbytes=self.slots(40, 5000), threads=2)
        noted = noted_of(store)
        async with self.on_store(store) as on:
            keys = [on.key(number) for number in range(30)]
            for key in keys:
                await on.keep(key, value(key, 5000))
            looking, go_on = threading.Event(), threading.Event()

            def look(_: Item) -> str:
                looking.set()
                assert go_on.wait(300)
                return ""

            noted.on_get = look
            get = asyncio.ensure_future(on.store.get_into([on.item(key, 5000) for key in keys]))
            try:
                await asyncio.to_thread(looking.wait, 300)
                get.cancel()
                await turns(5)
                assert not get.done()
            finally:
                go_on.set()
            await on.ended([get], "a cancelled get")
            assert get.cancelled()
            count = len(noted.got)
            assert count <= 4
            noted.on_get = lambda _: ""
            await on.assert_holds(keys[0], value(keys[0], 5000))
            assert len(noted.got) == count + 1
            on.store.check()


SCHEMA = BlockSchema(
    layout="pages", kv_dtype="uint8", block_tokens=4, zeros=Part(0, 0, PAGE_NBYTES), trash=Part(0, 4096, PAGE_NBYTES),
    sections=(Section("kv", "uint8", (5000,), 5000), Section("routing", "uint8", (8,), 8)),
)  # fmt: skip
_BLOCKS = 24
_STRIDE = 5 * PAGE_NBYTES
_RAW_AT = (2 + 5 * _BLOCKS) * PAGE_NBYTES


class OnLoop(FileStore):
    """The same store, which leaves hashing to the loop."""

    def beside(self, moves):
        del moves
        return False


class TestSealed(InFolder):
    """Block objects in files: the same is found wrong wherever it is hashed, and nothing is kept of it."""

    @pytest.fixture(autouse=True)
    def memory(self, folder):
        self.region = SharedRegion.create("checked", _RAW_AT + SCHEMA.object_nbytes)
        yield
        self.region.close()

    def item(self, number, block=None):
        at = (2 + 5 * (number if block is None else block)) * PAGE_NBYTES
        name = object_key(b"n" * 16, bytes([number]) * 16)
        parts = (Part(0, at, PAGE_NBYTES), Part(0, at + PAGE_NBYTES, 5000), Part(0, at + 4 * PAGE_NBYTES, 8))
        return Item(name, parts)

    def fill(self, item, byte):
        for part in item.parts:
            self.region.view(part.offset, part.nbytes)[:] = bytes([byte]) * part.nbytes

    def holds(self, item, byte):
        views = [self.region.view(part.offset, part.nbytes) for part in item.parts[1:]]
        return all(view == bytes([byte]) * len(view) for view in views)

    async def damage(self, store):
        """Of every sixth block a bit of the KV, of others one of the rows, one of the header, the key."""
        raw = Part(0, _RAW_AT, SCHEMA.object_nbytes)
        view = self.region.view(raw.offset, raw.nbytes)
        for number in range(_BLOCKS):
            key = self.item(number).key
            source = Item(key if number % 6 != 3 else self.item(number + 1).key, (raw,))
            assert await store.get_into([source]) == [DONE]
            if number % 6 < 3:
                view[(PAGE_NBYTES + 4321, 3 * PAGE_NBYTES + 5, 300)[number % 6]] ^= 16
            await store.delete([key])
            assert await store.put([Item(key, (raw,))]) == [DONE]
        view.release()

    @pytest.mark.parametrize("kind", [FileStore, OnLoop], ids=["beside", "on the loop"])
    @pytest.mark.parametrize("sync", ["none", "data"])
    def test_damage_is_told_alike(self, kind, sync):
        def store():
            return kind(self.store(sync=sync, segment_nbytes=1 << 20, max_nbytes=1 << 26).config)

        async def play():
            checked = CheckedStore(store(), SCHEMA)
            items = [self.item(number) for number in range(_BLOCKS)]
            await checked.open([self.region])
            for number, item in enumerate(items):
                self.fill(item, number + 1)
            assert await checked.put(items) == [DONE] * _BLOCKS
            await checked.aclose()
            plain = store()
            await plain.open([self.region])
            await self.damage(plain)
            await plain.aclose()
            checked = CheckedStore(store(), SCHEMA)
            await checked.open([self.region])
            for item in items:
                self.fill(item, 255)
            outcomes = await checked.get_into(items)
            reasons = [outcome.problem.partition(":")[0] for outcome in outcomes]
            assert reasons == ["checksum", "checksum", "header", "key", "", ""] * (_BLOCKS // 6)
            assert all(self.holds(item, number + 1) for number, item in enumerate(items) if not reasons[number])
            assert await checked.get_into([self.item(number) for number in (0, 3)]) == [MISS, MISS]
            self.fill(items[0], 77)
            assert await checked.put([items[0]]) == [DONE]
            assert await checked.get_into([self.item(0, 1)]) == [DONE]
            assert self.holds(self.item(0, 1), 77)
            await checked.aclose()

        on_loop(lambda _: play())(self)

    @pytest.mark.parametrize("kind", [FileStore, OnLoop], ids=["beside", "on the loop"])
    def test_blocks_with_a_state_lie_beside_those_without(self, kind):
        state = Part(0, _RAW_AT, 9000)
        schema = msgspec.structs.replace(SCHEMA, state=Section("state", "uint8", (9000,), 9000))

        async def play():
            checked = CheckedStore(kind(self.store(segment_nbytes=1 << 20, max_nbytes=1 << 26).config), schema)
            await checked.open([self.region])
            plain = self.item(0)
            bare = self.item(1)
            items = [plain, Item(bare.key, (*bare.parts, state))]
            for number, item in enumerate(items):
                self.fill(item, number + 1)
            assert await checked.put(items) == [DONE, DONE]
            for item in items:
                self.fill(item, 255)
            assert await checked.get_into(items) == [DONE, DONE]
            assert [self.holds(item, number + 1) for number, item in enumerate(items)] == [True, True]
            # a key has one form: who expects the other one finds damage, and nothing of it stays
            for item in (bare, Item(plain.key, (*plain.parts, state))):
                [outcome] = await checked.get_into([item])
                assert outcome.status == "damaged"
            assert await checked.get_into(items) == [MISS, MISS]
            await checked.aclose()

        on_loop(lambda _: play())(self)
