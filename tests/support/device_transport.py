"""A transport `device` whose devices are the suite's own regions: real mappings of other processes, without workers.

Parts may begin and end anywhere here, as the suite wants it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
from fdasync_fleet.transfer.device import DeviceTransport
from fdasync_fleet.transfer.device_blocks import PartPuller

from fdasync.errors import RunnerError
from fdasync.ipc.peers.blocks import Exported, PoolExport
from fdasync.ipc.peers.memory import MemoryPool
from fdasync.ipc.peers.pool import Copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.peers.memory import PeerMemory
    from fdasync.ipc.shared_memory import Part, SharedRegion


class RegionPuller(PartPuller):
    """Each region is a pool."""

    def __init__(self) -> None:
        self.regions: Sequence[SharedRegion] = ()
        self.pools: list[MemoryPool] = []
        self.sources: dict[bytes, list[PeerMemory]] = {}
        self.copying: dict[asyncio.Future[list[int]], bytes] = {}

    def attach(self, regions: Sequence[SharedRegion]) -> None:
        self.regions = regions
        self.pools = [MemoryPool(region) for region in regions]
        self.sizes = tuple([region.nbytes for region in regions])

    async def export(self) -> Exported:
        pools = [PoolExport("memory", n, 1, 0, n, n, 0, n, 0, n, writes=True) for n in self.sizes]
        return Exported(tuple(pools), tuple([pool.export() for pool in self.pools]))

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[int]) -> None:
        memories: list[PeerMemory] = []
        try:
            for pool, fd in zip(pools, fds, strict=True):
                memories.append(self.pools[0].open(fd, pool.nbytes))
        except BaseException:
            for memory in memories:
                memory.close()
            raise
        self.sources[source] = memories

    async def close_source(self, source: bytes) -> None:
        pulls = [pull for pull, name in self.copying.items() if name == source]
        if pulls:
            await asyncio.wait(pulls, timeout=300)
        for memory in self.sources.pop(source, ()):
            memory.close()

    def problem(self, part: Part) -> str:
        return "" if part.region < len(self.pools) else "there is no such region"

    def pull(self, source: bytes, theirs: Sequence[Part], ours: Sequence[Part]) -> asyncio.Future[list[int]]:
        task = asyncio.ensure_future(self._pull(source, theirs, ours))
        self.copying[task] = source
        task.add_done_callback(self.copying.pop)
        return task

    async def _pull(self, source: bytes, theirs: Sequence[Part], ours: Sequence[Part]) -> list[int]:
        sums = []
        for their, our in zip(theirs, ours, strict=True):
            memories = self.sources[source]
            if their.region >= len(memories) or their.offset + their.nbytes > len(memories[their.region].view):
                raise RunnerError("a part outside of the sender's memory")
            places = [np.array([number], np.int64) for number in (their.offset, our.offset, our.nbytes)]
            await self.pools[our.region].launch([Copies(memories[their.region], *places)], [])
            with self.regions[our.region].view(our.offset, our.nbytes) as view:
                sums.append(DeviceTransport.checksum(bytes(view)))
        return sums

    async def aclose(self) -> None:
        for pool in self.pools:
            await pool.aclose()


class RegionTransport(DeviceTransport):
    """See the module."""

    def __init__(self) -> None:
        self.puller = RegionPuller()
        super().__init__(self.puller, os.urandom(16))

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if not self.puller.pools:
            self.puller.attach(regions)
        await super().open(regions)

    async def aclose(self) -> None:
        await super().aclose()
        await self.puller.aclose()
