"""What the ranks of a group do together on GPUs: sums and messages over their peers' memory, without the host.

Both are queued on the current stream, may be captured in graphs, and keep the order of that stream. What is said at
start-up and at updates goes through host memory, as on CPUs. A rank that waits on its device for one that never comes
spins until its process is killed, which the engine's deadlines see to. Knows tensors; knows no models. Made by
`runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import ConfigError, InvariantBroken
from fdasync_transformers.parallel.collectives import HostCollectives

if TYPE_CHECKING:
    from fdasync.gpu.kernels.collectives.peer_memory import PeerMemory
    from fdasync.ipc.exchange import Exchange

# elements that a sum takes are a multiple of it
_VECTOR = 8


class DeviceCollectives(HostCollectives):
    """See the module. The memory that peers map is the process's until it ends: a peer may still write to it.

    Args:
        exchange: the caller's.
        device: this rank's; it is current.
        row: a hidden state, on any device: the kernels that go on from a sum make the sum of rows like it themselves.
            None: they make none.
        may_share: whether several ranks may have one GPU, which then gives each a while at a time: for tests.
    """

    def __init__(
        self,
        exchange: Exchange,
        device: torch.device,
        *,
        row: torch.Tensor | None = None,
        may_share: bool = False,
    ) -> None:
        """Raises ConfigError where GPUs have no access to each other's memory, or two ranks have one GPU;
        RunnerError where there is no memory."""
        from fdasync.gpu.kernels.collectives.all_reduce import all_reduce
        from fdasync.gpu.kernels.collectives.gather import gather
        from fdasync.gpu.kernels.collectives.peer_memory import row_width
        from fdasync.gpu.peers import OpenedPeers

        super().__init__(exchange)
        # this has a number, which "cuda" has not; and from here on the device's context is there
        device = torch.zeros(1, device=device).device
        self._check_access(device, may_share=may_share)
        self._width = row_width
        row_nbytes = 0 if row is None else row_width(row.shape[-1]) * row.element_size()
        self._opened = OpenedPeers(exchange, device, row_nbytes)
        self._device = device
        self._all_reduce, self._share = all_reduce, gather

    def peers(self, rows: torch.Tensor) -> PeerMemory | None:
        memory = self._opened.memory
        takes = memory.takes_rows(len(rows), self._width(rows.shape[-1]) * rows.element_size())
        return memory if takes and not self._apart else None

    def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
        del label
        return self._share(message, self._opened.memory)

    def _sum(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        if tensor.device != self._device:
            raise InvariantBroken(f"{label}: a sum of tensors on {tensor.device} over {self._device}")
        total = tensor.contiguous()
        flat = total.view(-1)
        if len(flat) % _VECTOR:
            padded = torch.nn.functional.pad(flat, (0, -len(flat) % _VECTOR))
            flat.copy_(self._all_reduce(padded, self._opened.memory, out=padded)[: len(flat)])
        else:
            self._all_reduce(flat, self._opened.memory, out=flat)
        return total

    def _check_access(self, device: torch.device, *, may_share: bool) -> None:
        """Raise ConfigError on all ranks, where one cannot read the memory of another."""
        own = str(torch.cuda.get_device_properties(device).uuid)
        names = [name.decode() for name in self.tell(own.encode(), "names of GPUs")]
        if len(set(names)) < self.ranks and not may_share:
            problem = f"{self.ranks} ranks have {len(set(names))} GPUs: {', '.join(sorted(set(names)))}"
            raise ConfigError("tensor_parallel", problem, hint="each rank takes a GPU of its own")
        here = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
        # of a GPU that this process does not see, opening its memory tells
        lacking = [
            name
            for name in names
            if name != own and name in here and not torch.cuda.can_device_access_peer(device, here[name])
        ]
        told = [said.decode() for said in self.tell(", ".join(lacking).encode()[:4000], "access to other GPUs")]
        if problems := [
            f"GPU {names[rank]} of rank {rank} has no access to the memory of {those}"
            for rank, those in enumerate(told)
            if those
        ]:
            raise ConfigError(
                "tensor_parallel", "; ".join(problems), hint="take GPUs that NVLink or one PCIe switch connects"
            )
