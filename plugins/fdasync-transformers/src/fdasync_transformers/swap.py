"""Copies of whole KV blocks between the pool and the host tier's shared memory.

Blocks are runs of bytes here; dtype and layers do not matter. A copy is done when `out` or `back` returns. Knows
nothing of rows, requests or futures. Called by `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.host import HostArena
    from fdasync_transformers.kv import KVPool

# of the staging buffer between a GPU and the host's blocks
_STAGE_NBYTES = 64 << 20


class BlockCopier:
    """Moves blocks of one pool. Raises InvariantBroken where host blocks have another size."""

    def __init__(self, pool: KVPool, host: HostArena) -> None:
        self._device = pool.blocks.view(torch.uint8)
        self._host = host
        self.block_nbytes = int(self._device.shape[1])
        if host.block_nbytes != self.block_nbytes:
            raise InvariantBroken(f"host blocks have {host.block_nbytes} bytes, those of the pool {self.block_nbytes}")

    def out(self, device: Sequence[int], host: Sequence[int]) -> int:
        """Copy `device[i]` to `host[i]`; returns bytes moved. Raises InvariantBroken before anything is copied."""
        self._check(device, host)
        kv = self._host.kv
        if self._device.is_cuda:
            for part in self._parts(len(device)):
                index = torch.tensor(device[part], device=self._device.device)
                # waits for the device: on a GPU these copies are right, and not yet beside its steps
                staged = self._device.index_select(0, index).cpu().numpy()
                for row, place in zip(staged, host[part], strict=True):
                    kv[place] = row
        else:
            # one by one: indexed copies of bytes run at a twentieth of the speed of these
            blocks = self._device.numpy()
            for block, place in zip(device, host, strict=True):
                kv[place] = blocks[block]
        return len(device) * self.block_nbytes

    def back(self, host: Sequence[int], device: Sequence[int]) -> int:
        """Copy `host[i]` to `device[i]`; as `out`."""
        self._check(device, host)
        kv = self._host.kv
        if self._device.is_cuda:
            for part in self._parts(len(device)):
                index = torch.tensor(device[part], device=self._device.device)
                self._device.index_copy_(0, index, torch.from_numpy(kv[list(host[part])]).to(self._device.device))
            torch.cuda.synchronize(self._device.device)
        else:
            blocks = self._device.numpy()
            for place, block in zip(host, device, strict=True):
                blocks[block] = kv[place]
        return len(device) * self.block_nbytes

    def _parts(self, count: int) -> list[slice]:
        """Blocks that fit into one staging buffer."""
        step = max(1, _STAGE_NBYTES // self.block_nbytes)
        return [slice(first, first + step) for first in range(0, count, step)]

    def _check(self, device: Sequence[int], host: Sequence[int]) -> None:
        for name, blocks, count in (("device", device, len(self._device)), ("host", host, self._host.num_blocks)):
            outside = [block for block in blocks if not 0 <= block < count]
            if outside:
                raise InvariantBroken(f"{name} block {outside[0]} does not exist, there are {count}")
        if len(device) != len(host):
            raise InvariantBroken(f"{len(device)} device blocks and {len(host)} host blocks")
