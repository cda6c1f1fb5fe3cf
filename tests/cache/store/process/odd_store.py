"""A store that does odd things in its process, and what tests of the proxy open it with."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from fdasync.cache.store.base import DONE, EXISTS, Item
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import Part, SharedRegion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


PART_NBYTES = 10_000


def in_process(name: str = "odd", config: dict[str, Any] | None = None, **options: Any) -> ProcessStore:
    values = {"close_deadline_s": 300.0, "open_deadline_s": 300.0, "respawn_s": 0.0, **options}
    return ProcessStore(name, config or {}, **values)


class Bench:
    """An open store and a region of parts."""

    def __init__(self, store: ProcessStore) -> None:
        self.store = store
        self.region = SharedRegion.create("in_process", 64 * PART_NBYTES)

    def item(self, key: str, place: int = 0) -> Item:
        return Item(key, (Part(0, place * PART_NBYTES, PART_NBYTES),))

    def view(self, place: int = 0) -> memoryview:
        return self.region.view(place * PART_NBYTES, PART_NBYTES)

    def go(self) -> None:
        """Stubborn verbs may end."""
        self.region.view(self.region.nbytes - 8, 1)[:] = b"g"

    async def until(self, there: Callable[[], bool]) -> None:
        """The child shows by what it writes how far it is."""
        async with asyncio.timeout(300):
            while not there():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def works(self) -> None:
        self.view(60)[:] = b"p" * PART_NBYTES
        assert await self.store.put([self.item("plain", 60)]) in ([DONE], [EXISTS])
        assert await self.store.get_into([self.item("plain", 61)]) == [DONE]
        assert bytes(self.view(61)) == b"p" * PART_NBYTES


@contextlib.asynccontextmanager
async def opened(store: ProcessStore | None = None) -> AsyncIterator[Bench]:
    bench = Bench(store or in_process())
    try:
        await bench.store.open([bench.region])
        yield bench
    finally:
        await bench.store.aclose()
        bench.region.close()
