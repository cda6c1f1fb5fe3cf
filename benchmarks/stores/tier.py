"""The file store inside the engine's own guard and memory, which moves blocks as an engine does; without an engine.

`guarded_store` puts the store into a process of its own, checks and guards it; a `StoreIO` calls it, and an `EventBus`
gets its events. Only the scheduler is missing: the caller chooses the blocks to move. Used by `stores.py`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync import EngineConfig
from fdasync.cache.aux import AuxSpec
from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.engine.store_io import StoreIO
from fdasync.engine.store_stack import guarded_store
from fdasync.events.actions import FetchBlocks, StoreBlocks
from fdasync.events.bus import EventBus
from fdasync.events.catalog import FetchEnded, StoreEnded
from fdasync.ipc.deadlines import Closing
from fdasync.ipc.shared_memory import AUX_REGION, HOST_REGION, page_aligned
from fdasync.runner.base import Capacity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.file.store import FileConfig
    from fdasync.ipc.shared_memory import Part

BLOCK_TOKENS = 16
ROUTING = AuxSpec("routing", (48, 8), "uint8")
# long: a slow machine is measured, not cut off
_DEADLINE_S = 120.0
_NAMESPACE = b"benchmarks.store"
# generation of every slot
_USE = 1
_EDGE_NBYTES = 64


class Blocks:
    """The memory of a number of blocks, all pages touched, random bytes: KV in a host arena, and rows in an aux arena,
    as an engine has them that captures routing (48 layers x top-8, uint8)."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self.host = HostArena.create(count, nbytes)
        self.arena = AuxArena.create(count, BLOCK_TOKENS, (ROUTING,))
        random = np.random.default_rng(7)
        self.host.region.view()[:] = bytes(self.host.region.nbytes)
        for block in self.host.kv:
            block[:] = np.frombuffer(random.bytes(nbytes), np.uint8)
        for slot in range(count):
            self.arena.adopt(slot, _USE)
        for values in self.arena.rows.values():
            values[:] = random.integers(0, 128, values.shape, np.uint8)
        self._edges = [edge.copy() for edge in self._look()]

    @property
    def regions(self) -> list[Any]:
        """The regions that a store is opened with."""
        return [self.host.region, self.arena.region]

    @property
    def moved_nbytes(self) -> int:
        """KV and rows of all blocks."""
        return self.count * (self.nbytes + BLOCK_TOKENS * ROUTING.token_nbytes)

    def sections(self, number: int) -> list[Part]:
        """KV and rows of a block."""
        return [self.host.payload(number, HOST_REGION), *self.arena.parts(number, AUX_REGION)]

    def object_parts(self, number: int, padding: Part) -> list[Part]:
        """The whole object as it lies in a store: header page, sections, and padding from (or to) a page."""
        parts = [self.host.header(number, HOST_REGION)]
        for part in self.sections(number):
            parts.append(part)
            rest = page_aligned(part.nbytes) - part.nbytes
            if rest:
                parts.append(type(part)(padding.region, padding.offset, rest))
        return parts

    def spoil(self) -> None:
        """Change first and last bytes of everything, so that a read that brings nothing is seen."""
        for edge in self._look():
            edge ^= 0xFF

    def check(self) -> None:
        """Raise RuntimeError unless first and last bytes are those of the start."""
        if not all(np.array_equal(now, then) for now, then in zip(self._look(), self._edges, strict=True)):
            raise RuntimeError("a read did not bring back what was written")

    def close(self) -> None:
        self.host.close()
        self.arena.close()

    def _look(self) -> list[Any]:
        kv = self.host.kv
        rows = self.arena.rows[ROUTING.name].reshape(self.count, BLOCK_TOKENS, -1)
        return [kv[:, :_EDGE_NBYTES], kv[:, -_EDGE_NBYTES:], rows[:, 0, :_EDGE_NBYTES], rows[:, -1, -_EDGE_NBYTES:]]


class Tier:
    """`async with` opens and closes it. Blocks have a name for each round: an object is written once.

    Args:
        config: of the store.
        blocks: the blocks to move; owned by the caller.
    """

    def __init__(self, config: FileConfig, blocks: Blocks) -> None:
        self._blocks = blocks
        engine = EngineConfig(
            runner="synthetic",
            host_blocks=blocks.count,
            store="file",
            store_config={"path": config.path, "max_nbytes": config.max_nbytes},
            store_deadline_s=_DEADLINE_S,
            close_deadline_s=30.0,
        )
        capacity = Capacity(
            model="benchmark",
            fingerprint="",
            weights_id="",
            vocab_size=2,
            eos_ids=(0,),
            max_context_tokens=BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=blocks.count,
            block_nbytes=blocks.nbytes,
            kv_layout="benchmark",
            kv_dtype="uint8",
            aux_specs=(ROUTING,),
        )
        self._bus = EventBus(time.monotonic)
        self._bus.attach(self._wake)
        closing = Closing(_DEADLINE_S)
        self.store = guarded_store(engine, capacity, blocks.host, None, closing, self._bus.publish)
        self._store_io: StoreIO
        self._ended: dict[int, asyncio.Future[StoreEnded | FetchEnded]] = {}
        self._number = 0

    async def __aenter__(self) -> Tier:
        await self.store.open(self._blocks.regions)
        host, arena = self._blocks.host, self._blocks.arena
        self._store_io = StoreIO(self._bus, self.store, host, arena, on_error=self._on_error)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._store_io.aclose()
        await self.store.aclose()

    async def write(self, round_: int, numbers: Sequence[int]) -> None:
        """Write blocks, until the store has them. Raises RuntimeError if it does not take all."""
        number, ended = self._begin()
        self._store_io.write(StoreBlocks(number, _NAMESPACE, *_places(round_, numbers)))
        event = await ended
        assert isinstance(event, StoreEnded)
        if not all(event.stored):
            raise RuntimeError(f"the store took {sum(event.stored)} of {len(numbers)} blocks")

    async def read(self, round_: int, numbers: Sequence[int]) -> None:
        """Read blocks, until they are here and checked. Raises RuntimeError if one is not."""
        number, ended = self._begin()
        deadline = asyncio.get_running_loop().time() + _DEADLINE_S
        self._store_io.fetch(FetchBlocks(number, _NAMESPACE, *_places(round_, numbers), deadline))
        event = await ended
        assert isinstance(event, FetchEnded)
        if not all(event.arrived):
            raise RuntimeError(f"the store gave back {sum(event.arrived)} of {len(numbers)} blocks")

    def _begin(self) -> tuple[int, asyncio.Future[StoreEnded | FetchEnded]]:
        self._number += 1
        ended = self._ended[self._number] = asyncio.get_running_loop().create_future()
        return self._number, ended

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        for event in self._bus.drain():
            if isinstance(event, StoreEnded):
                self._ended.pop(event.put_id).set_result(event)
            elif isinstance(event, FetchEnded):
                self._ended.pop(event.fetch_id).set_result(event)

    def _on_error(self, error: BaseException) -> None:
        for ended in self._ended.values():
            ended.set_exception(error)
        self._ended.clear()


def _places(
    round_: int, numbers: Sequence[int]
) -> tuple[tuple[bytes, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of blocks: their keys, their places in the host arena, the slots of their rows, and generations of these."""
    keys = tuple(round_.to_bytes(8, "big") + block.to_bytes(8, "big") for block in numbers)
    return keys, tuple(numbers), tuple(numbers), (_USE,) * len(numbers)
