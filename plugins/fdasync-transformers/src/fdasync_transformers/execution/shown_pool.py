"""The KV pool in memory that other processes map, for blocks that go from device to device between instances.

On a GPU the memory is the driver's (`gpu/mapped_memory.py`), on a CPU a memfd. Knows no steps. Made where the engine
asks for it (`RunnerLimits.shows_blocks`), by `opened_runner.py`, before the pool, which is laid over this memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.block_sums import run_sums

from fdasync.errors import InvariantBroken
from fdasync.gpu.cudart import Driver
from fdasync.gpu.mapped_memory import MappedMemory
from fdasync.gpu.peer_pool import DevicePool
from fdasync.ipc.peers.blocks import PoolExport
from fdasync.ipc.peers.memory import MemoryPool
from fdasync.ipc.peers.rows import PeerRows
from fdasync.ipc.shared_memory import SharedRegion

if TYPE_CHECKING:
    from fdasync.ipc.peers.blocks import BlockPull
    from fdasync.ipc.peers.pool import PeerPool
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices


class ShownPool:
    """See the module. Close it when the pool is not used any more.

    Attributes:
        rows: the blocks, for other instances; None before `bind`, and where a block is not made of whole words.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: PeerRows | None = None
        self._device = device
        self._memory: MappedMemory | SharedRegion | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], of any content. Raises RunnerError where the device has no such memory, OSError on a CPU."""
        if self._memory is not None:
            raise InvariantBroken("a pool is allocated once")
        if self._device.type == "cuda":
            # what torch keeps of loading and profiling is not free for the driver
            torch.cuda.empty_cache()
            self._memory = MappedMemory.create(Driver(), self._device, nbytes)
            return self._memory.tensor()
        self._memory = SharedRegion.create("kv", nbytes)
        return torch.frombuffer(self._memory.map, dtype=torch.uint8)

    def bind(self, bound: Bound, services: GpuServices) -> None:
        """Take in what copies need; `bound.pool` lies over this memory."""
        memory, blocks = self._memory, bound.pool.blocks
        if memory is None:
            raise InvariantBroken("a pool that was not allocated here")
        pool: PeerPool[Any]
        if isinstance(memory, SharedRegion):
            pool = MemoryPool(memory)
        else:
            tensor, driver, streams = memory.tensor(), Driver(), services.streams
            pool = DevicePool(
                memory, tensor, driver, streams, services.events, services.pinned, services.port, run_sums
            )
        part = bound.part or bound.pool.part
        row = blocks.shape[1] * blocks.element_size()
        own = PoolExport(
            kind=pool.kind,
            nbytes=memory.nbytes,
            num_blocks=len(blocks),
            first=0,
            stride=row,
            block=part.block_nbytes,
            offset=part.offset_nbytes,
            part=row,
            held_offset=part.offset_nbytes,
            held=row,
            writes=part.writes,
        )

        def pulled(pull: BlockPull) -> None:
            bound.table.place(pull.ours, pull.slots, pull.generations)

        self.rows = PeerRows(pool, own, pulled)

    async def aclose(self) -> None:
        """Take no more copies, and wait, bounded, for those in flight; idempotent. Before the executor closes, whose
        port sees their ends. Raises DeadlineExceeded: then the memory stays."""
        if self.rows is not None:
            await self.rows.aclose()

    def free(self) -> None:
        """Free the memory; no tensor in it is used any more. Idempotent. Others that have mapped it keep it."""
        memory, self._memory = self._memory, None
        self.rows = None
        if memory is not None:
            memory.close()
