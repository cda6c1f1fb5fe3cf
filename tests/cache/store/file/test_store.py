"""The file store: the conformance suite, in this process and in one of its own, and what is its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading

import pytest

from fdasync.cache.store.file.layout import EMPTY_RECORD, ORDER_NAME, parse_name
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.testing import StoreTests
from fdasync.testing.harness.bounded import on_loop, turns
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.stores.machine import run_machine
from tests.cache.store.file.in_folder import MIB, InFolder


class TestFile(InFolder, StoreTests):
    pass


@pytest.mark.ci
class TestFileSynced(InFolder, StoreTests):
    sync = "data"
    examples = 5


@pytest.mark.heavy("a model of the file store against the store")
class TestFileTiny(InFolder):
    """Room for a few dozen small objects: slots are reused, and segments of one size dropped for another."""

    may_forget = True
    examples = 40

    def again(self, closed):
        return self.store(max_nbytes=200_000, segment_nbytes=40_000)

    def test_against_the_model(self):
        run_machine(self)


@pytest.mark.nightly
class TestFileInProcess(InFolder, StoreTests):
    examples = 1
    steps = 8

    def store(self, **config):
        config = {"path": str(self.path), **config}
        return ProcessStore("file", config, close_deadline_s=120.0, respawn_s=0.05)


class TestRoom(InFolder):
    """The cap, and who goes when it is reached."""

    @on_loop
    async def test_what_was_used_longest_ago_goes_first_and_the_order_outlives_a_close(self):
        cap = self.slots(3, 5000)
        async with self.on_store(self.store(max_nbytes=cap)) as on:
            keys = [on.key(number) for number in range(6)]
            for key in keys[:3]:
                await on.keep(key, value(key, 5000))
            await on.assert_holds(keys[0], value(keys[0], 5000))
            assert (await on.keep(keys[1], b"other")).status == "exists"
        async with self.on_store(self.store(max_nbytes=cap)) as on:
            for key, left in ((keys[3], [0, 1, 3]), (keys[4], [1, 3, 4])):
                await on.keep(key, value(key, 5000))
                assert [n for n in range(6) if await on.exists([keys[n]])] == left
            for key in (keys[1], keys[3], keys[4]):
                await on.assert_holds(key, value(key, 5000))
            on.store.check()

    @on_loop
    async def test_after_a_crash_what_the_order_does_not_know_is_newest(self):
        cap = self.slots(4, 5000)
        copy = self.path.with_name("copy")
        async with self.on_store(self.store(max_nbytes=cap)) as on:
            keys = [on.key(number) for number in range(6)]
            for key in keys[:2]:
                await on.keep(key, value(key, 5000))
            await on.assert_holds(keys[0], value(keys[0], 5000))
        self.patch.setattr("fdasync.cache.store.file.store._ORDER_EVERY_S", 1000.0)
        async with self.on_store(self.store(max_nbytes=cap)) as on:
            for key in keys[2:4]:
                await on.keep(key, value(key, 5000))
            await asyncio.to_thread(shutil.copytree, self.path, copy)
            await on.store.aclose()
        async with self.on_store(self.store(path=str(copy), max_nbytes=cap)) as on:
            await on.keep(keys[4], value(keys[4], 5000))
            await on.keep(keys[5], value(keys[5], 5000))
            assert [n for n in range(6) if await on.exists([keys[n]])] == [2, 3, 4, 5]

    @on_loop
    async def test_the_order_is_written_now_and_then(self):
        self.patch.setattr("fdasync.cache.store.file.store._ORDER_EVERY_S", 0.0)
        async with self.on_store() as on:
            for number in range(3):
                await on.keep(on.key(number), b"x")
            while not (await asyncio.to_thread((self.path / ORDER_NAME).exists)):
                await on.keep(on.key("more"), b"x")

    @on_loop
    async def test_a_lower_cap_is_enforced_at_the_start(self):
        async with self.on_store(self.store(max_nbytes=64 * MIB, segment_nbytes=MIB)) as on:
            keys = [on.key(number) for number in range(8)]
            for key in keys:
                await on.keep(key, value(key, 900_000))
            await on.assert_holds(keys[0], value(keys[0], 900_000))
        async with self.on_store(self.store(max_nbytes=3 * MIB, segment_nbytes=MIB)) as on:
            assert await asyncio.to_thread(self.disk_nbytes) <= 3 * MIB
            assert [n for n in range(8) if await on.exists([keys[n]])] == [0, 6, 7]
            await on.assert_holds(keys[0], value(keys[0], 900_000))

    @on_loop
    async def test_an_object_larger_than_the_cap_is_told_both_numbers(self):
        async with self.on_store(self.store(max_nbytes=100_000)) as on:
            await on.keep(on.key("small"), b"small")
            outcome = await on.keep(on.key("large"), value("large", 99_000))
            assert outcome.status == "full"
            assert "110592" in outcome.problem
            assert "100000" in outcome.problem
            await on.assert_holds(on.key("small"), b"small")

    @on_loop
    async def test_sizes_take_turns_within_the_cap(self):
        async with self.on_store(self.store(max_nbytes=MIB, segment_nbytes=MIB // 4)) as on:
            for nbytes in (100, 60_000, 8000, 200_000, 3000, 120_000):
                for number in range(6):
                    key = on.key(f"{nbytes}/{number}")
                    assert (await on.keep(key, value(key, nbytes))).status == "done"
                    await on.assert_holds(key, value(key, nbytes))
                    on.store.check()
                    assert await asyncio.to_thread(self.disk_nbytes) <= MIB
                on.free()

    @on_loop
    async def test_an_object_larger_than_a_segment_has_one_of_its_own(self):
        async with self.on_store(self.store(max_nbytes=64 * MIB, segment_nbytes=100_000)) as on:
            await on.keep(on.key("large"), value("large", 5 * MIB))
            await on.assert_holds(on.key("large"), value("large", 5 * MIB))
            assert [parse_name(path.name).slots for path in await asyncio.to_thread(self.segments)] == [1]

    @on_loop
    async def test_a_batch_larger_than_the_cap_is_as_good_as_singles(self):
        async with self.on_store(self.store(max_nbytes=self.slots(4, 5000))) as on:
            items = [on.filled(on.key(number), value(number, 5000)) for number in range(10)]
            assert {outcome.status for outcome in await on.put(items)} == {"done"}
            assert [n for n in range(10) if await on.exists([on.key(n)])] == [6, 7, 8, 9]
            on.store.check()

    @on_loop
    async def test_what_is_being_read_is_not_evicted(self):
        reading, go_on = threading.Event(), threading.Event()
        true_preadv = os.preadv

        def slow(fd, views, offset, *flags):
            reading.set()
            assert go_on.wait(300)
            return true_preadv(fd, views, offset, *flags)

        async with self.on_store(self.store(max_nbytes=self.slots(1, 5000))) as on:
            key = on.key("read")
            await on.keep(key, value("read", 5000))
            self.patch.setattr(os, "preadv", slow)
            item = on.item(key, 5000)
            get = asyncio.ensure_future(on.get([item]))
            await asyncio.to_thread(reading.wait, 300)
            try:
                outcome = await on.keep(on.key("new"), value("new", 5000))
                assert outcome.status == "full"
                # forgotten at once, and its slot still nobody else's
                assert await on.delete([key]) == 1
                assert (await on.keep(on.key("new"), value("new", 5000))).status == "full"
            finally:
                go_on.set()
            assert [outcome.status for outcome in await get] == ["done"]
            assert on.read(item) == value("read", 5000)
            assert (await on.keep(on.key("new"), value("new", 5000))).status == "done"
            on.store.check()


class TestKeys(InFolder):
    """Nothing is done with a key while something of it is left on the disk: a crash could bring it back."""

    async def hold(self, on, start):
        """Start this, and hold it where it would clear a record: a task, and what lets it go on."""
        holding, go_on = threading.Event(), threading.Event()
        true_pwritev, true_unlink = os.pwritev, os.unlink

        def wait():
            if not holding.is_set():
                holding.set()
                assert go_on.wait(300)

        def pwritev(fd, views, offset):
            if bytes(views[0]) == EMPTY_RECORD:
                wait()
            return true_pwritev(fd, views, offset)

        def unlink(path, **options):
            wait()
            return true_unlink(path, **options)

        self.patch.setattr(os, "pwritev", pwritev)
        self.patch.setattr(os, "unlink", unlink)
        task = asyncio.ensure_future(start)
        await asyncio.to_thread(holding.wait, 300)
        return task, go_on

    @pytest.mark.parametrize("how", ["evicted", "deleted", "dropped with its segment"])
    def test_a_key_that_is_still_on_the_disk(self, how):
        @on_loop
        async def play(self):
            async with self.on_store(self.store(max_nbytes=self.slots(2, 5000), segment_nbytes=MIB)) as on:
                for name in "ab":
                    await on.keep(on.key(name), value(name, 5000))
                start = {
                    "evicted": lambda: on.keep(on.key("c"), value("c", 5000)),
                    "deleted": lambda: on.store.delete([on.key("a")]),
                    "dropped with its segment": lambda: on.keep(on.key("c"), value("c", 9000)),
                }[how]()
                task, go_on = await self.hold(on, start)
                try:
                    assert await on.fetch(on.key("a"), 5000) == "miss"
                    put = asyncio.ensure_future(on.keep(on.key("a"), value("new", 5000)))
                    delete = asyncio.ensure_future(on.store.delete([on.key("a")]))
                    done, _ = await asyncio.wait([put, delete], timeout=0.1)
                    assert not done, "what a crash would undo was told done"
                finally:
                    go_on.set()
                await on.ended([task, put, delete], "what was held")
                # the room may be taken by what the segment was dropped for
                assert put.result().status == "done" or how == "dropped with its segment"
                on.store.check()

        play(self)

    @on_loop
    async def test_what_was_evicted_for_a_put_that_did_nothing_is_still_there(self):
        async with self.on_store(self.store(max_nbytes=self.slots(2, 5000), threads=1)) as on:
            for name in "ab":
                await on.keep(on.key(name), value(name, 5000))
            # both are evicted; the caller goes away while the record of the first is cleared
            items = [on.filled(on.key(name), value(name, 5000)) for name in "cd"]
            task, go_on = await self.hold(on, on.store.put(items))
            task.cancel()
            await turns(3)
            go_on.set()
            await on.ended([task], "a cancelled put")
            assert task.cancelled()
            assert [await on.exists([on.key(name)]) for name in "abcd"] in ([0, 1, 1, 0], [1, 0, 0, 1])
            for name in "abcd":
                if await on.exists([on.key(name)]):
                    await on.assert_holds(on.key(name), value(name, 5000))
            on.store.check()
