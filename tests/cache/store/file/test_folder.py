"""The file store's folder: who may use it, and what becomes of it under a store's feet."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from fdasync.cache.store.file import recovery as file_scan
from fdasync.cache.store.file.layout import Shape, encode_record, parse_name
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.errors import ConfigError, StoreRejected, StoreUnavailable
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.guarded_memory import value
from tests.cache.store.file.in_folder import MIB, InFolder


class TestFolder(InFolder):
    """One engine per folder, and what else may lie there."""

    @on_loop
    async def test_one_live_engine_per_folder(self):
        async with self.on_store() as on:
            second = self.again(None)
            with pytest.raises(StoreRejected, match=f"in use by process {os.getpid()}.*close that engine"):
                await second.open(on.regions)
            await second.aclose()
            await on.keep(on.key("a"), b"a")
        async with self.on_store(self.again(None)) as on:
            assert (await on.store.usage()).objects == 1

    @pytest.mark.parametrize("own_process", [False, True])
    @pytest.mark.parametrize("path", ["", "a\0b", "a\ud800"])
    def test_a_path_that_names_no_folder_is_refused(self, path, own_process):
        here = self.path.with_name("here")
        here.mkdir()
        self.patch.chdir(here)

        @on_loop
        async def start(self):
            config = {"path": path}
            store = (
                ProcessStore("file", config, close_deadline_s=120.0) if own_process else FileStore(FileConfig(**config))
            )
            # a lone surrogate cannot even be sent
            with pytest.raises((StoreRejected, ConfigError), match=r"path|store_config") as found:
                await store.open([])
            assert isinstance(found.value, StoreRejected) or path == "a\ud800"
            if isinstance(found.value, StoreRejected):
                assert "name a folder" in found.value.hint
            await store.aclose()

        start(self)
        assert list(here.iterdir()) == []

    @on_loop
    async def test_a_start_leaves_alone_what_is_not_its_own(self):
        await asyncio.to_thread(self.path.mkdir)
        strange = {"notes.txt": b"mine", "4096-3-00000001.seg.bak": b"mine too", "0-0-0.seg": b"", "order.old": b""}
        for name, data in strange.items():
            await asyncio.to_thread((self.path / name).write_bytes, data)
        half = self.path / (Shape(4096, 1, 77).name + ".new")
        await asyncio.to_thread(half.write_bytes, b"half made")
        async with self.on_store(self.again(None)) as on:
            await on.keep(on.key("a"), b"a")
        assert {name: await asyncio.to_thread((self.path / name).read_bytes) for name in strange} == strange
        assert not await asyncio.to_thread(half.exists)

    @pytest.mark.parametrize("damage", ["record", "record of another slot", "head", "cut"])
    def test_what_is_damaged_is_empty(self, damage):
        keys = []

        @on_loop
        async def fill(self):
            async with self.on_store(self.store(max_nbytes=self.slots(4, 5000))) as on:
                for number in range(3):
                    keys.append(on.key(number))
                    await on.keep(keys[number], value(number, 5000))

        fill(self)
        (path,) = self.segments()
        shape = parse_name(path.name)
        data = bytearray(path.read_bytes())
        at = shape.record_at(1)
        if damage == "record":
            data[at + 100] ^= 1
        elif damage == "record of another slot":
            data[at : at + 512] = data[shape.record_at(0) : shape.record_at(0) + 512]
        elif damage == "head":
            data[20] ^= 1
        else:
            del data[shape.value_at(2) :]
        path.write_bytes(data)
        left = [0, 2] if damage.startswith("record") else []

        @on_loop
        async def look(self):
            async with self.on_store(self.store(max_nbytes=self.slots(4, 5000))) as on:
                assert on.store.damaged == 1
                assert [n for n in range(3) if await on.exists([keys[n]])] == left
                for number in left:
                    await on.assert_holds(keys[number], value(number, 5000))
                # and its room is used again
                for number in range(4):
                    assert (await on.keep(on.key(number), value(number, 5000))).status == "done"
                    await on.assert_holds(on.key(number), value(number, 5000))
                on.store.check()
                assert (await on.store.usage()).objects == 4

        look(self)

    @on_loop
    async def test_a_segment_that_is_cut_off_under_a_live_store_is_damage(self):
        async with self.on_store() as on:
            await on.keep(on.key("a"), value("a", 5000))
            (path,) = await asyncio.to_thread(self.segments)
            await asyncio.to_thread(os.truncate, path, 4096)
            assert await on.fetch(on.key("a"), 5000) == "damaged"

    @on_loop
    async def test_an_older_object_of_the_same_key_does_not_come_back(self):
        async with self.on_store(self.store(max_nbytes=self.slots(3, 5000))) as on:
            await on.keep(on.key("a"), value("old", 5000))
        (path,) = await asyncio.to_thread(self.segments)
        shape = parse_name(path.name)
        old = await asyncio.to_thread(path.read_bytes)
        async with self.on_store(self.store(max_nbytes=self.slots(3, 5000))) as again:
            await again.delete([on.key("a")])
            await again.keep(again.key("b"), value("b", 5000))
            await again.keep(on.key("a"), value("new", 5000))
            slots = {entry.key: entry.slot for entry in again.store._index.entries()}
        # as if the old one had never been cleared: what was put later counts, in this start and in the next
        free = ({0, 1, 2} - set(slots.values())).pop()
        record = file_scan.decode_record(old[shape.record_at(0) : shape.record_at(0) + 512], shape, 0)
        forged = encode_record(record, shape, free)

        def forge():
            with path.open("r+b") as file:
                file.seek(shape.record_at(free))
                file.write(forged)

        await asyncio.to_thread(forge)
        async with self.on_store(self.store(max_nbytes=self.slots(3, 5000))) as last:
            await last.assert_holds(on.key("a"), value("new", 5000))
            await last.delete([on.key("a")])
        async with self.on_store(self.store(max_nbytes=self.slots(3, 5000))) as last:
            assert await last.fetch(on.key("a"), 5000) == "miss"

    @on_loop
    async def test_after_loss_of_power_only_what_was_settled_is_believed(self):
        cap = {"max_nbytes": 64 * MIB, "segment_nbytes": 100_000}
        async with self.on_store(self.store(**cap)) as on:
            await on.keep(on.key("settled"), value("settled", 5000))
        copy = self.path.with_name("copy")
        async with self.on_store(self.store(**cap)) as on2:
            await on2.keep(on2.key("large"), value("large", 60_000))
            await asyncio.to_thread(shutil.copytree, self.path, copy)
        self.patch.setattr("fdasync.cache.store.file.store.boot_id", lambda: b"another boot...!")
        async with self.on_store(self.store(path=str(copy), **cap)) as later:
            await later.assert_holds(on.key("settled"), value("settled", 5000))
            assert await later.fetch(on2.key("large"), 60_000) == "miss"
            assert later.store.damaged == 1
            await later.keep(on2.key("large"), value("larger", 60_000))
            await later.assert_holds(on2.key("large"), value("larger", 60_000))
        async with self.on_store(self.store(**cap)) as later:
            await later.assert_holds(on2.key("large"), value("large", 60_000))


class TestRemoved(InFolder):
    """Its folder is removed while it is open."""

    async def until_open(self, on):
        async with asyncio.timeout(300):
            while True:
                try:
                    return await on.store.usage()
                except StoreUnavailable as error:
                    words = str(error)
                    if "cannot be made again" in words:
                        return words
                await asyncio.sleep(0.001)

    @on_loop
    async def test_it_is_made_again_empty(self):
        async with self.on_store(self.again(None)) as on:
            for name in "ab":
                await on.keep(on.key(name), value(name, 100_000))
            fds = len(await asyncio.to_thread(os.listdir, "/proc/self/fd"))
            await asyncio.to_thread(shutil.rmtree, self.path)
            with pytest.raises(StoreUnavailable, match="was removed while it was open; it is made again"):
                await on.store.exists_prefix([on.key("a")])
            await self.until_open(on)
            assert await on.exists([on.key("a")]) == 0
            assert (await on.keep(on.key("a"), value("c", 100_000))).status == "done"
            await on.assert_holds(on.key("a"), value("c", 100_000))
            assert len(await asyncio.to_thread(os.listdir, "/proc/self/fd")) == fds
            assert len(await asyncio.to_thread(self.segments)) == 1

    @on_loop
    async def test_what_stands_in_its_place_is_told_until_it_is_gone(self):
        async with self.on_store(self.again(None)) as on:
            await asyncio.to_thread(shutil.rmtree, self.path)
            await asyncio.to_thread(self.path.write_text, "in its place")
            assert "cannot be made again" in await self.until_open(on)
            await asyncio.to_thread(self.path.unlink)
            async with asyncio.timeout(300):
                while isinstance(await self.until_open(on), str):  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.001)
            assert await on.exists([on.key("a")]) == 0
