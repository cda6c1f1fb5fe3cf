"""The file store on disks that fail."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from fdasync.cache.store.file import io as file_io
from fdasync.cache.store.file.layout import EMPTY_RECORD, ORDER_NAME
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.guarded_memory import value
from tests.cache.store.file.in_folder import MIB, InFolder


class TestIoErrors(InFolder):
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
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
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
