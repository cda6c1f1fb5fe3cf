"""What the ranks of a group do together on GPUs that have no access to each other's memory: all of it by NCCL.

A sum is gathered and then added up as one tree by every rank, so it has the bits of `DeviceCollectives`; it
moves more bytes on more than two ranks, and takes three launches or more. Queued on the current stream, and captured in
graphs, as sums over peers' memory are. Knows tensors; knows no models. Made by `device_group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_transformers.parallel.collectives import HostCollectives, joined

if TYPE_CHECKING:
    import torch

    from fdasync.gpu.nccl import NcclGroup
    from fdasync.ipc.exchange import Exchange


class NcclCollectives(HostCollectives):
    """See the module.

    Args:
        exchange, group: the caller's, of the same ranks.
    """

    def __init__(self, exchange: Exchange, group: NcclGroup) -> None:
        super().__init__(exchange)
        self._group = group

    def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
        del label
        return self._gathered(message)

    def _sum(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        del label
        total = tensor.contiguous()
        return total.copy_(joined(list(self._gathered(total))))

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        told = own.new_empty((self.ranks, *own.shape))
        self._group.all_gather(own, told)
        return told
