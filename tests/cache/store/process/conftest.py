"""Every test here finds the store that does odd things, as a plugin of its child."""

from __future__ import annotations

import os

import pytest

MODULE = '''
import asyncio, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import msgspec
from fdasync.cache.store.memory import MemoryStore
from fdasync.cache.store.base import Capabilities, Outcome, StoreUsage, finish
from fdasync.errors import StoreRejected, StoreUnavailable


if "ODD_IMPORT" in os.environ:
    raise SystemExit(os.environ["ODD_IMPORT"])


class OddConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_nbytes: int = 1 << 30
    open: str = ""
    close: str = ""
    max_batch: int = 256
    flip: int = -1


def frame(payload):
    """Written where the engine listens; nothing but a kill ends what comes then."""
    if not isinstance(payload, bytes):
        payload = msgspec.msgpack.encode(payload)
    os.write(int(sys.argv[1]), len(payload).to_bytes(4, "little") + bytes(1) + payload)
    time.sleep(600)


class OddStore(MemoryStore):
    """Does what the first key of a call says; a memory store for other keys."""

    config_type = OddConfig

    async def open(self, regions):
        await super().open(regions)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))
        self.capabilities = msgspec.structs.replace(self.capabilities, name="odd", max_batch=self.config.max_batch)
        regions[0].view(regions[0].nbytes - 7, 1)[:] = b"o"
        match os.environ.get("ODD_OPEN", self.config.open):
            case "reject": raise StoreRejected("odd", "wrong place", "another")
            case "unavailable": raise StoreUnavailable("odd", "not now")
            case "fail": raise OSError("no such disk")
            case "exit": os._exit(4)
            case "hang": time.sleep(600)
            case "wait": await asyncio.get_running_loop().create_future()
            case "garbage": frame(b"xyz")
            case "odd": frame(["answer", 9, 1])

    async def exists_prefix(self, keys):
        if not keys:
            return 0
        await self._play(keys[0], ())
        if keys[0] == "odd/many":
            return 1 << 40
        if keys[0] == "odd/negative":
            return -1
        if keys[0] == "odd/junk":
            return object()
        return await super().exists_prefix(keys)

    async def delete(self, keys):
        if keys[0] == "odd/text":
            return "several"
        if keys[0] == "odd/negative":
            return -1
        return await super().delete(keys)

    async def get_into(self, items):
        if not items:
            return []
        await self._play(items[0].key, items[0].parts)
        if items[0].key == "odd/few":
            return []
        return await super().get_into(items)

    async def put(self, items):
        if not items:
            return []
        await self._play(items[0].key, items[0].parts)
        outcomes = await super().put(items)
        if self.config.flip >= 0:
            value = bytearray(self._objects[items[0].key])
            value[self.config.flip] ^= 4
            self._objects[items[0].key] = bytes(value)
        return outcomes

    async def usage(self):
        return StoreUsage(objects=os.getpid(), nbytes=len(os.listdir("/proc/self/fd")))

    async def aclose(self):
        for region in self._regions:
            region.view(region.nbytes - 6)[:] = b"closed"
        await super().aclose()
        match self.config.close:
            case "hang": time.sleep(600)
            case "fail": raise RuntimeError("cannot let go")

    async def _play(self, key, parts):
        views = [self._regions[part.region].view(part.offset, part.nbytes) for part in parts]
        match key:
            case "odd/hang":
                views[0][:1] = b"h"
                time.sleep(600)
            case "odd/exit": os._exit(3)
            case "odd/raise": raise ZeroDivisionError("by zero")
            case "odd/reject": raise StoreRejected("own", "not ever", "leave it")
            case "odd/unavailable": raise StoreUnavailable("own", "not now")
            case "odd/cancelled": raise asyncio.CancelledError
            case "odd/garbage": frame(b"xyz")
            case "odd/utf8": frame(b"\\x94\\xa6failed\\x02\\xa1\\xff\\x80")
            case "odd/long": os.write(int(sys.argv[1]), b"\\xff" * 9); time.sleep(600)
            case "odd/stranger": frame(["answer", 99, 1])
            case "odd/again": frame(["answer", 1, Capabilities(name="x", durability="none")])
            case "odd/kind": frame(["answer", 2, StoreUsage()])
            case "odd/stopped": frame(["stopped", 2])
            case "odd/error": frame(["failed", 2, "SystemExit", {}])
            case "odd/fields": frame(["failed", 2, "StoreRejected", {"x": "y"}])
            case "odd/wait":
                views[0][:1] = b"w"
                await asyncio.get_running_loop().create_future()
            case "odd/tidy":
                views[0][:1] = b"w"
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.1)
                    views[0][:1] = b"t"
                    raise
            case "odd/stubborn" | "odd/scribble":
                await finish(asyncio.ensure_future(asyncio.to_thread(self._scribble, views, key == "odd/scribble")))

    def _scribble(self, views, for_ever):
        """Until somebody says go, at the end of the first region."""
        number = 0
        go = self._regions[0].view(self._regions[0].nbytes - 8, 1)
        while for_ever or go[0] == 0:
            number = number % 250 + 1
            for view in views:
                view[:] = bytes([number]) * len(view)
            time.sleep(0.0002)
'''


@pytest.fixture(autouse=True)
def odd_plugin(tmp_path, monkeypatch) -> None:
    """A distribution with a store that does what it should not, where the child looks for modules."""
    (tmp_path / "oddstore.py").write_text(MODULE)
    info = tmp_path / "fdasync_oddstore-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdasync-oddstore\nVersion: 1.0\n")
    points = "[fdasync.stores]\nodd = oddstore:OddStore\nmissing = oddstore:NoStore\nnone = oddstore:frame\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
