"""KV blocks as rows of bytes, in a pool and on the host: checks the ids of copies, and copies on a CPU device.

Blocks are runs of bytes here; dtype and layers do not matter. Knows nothing of streams, futures, requests or rows of
auxiliary data. Called by `block_copies.py`, and by runners whose copies may block their caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena

Lane = Literal["copy_out", "copy_in"]


class BlockRows:
    """The two ends of block copies.

    `blocks` is the pool [num_blocks, elements] of any dtype and device, each row one run of bytes; `host` holds blocks
    of the same size. Both belong to the caller. Raises InvariantBroken where sizes differ or rows are no runs of bytes.

    Attributes:
        rows: uint8 [num_blocks, block_nbytes], the pool's own bytes, on its device.
        block_nbytes: bytes of a block.
        name: "rows", for logs: this class is one of the ways to copy of `block_copies.py`.
        at_once: blocks that `submit` copies in about 0.3 ms.
    """

    name = "rows"

    def __init__(self, blocks: torch.Tensor, host: HostArena) -> None:
        if blocks.dim() != 2 or blocks.stride(1) != 1:
            raise InvariantBroken("the blocks of the pool are not one run of bytes each")
        self.rows = blocks.view(torch.uint8)
        self.block_nbytes = int(self.rows.shape[1])
        if host.block_nbytes != self.block_nbytes:
            raise InvariantBroken(f"host blocks have {host.block_nbytes} bytes, those of the pool {self.block_nbytes}")
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
        # one by one: indexed copies of bytes run at a twentieth of the speed of these
        rows, kv = self.rows.numpy(), self._host.kv
        for block, place in zip(device.tolist(), host.tolist(), strict=True):
            if lane == "copy_out":
                kv[place] = rows[block]
            else:
                rows[block] = kv[place]

    def out(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> int:
        """Copy `device_ids[i]` of a pool on the CPU to `host_ids[i]`; returns bytes moved.

        Blocks its caller. Raises InvariantBroken as `ids`, before anything is copied.
        """
        return self._now("copy_out", device_ids, host_ids)

    def back(self, host_ids: Sequence[int], device_ids: Sequence[int]) -> int:
        """Copy `host_ids[i]` to `device_ids[i]`; as `out`."""
        return self._now("copy_in", device_ids, host_ids)

    def _now(self, lane: Lane, device_ids: Sequence[int], host_ids: Sequence[int]) -> int:
        device, host = self.ids(lane, device_ids, host_ids)
        self.submit(lane, device, host)
        return len(device) * self.block_nbytes
