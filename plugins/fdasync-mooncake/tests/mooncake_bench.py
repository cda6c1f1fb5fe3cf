"""Shared by the tests of failures: a store in its process with one region, blocks to put, the loop's lateness."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from fdasync.cache.store import Item
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import Part, SharedRegion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fdasync_mooncake.testing import MasterProcess

    from fdasync.cache.store import Store

BLOCK_NBYTES = 1 << 20


class Blocks:
    """A region of so many blocks, each in a few parts; what a key's block holds is a function of the key."""

    def __init__(self, count: int) -> None:
        self.region = SharedRegion.create("blocks", count * BLOCK_NBYTES)

    def item(self, key: str, place: int) -> Item:
        start = place * BLOCK_NBYTES
        cuts = (start, start + 4096, start + 70_001, start + BLOCK_NBYTES)
        return Item(key, tuple(Part(0, one, other - one) for one, other in pairwise(cuts)))

    def filled(self, key: str, place: int) -> Item:
        self.region.view(place * BLOCK_NBYTES, BLOCK_NBYTES)[:] = block_of(key)
        return self.item(key, place)

    def blank(self, key: str, place: int) -> Item:
        self.region.view(place * BLOCK_NBYTES, BLOCK_NBYTES)[:] = bytes(BLOCK_NBYTES)
        return self.item(key, place)

    def holds(self, key: str, place: int) -> bool:
        return self.region.view(place * BLOCK_NBYTES, BLOCK_NBYTES) == block_of(key)


def block_of(key: str) -> bytes:
    return Random(key).randbytes(BLOCK_NBYTES)


@asynccontextmanager
async def store_process(master: MasterProcess, blocks: Blocks, **config: object) -> AsyncIterator[ProcessStore]:
    """A store in a process of its own, opened on the region of `blocks`.

    Its process is killed at the end: a client takes a second to leave, which the conformance suite waits for.
    """
    store = ProcessStore("mooncake", {"master": master.address, **config}, close_deadline_s=0.05)
    try:
        await store.open([blocks.region])
        yield store
    finally:
        await store.aclose()


async def put_one(store: Store, blocks: Blocks, key: str, place: int = 0) -> str:
    """The status of a put."""
    (outcome,) = await store.put([blocks.filled(key, place)])
    return outcome.status


async def get_one(store: Store, blocks: Blocks, key: str, place: int = 1) -> str:
    """The status of a get; a "done" with the wrong bytes counts as "wrong"."""
    (outcome,) = await store.get_into([blocks.blank(key, place)])
    return "wrong" if outcome.status == "done" and not blocks.holds(key, place) else outcome.status


async def until(what: str, seconds: float, wanted: object, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again, as a real service needs its time; AssertionError with the last answer at the deadline."""
    deadline = time.monotonic() + seconds
    while (last := await ask()) != wanted:
        assert time.monotonic() < deadline, f"{what}: still {last!r} after {seconds:g} s"
        await asyncio.sleep(0.05)


class Lateness:
    """The longest that a 1 ms timer of this loop came late while the block ran, in seconds."""

    async def __aenter__(self) -> Lateness:
        self.worst_s = 0.0
        self._task = asyncio.ensure_future(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.monotonic() - before - 0.001)
