"""What the ranks of a group do together on GPUs: sums and messages over their peers' memory, without the host.

Both are queued on the current stream, may be captured in graphs, and keep the order of that stream. What is said at
start-up and at updates goes through host memory, as on CPUs. A rank that waits on its device for another that never
comes spins until the engine's deadlines have its process killed. Knows tensors; knows no models. Made by
`device_group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.parallel.collectives import HostCollectives

if TYPE_CHECKING:
    from fdasync_kernels.collectives.peer_memory import PeerMemory

    from fdasync.ipc.exchange import Exchange


class DeviceCollectives(HostCollectives):
    """See the module. The memory that peers map is the process's until it ends: a peer may still write to it.

    Args:
        exchange: the caller's.
        device: this rank's; it is current.
        row: a hidden state, on any device: the kernels that go on from a sum make the sum of rows like it themselves.
            None: they make none.
    """

    def __init__(self, exchange: Exchange, device: torch.device, *, row: torch.Tensor | None = None) -> None:
        """Raises RunnerError where there is no memory, or a GPU has no access to another's."""
        from fdasync_kernels.collectives.all_reduce import VECTOR, all_reduce
        from fdasync_kernels.collectives.gather import gather
        from fdasync_kernels.collectives.peer_memory import Group, PeerMemory, row_width

        from fdasync.gpu.peers import OpenedPeers, fewest_multiprocessors

        super().__init__(exchange)
        self._width = row_width
        self._vector = VECTOR
        row_nbytes = 0 if row is None else row_width(row.shape[-1]) * row.element_size()
        group = Group(exchange.ranks, fewest_multiprocessors(exchange, device), row_nbytes)
        self._opened = OpenedPeers(exchange, device, group.nbytes())
        self._memory = PeerMemory(exchange.rank, self._opened.addresses, device, group)
        self._device = device
        self._all_reduce, self._share = all_reduce, gather

    def peers(self, rows: torch.Tensor) -> PeerMemory | None:
        memory = self._memory
        takes = memory.takes_rows(len(rows), self._width(rows.shape[-1]) * rows.element_size())
        return memory if takes and not self._apart else None

    def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
        del label
        return self._share(message, self._memory)

    def _sum(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        if tensor.device != self._device:
            raise InvariantBroken(f"{label}: a sum of tensors on {tensor.device} over {self._device}")
        total = tensor.contiguous()
        flat = total.view(-1)
        if len(flat) % self._vector:
            padded = torch.nn.functional.pad(flat, (0, -len(flat) % self._vector))
            flat.copy_(self._all_reduce(padded, self._memory, out=padded)[: len(flat)])
        else:
            self._all_reduce(flat, self._memory, out=flat)
        return total
