"""The host tier's memory: KV of host blocks in one shared region that can be pinned.

A host block is one run of bytes: a page for the header of a stored object, and behind it the KV of all layers, padded
to whole pages. So a block moves between device and host in one copy, and goes to a store and back as it lies. Two
pages at the end serve as padding: zeros to write, and a place to read padding into. Blocks are whole here; processes
that compute each step together map all of them, and copy a part each.

The runner copies KV in and out (`Runner.copy`), stores and transfers read and write whole blocks; the engine moves no
byte. This module knows no identities. The engine makes the arena; the worker attaches to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion, page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def host_nbytes(num_blocks: int, block_nbytes: int) -> int:
    """Size of the region in bytes, before anything is allocated."""
    return num_blocks * (PAGE_NBYTES + page_aligned(block_nbytes)) + 2 * PAGE_NBYTES


@dataclass(frozen=True)
class HostPart:
    """The run of bytes of every host block that one process holds on its device.

    Attributes:
        offset_nbytes: where it begins in a host block.
        block_nbytes: of a host block.
        writes: whether copies out write it. Where several processes hold the same part one of them does.
    """

    offset_nbytes: int
    block_nbytes: int
    writes: bool = True


class HostArena:
    """KV of host blocks.

    Attributes:
        region: the shared memory, owned by this object; the worker and store processes get `region.fd`.
        num_blocks: host blocks.
        block_nbytes: KV of one block, without padding.
        stride_nbytes: from one block's header to the next one's.
        kv: uint8 [num_blocks, block_nbytes], the KV of each block over the shared bytes (rows are strided).
    """

    # how it crosses to another process (`ipc/remote.py`)
    plan_type = tuple[int, int]

    def __init__(self, region: SharedRegion, num_blocks: int, block_nbytes: int) -> None:
        self.region = region
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self.stride_nbytes = PAGE_NBYTES + page_aligned(block_nbytes)
        blocks = np.frombuffer(region.map, np.uint8, num_blocks * self.stride_nbytes)
        self.kv: NDArray[np.uint8] = blocks.reshape(num_blocks, self.stride_nbytes)[
            :, PAGE_NBYTES : PAGE_NBYTES + block_nbytes
        ]

    @classmethod
    def create(cls, num_blocks: int, block_nbytes: int) -> HostArena:
        """A new arena. Its pages are touched by the process that writes them first. Raises OSError."""
        region = SharedRegion.create("host", host_nbytes(num_blocks, block_nbytes))
        return cls(region, num_blocks, block_nbytes)

    @classmethod
    def attach(cls, plan: tuple[int, int], fds: Iterator[int]) -> HostArena:
        """The arena of another process; its descriptor belongs to the result. Raises InvariantBroken if it is too
        small, OSError."""
        return cls(SharedRegion(next(fds), host_nbytes(*plan)), *plan)

    @property
    def plan(self) -> tuple[int, int]:
        return self.num_blocks, self.block_nbytes

    @property
    def fds(self) -> tuple[int, ...]:
        return self.region.fds

    def header(self, block: int, region: int) -> Part:
        """Where the header of a stored object goes; `region` is this region's number in `Store.open`."""
        return Part(region, block * self.stride_nbytes, PAGE_NBYTES)

    def payload(self, block: int, region: int) -> Part:
        """Where the KV is, without padding."""
        return Part(region, block * self.stride_nbytes + PAGE_NBYTES, self.block_nbytes)

    def zeros(self, region: int) -> Part:
        """A page of zeros, which is never written."""
        return Part(region, self.num_blocks * self.stride_nbytes, PAGE_NBYTES)

    def trash(self, region: int) -> Part:
        """A page to read padding into; its bytes are never used."""
        return Part(region, self.num_blocks * self.stride_nbytes + PAGE_NBYTES, PAGE_NBYTES)

    def close(self) -> None:
        """Drop mapping and fd; idempotent. The bytes live on while a view of `kv` does."""
        self.kv = np.empty((0, self.block_nbytes), np.uint8)
        self.region.close()
