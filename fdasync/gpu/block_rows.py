"""KV blocks as rows of bytes, in a pool and on the host: checks the ids of copies, and copies on a CPU device.

Blocks are runs of bytes here; dtype and layers do not matter. A pool's rows may be a part of the host's blocks, where
several processes hold a part each. Knows nothing of streams, futures, requests or rows of
auxiliary data. Called by `block_copies.py`, and by runners whose copies may block their caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fdasync.cache.host_arena import HostPart
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena

Lane = Literal["copy_out", "copy_in"]


class BlockRows:
    """The two ends of block copies.

    `blocks` is the pool [num_blocks, elements] of any dtype and device, each row one run of bytes: `part` of the blocks
    that `host` holds, or all of each (None). Both belong to the caller. Raises InvariantBroken where sizes do not fit
    or rows are no runs of bytes.

    Attributes:
        rows: uint8 [num_blocks, block_nbytes], the pool's own bytes, on its device.
        block_nbytes: bytes of a row.
        part: see above.
        name: "rows", for logs: this class is one of the ways to copy of `block_copies.py`.
        at_once: blocks that `submit` copies in about 0.3 ms.
    """

    name = "rows"

    def __init__(self, blocks: torch.Tensor, host: HostArena, part: HostPart | None = None) -> None:
        if blocks.dim() != 2 or blocks.stride(1) != 1:
            raise InvariantBroken("the blocks of the pool are not one run of bytes each")
        self.rows = blocks.view(torch.uint8)
        self.block_nbytes = int(self.rows.shape[1])
        self.part = part or HostPart(0, self.block_nbytes)
        if host.block_nbytes != self.part.block_nbytes:
            problem = f"host blocks have {host.block_nbytes} bytes, those of the pool {self.part.block_nbytes}"
            raise InvariantBroken(problem)
        if not 0 <= self.part.offset_nbytes <= host.block_nbytes - self.block_nbytes:
            problem = f"{self.block_nbytes} bytes at {self.part.offset_nbytes} of host blocks of {host.block_nbytes}"
            raise InvariantBroken(problem)
        # one core copies some GB/s
        self.at_once = max(1, (2 << 20) // self.block_nbytes)
        self._host = host

    def ids(
        self, lane: Lane, device_ids: Sequence[int], host_ids: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of one call as new arrays: of the pool, of the host.

        Raises InvariantBroken: an id that does not exist, lists of two lengths, a destination named twice.
        """
        device, host = np.array(device_ids, np.int64), np.array(host_ids, np.int64)
        counts = (len(self.rows), self._host.num_blocks)
        for name, blocks, count in zip(("device", "host"), (device, host), counts, strict=True):
            outside = blocks[(blocks < 0) | (blocks >= count)]
            if len(outside):
                raise InvariantBroken(f"{name} block {outside[0]} does not exist, there are {count}")
        if len(device) != len(host):
            raise InvariantBroken(f"{len(device)} device blocks and {len(host)} host blocks")
        # copies of one call run in any order; sorting a thousand takes a twentieth of the time of np.unique
        targets = np.sort(host if lane == "copy_out" else device)
        if (targets[1:] == targets[:-1]).any():
            raise InvariantBroken("two copies of one call write the same block")
        return device, host

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        """Copy the blocks that `ids` returned, on a CPU device; the copies are done when it returns."""
        # one by one: indexed copies of bytes run at a twentieth of this speed
        first = self.part.offset_nbytes
        rows, kv = self.rows.numpy(), self._host.kv[:, first : first + self.block_nbytes]
        for block, place in zip(device.tolist(), host.tolist(), strict=True):
            if lane == "copy_out":
                kv[place] = rows[block]
            else:
                rows[block] = kv[place]

    def out(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> int:
        """Copy `device_ids[i]` of a pool on the CPU to `host_ids[i]`; returns bytes moved.

        Where `part` is not written nothing is copied. Blocks its caller. Raises InvariantBroken as `ids`, before
        anything is copied.
        """
        return self._now("copy_out", device_ids, host_ids)

    def back(self, host_ids: Sequence[int], device_ids: Sequence[int]) -> int:
        """Copy `host_ids[i]` to `device_ids[i]`; as `out`."""
        return self._now("copy_in", device_ids, host_ids)

    def moves(self, lane: Lane) -> bool:
        """Whether copies of this direction move anything."""
        return lane == "copy_in" or self.part.writes

    def _now(self, lane: Lane, device_ids: Sequence[int], host_ids: Sequence[int]) -> int:
        device, host = self.ids(lane, device_ids, host_ids)
        if not self.moves(lane):
            return 0
        self.submit(lane, device, host)
        return len(device) * self.block_nbytes
