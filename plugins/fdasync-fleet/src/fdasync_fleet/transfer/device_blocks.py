"""What the transport `device` asks of an instance's devices: parts of regions, as whole blocks of its pools.

Knows no peers and no messages. Made by `fdasync_fleet/instance`; `device.py` calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fdasync.ipc.peers.blocks import BlockPull

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from fdasync.ipc.peers.blocks import Exported, PeerBlocks, PoolExport
    from fdasync.ipc.remote import Fd
    from fdasync.ipc.shared_memory import Part


class PartPuller(ABC):
    """Copies parts from device to device. Its methods are `PeerBlocks`' methods, whose docstrings hold.

    Attributes:
        sizes: bytes of each region that parts are in, known after `export`.
    """

    sizes: tuple[int, ...] = ()

    @abstractmethod
    async def export(self) -> Exported: ...

    @abstractmethod
    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None: ...

    @abstractmethod
    async def close_source(self, source: bytes) -> None: ...

    @abstractmethod
    def problem(self, part: Part) -> str:
        """Why a part inside of its region cannot be copied; "" if it can."""

    @abstractmethod
    def pull(self, source: bytes, theirs: Sequence[Part], ours: Sequence[Part]) -> asyncio.Future[list[int]]: ...


class BlockPuller(PartPuller):
    """One region, whose parts are the blocks of the pools, one after the other.

    Args:
        blocks: of the engine's runner.
        num_blocks: of its device.
        block_nbytes: of a block.
    """

    def __init__(self, blocks: PeerBlocks, num_blocks: int, block_nbytes: int) -> None:
        self._blocks = blocks
        self._nbytes = block_nbytes
        self.sizes = (num_blocks * block_nbytes,)
        self._places: dict[int, tuple[int, int]] = {}

    async def export(self) -> Exported:
        return await self._blocks.export()

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None:
        await self._blocks.open(source, pools, fds)

    async def close_source(self, source: bytes) -> None:
        await self._blocks.close_source(source)

    def problem(self, part: Part) -> str:
        whole = part.nbytes == self._nbytes and part.offset % self._nbytes == 0
        return "" if whole else "a part is no block of a device"

    def fill(self, block: int, slot: int, generation: int) -> None:
        """Say where the rows of a block that is about to be pulled are; told with the pull."""
        self._places[block] = slot, generation

    def pull(self, source: bytes, theirs: Sequence[Part], ours: Sequence[Part]) -> asyncio.Future[list[int]]:
        mine = [part.offset // self._nbytes for part in ours]
        places = [self._places.pop(block, None) for block in mine]
        told = [place for place in places if place is not None]
        return self._blocks.pull(
            BlockPull(
                source=source,
                theirs=tuple([part.offset // self._nbytes for part in theirs]),
                ours=tuple(mine),
                slots=tuple([slot for slot, _ in told]),
                generations=tuple([generation for _, generation in told]),
            )
        )

    def sums(self, parts: Sequence[Part]) -> asyncio.Future[list[int]]:
        """See `PeerBlocks.sums`."""
        return self._blocks.sums([part.offset // self._nbytes for part in parts])
