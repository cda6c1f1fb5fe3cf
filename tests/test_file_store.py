"""The file store: the conformance suite, in this process and hosted, and what is its own."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from fdasync.cache.store.file import io as file_io
from fdasync.cache.store.file import recovery as file_scan
from fdasync.cache.store.file.layout import EMPTY_RECORD, ORDER_NAME, Shape, parse_name
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.cache.store.process.proxy import HostedStore
from fdasync.errors import ConfigError, StoreRejected, StoreUnavailable
from fdasync.testing import StoreTests
from fdasync.testing.stores.harness import StoreHooks, on_loop, turns, value
from fdasync.testing.stores.machine import run_machine

MIB = 1 << 20


class InFolder(StoreHooks):
    """Stores in a folder of the test."""

    sync = "none"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        self.patch = monkeypatch
        self.path = tmp_path / "store"
        self.file = tmp_path / "file"
        self.file.write_text("not a folder")

    def store(self, **config):
        return FileStore(FileConfig(**{"path": str(self.path), "sync": self.sync, **config}))

    def make(self):
        # a new place each time: runs of the state machine do not share one
        self.path = self.path.with_name(self.path.name + "x")
        return self.again(None)

    def again(self, closed):
        return self.store(max_nbytes=256 * MIB, segment_nbytes=MIB)

    def make_capped(self, max_nbytes):
        return self.store(max_nbytes=max_nbytes)

    def make_broken(self):
        return self.store(path=str(self.file))

    def slots(self, count, nbytes):
        """A cap for exactly so many objects of a size."""
        return Shape(-(-nbytes // 4096) * 4096, count, 1).nbytes

    def segments(self):
        return sorted(path for path in self.path.iterdir() if parse_name(path.name))

    def disk_nbytes(self):
        return sum(path.stat().st_size for path in self.segments())


class TestFile(InFolder, StoreTests):
    pass


class TestFileSynced(InFolder, StoreTests):
    sync = "data"
    examples = 5


class TestFileTiny(InFolder):
    """Room for a few dozen small objects: slots are reused, and segments of one size dropped for another."""

    may_forget = True
    examples = 40

    def again(self, closed):
        return self.store(max_nbytes=200_000, segment_nbytes=40_000)

    def test_against_the_model(self):
        run_machine(self)


class TestFileHosted(InFolder, StoreTests):
    examples = 1
    steps = 8

    def store(self, **config):
        config = {"path": str(self.path), **config}
        return HostedStore("file", config, close_deadline_s=10.0, respawn_s=0.05)


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
            assert go_on.wait(20)
            return true_preadv(fd, views, offset, *flags)

        async with self.on_store(self.store(max_nbytes=self.slots(1, 5000))) as on:
            key = on.key("read")
            await on.keep(key, value("read", 5000))
            self.patch.setattr(os, "preadv", slow)
            item = on.item(key, 5000)
            get = asyncio.ensure_future(on.get([item]))
            await asyncio.to_thread(reading.wait, 20)
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
                assert go_on.wait(20)

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
        await asyncio.to_thread(holding.wait, 20)
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

    @pytest.mark.parametrize("hosted", [False, True])
    @pytest.mark.parametrize("path", ["", "a\0b", "a\ud800"])
    def test_a_path_that_names_no_folder_is_refused(self, path, hosted):
        here = self.path.with_name("here")
        here.mkdir()
        self.patch.chdir(here)

        @on_loop
        async def start(self):
            config = {"path": path}
            store = HostedStore("file", config, close_deadline_s=10.0) if hosted else FileStore(FileConfig(**config))
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
        forged = file_io.encode_record(record, shape, free)

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
        async with asyncio.timeout(10.0):
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
            async with asyncio.timeout(10.0):
                while isinstance(await self.until_open(on), str):  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.001)
            assert await on.exists([on.key("a")]) == 0


class TestTrouble(InFolder):
    """A disk that is full, read-only or broken."""

    @pytest.fixture
    def mount(self, tmp_path):
        """A small file system of its own, where that is allowed."""
        place = tmp_path / "mount"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "fdasync-test", str(place)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip("only root can mount a file system to fill")
        yield place
        subprocess.run(["umount", str(place)], check=True)

    def test_a_full_disk(self, mount):
        @on_loop
        async def fill(self):
            async with self.on_store(self.store(path=str(mount), max_nbytes=64 * MIB, segment_nbytes=MIB // 2)) as on:
                for number in range(40):
                    outcome = await on.keep(on.key(number), value(number, 100_000))
                    assert outcome.status == "done", outcome
                    await on.assert_holds(on.key(number), value(number, 100_000))
                    on.free()
                there = [n for n in range(40) if await on.exists([on.key(n)])]
                assert there == list(range(40 - len(there), 40))
                assert len(there) >= 8
                # other sizes too: what was used longest ago makes room on the disk
                assert (await on.keep(on.key("other"), value("other", 30_000))).status == "done"
                # what could never fit costs nothing
                before = await on.store.usage()
                outcome = await on.keep(on.key("huge"), value("huge", 3 * MIB))
                assert await on.store.usage() == before
                assert outcome.status == "full"
                assert "No space left" in outcome.problem
                await on.assert_holds(on.key("other"), value("other", 30_000))
                on.store.check()

        fill(self)

    def test_a_read_only_folder(self, mount):
        @on_loop
        async def fill(self):
            async with self.on_store(self.store(path=str(mount), max_nbytes=MIB)) as on:
                await on.keep(on.key("a"), b"a")

        @on_loop
        async def refuse(self):
            for store in (self.store(path=str(mount)), self.store(path=str(mount / "deeper" / "still"))):
                with pytest.raises(StoreRejected, match=r"Read-only file system.*may write to"):
                    await store.open([])
                await store.aclose()

        fill(self)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        refuse(self)

    def test_a_folder_without_permission(self):
        script = """
            import asyncio, os, sys
            from fdasync.cache.store.file.store import FileConfig, FileStore

            async def main():
                store = FileStore(FileConfig(path=sys.argv[1]))
                try:
                    await store.open([])
                except Exception as error:
                    print(type(error).__name__, error)
                await store.aclose()

            if not os.geteuid():
                os.setegid(65534)
                os.seteuid(65534)
            asyncio.run(main())
        """
        # not in pytest's folder, which nobody else may look into
        with tempfile.TemporaryDirectory() as place:
            locked = Path(place, "locked")
            locked.mkdir()
            locked.chmod(0o555)
            Path(place).chmod(0o755)
            command = [sys.executable, "-c", textwrap.dedent(script), str(locked / "store")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.startswith("StoreRejected")
        assert "Permission denied" in done.stdout

    @on_loop
    async def test_a_path_that_is_a_file(self):
        store = self.make_broken()
        with pytest.raises(StoreRejected, match=r"file: (File exists|Not a directory).*name a folder"):
            await store.open([])
        await store.aclose()

    @on_loop
    async def test_a_disk_that_is_full_for_growing(self):
        def full(fd, offset, nbytes):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        async with self.on_store() as on:
            true_fallocate = os.posix_fallocate
            self.patch.setattr(os, "posix_fallocate", full)
            outcome = await on.keep(on.key("a"), b"a")
            assert outcome.status == "full"
            needed = rf"Disk quota exceeded: a new file takes \d+ bytes and \d+ are free in {self.path}; make room"
            assert re.match(needed, outcome.problem)
            assert not await asyncio.to_thread(self.segments)
            self.patch.setattr(os, "posix_fallocate", true_fallocate)
            self.patch.setattr(on.store._room, "_full_until", 0.0)
            assert (await on.keep(on.key("a"), b"a")).status == "done"
            # and its size alone is stuck when the disk is full again: objects of that size make room for each other
            self.patch.setattr(os, "posix_fallocate", full)
            for number in range(500):
                assert (await on.keep(on.key(number), b"b")).status == "done"
            on.store.check()

    @pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
    @pytest.mark.parametrize("sync", ["none", "data"])
    @pytest.mark.parametrize("when", ["clear", "value", "record"])
    def test_a_write_that_fails(self, code, sync, when):
        self.sync = sync
        true_pwritev = os.pwritev

        def broken(fd, views, offset):
            nbytes = sum(len(view) for view in views)
            kind = "value" if nbytes != 512 else "clear" if bytes(views[0]) == EMPTY_RECORD else "record"
            if kind == when:
                raise OSError(code, os.strerror(code))
            return true_pwritev(fd, views, offset)

        @on_loop
        async def play(self):
            async with self.on_store(self.store(max_nbytes=self.slots(2, 5000))) as on:
                for name in "ab":
                    await on.keep(on.key(name), value(name, 5000))
                self.patch.setattr(os, "pwritev", broken)
                for name in "cd":
                    outcome = await on.keep(on.key(name), value(name, 5000))
                    expected = ("full", False) if code == errno.ENOSPC else ("failed", True)
                    assert (outcome.status, outcome.transient) == expected
                    assert outcome.problem == os.strerror(code)
                # an eviction was begun for it: the other one is there and can be read
                await on.assert_holds(on.key("b"), value("b", 5000))
                if when == "clear":
                    with pytest.raises(StoreUnavailable, match="not deleted"):
                        await on.store.delete([on.key("b")])
                    await on.assert_holds(on.key("b"), value("b", 5000))
                on.store.check()
                self.patch.setattr(os, "pwritev", true_pwritev)
                for name in "cd":
                    assert (await on.keep(on.key(name), value(name, 5000))).status == "done"
                    await on.assert_holds(on.key(name), value(name, 5000))
                on.store.check()

        play(self)

    @on_loop
    async def test_a_read_that_fails(self):
        def broken(fd, views, offset, *flags):
            raise OSError(errno.EIO, "Input/output error")

        async with self.on_store() as on:
            await on.keep(on.key("a"), b"a")
            with self.patch.context() as patch:
                patch.setattr(os, "preadv", broken)
                (outcome,) = await on.get([on.item(on.key("a"), 1)])
            assert (outcome.status, outcome.problem, outcome.transient) == ("failed", "Input/output error", True)
            await on.assert_holds(on.key("a"), b"a")

    @on_loop
    async def test_short_reads_and_writes_go_on(self):
        true_pwritev, true_preadv = os.pwritev, os.preadv

        def shorter(call, fd, views, offset, *flags):
            some = views[: 1 + offset % 3]
            return call(fd, [*some[:-1], some[-1][: max(1, len(some[-1]) // 2)]], offset, *flags)

        async with self.on_store() as on:
            self.patch.setattr(os, "pwritev", lambda *arguments: shorter(true_pwritev, *arguments))
            self.patch.setattr(os, "preadv", lambda *arguments: shorter(true_preadv, *arguments))
            self.patch.setattr(file_io, "_IOV_MAX", 4)
            for pieces in (1, 5, 30):
                data = value(pieces, 70_001)
                assert (await on.keep(on.key(pieces), data, pieces)).status == "done"
                await on.assert_holds(on.key(pieces), data, pieces)

    @on_loop
    async def test_a_start_that_fails_can_be_repeated(self):
        async with self.on_store() as on:
            await on.keep(on.key("a"), b"a")
        order = await asyncio.to_thread((self.path / ORDER_NAME).read_bytes)

        def broken(*arguments):
            raise OSError(errno.EIO, "Input/output error")

        with self.patch.context() as patch:
            patch.setattr("fdasync.cache.store.file.recovery.list_folder", broken)
            store = self.again(None)
            with pytest.raises(StoreUnavailable, match="Input/output error"):
                await store.open(on.regions)
            await store.aclose()
        assert await asyncio.to_thread((self.path / ORDER_NAME).read_bytes) == order
        async with self.on_store(self.again(None)) as again:
            await again.assert_holds(on.key("a"), b"a")

    @on_loop
    async def test_a_segment_that_cannot_be_read_at_the_start(self):
        async with self.on_store() as on:
            await on.keep(on.key("a"), b"a")
        true_pread = os.pread

        def broken(fd, nbytes, offset):
            if nbytes > 512:
                raise OSError(errno.EIO, "Input/output error")
            return true_pread(fd, nbytes, offset)

        with self.patch.context() as patch:
            patch.setattr(os, "pread", broken)
            async with self.on_store(self.again(None)) as again:
                assert await again.fetch(on.key("a"), 1) == "miss"
                assert (await again.keep(on.key("a"), b"a")).status == "done"
                assert again.store.damaged == 1

    @on_loop
    async def test_a_segment_that_cannot_be_removed(self):
        async with self.on_store(self.store(max_nbytes=self.slots(3, 5000))) as on:
            await on.keep(on.key("a"), value("a", 5000))

            def refuse(path, missing_ok=False):
                raise OSError(errno.EROFS, "Read-only file system")

            with self.patch.context() as patch:
                patch.setattr("pathlib.Path.unlink", refuse)
                outcome = await on.keep(on.key("b"), value("b", 9000))
                assert (outcome.status, outcome.problem) == ("failed", "Read-only file system")
            assert (await on.keep(on.key("b"), value("b", 9000))).status == "done"
            on.store.check()
