"""Device memory of a group of processes that each of them maps: the channels of collectives.

Each process allocates on its own device, tells the others a handle by an `Exchange`, and opens theirs: from then on its
kernels read and write the peers' memory by address, over NVLink or PCIe. Handles are of the driver's legacy
interprocess kind, which needs no descriptors; the memory of a process goes with it, and a peer that writes to it then
has a device error, so a group lives and dies together. Knows no kernels and no models. Made by runners that are ranks
of a group; `kernels/collectives/` uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import RunnerError
from fdasync.gpu.cudart import HANDLE_NBYTES, Driver
from fdasync.gpu.kernels.collectives.peer_memory import Group, PeerMemory

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange


class OpenedPeers:
    """The memory behind a `PeerMemory`, allocated and opened.

    Args:
        device: a CUDA device, which is current.
        row_nbytes: see `Group`.

    Attributes:
        memory: what sums and messages take.

    Raises RunnerError where the device has no memory, or does not reach a peer's.
    """

    def __init__(self, exchange: Exchange, device: torch.device, row_nbytes: int = 0) -> None:
        own = torch.cuda.get_device_properties(device).multi_processor_count
        counts = [int(bytes(part)) for part in exchange.gather(str(own).encode(), "numbers of multiprocessors")]
        group = Group(exchange.ranks, min(counts), row_nbytes)
        self._driver = Driver()
        self._opened: list[int] = []
        # the driver works in the context that torch made current
        torch.cuda.current_stream(device)
        self._own = self._driver.allocate(group.nbytes(), filled=0xFF)
        try:
            torch.cuda.synchronize(device)  # blocking: at start-up
            handle = self._driver.share(self._own)
            parts = exchange.gather(handle, "handles of device memory")
            handles = [bytes(part) for part in parts]
            addresses = []
            for rank, other in enumerate(handles):
                if len(other) != HANDLE_NBYTES:
                    raise RunnerError(f"rank {rank} gave {len(other)} bytes for a handle of device memory")
                if rank == exchange.rank:
                    addresses.append(self._own)
                else:
                    self._opened.append(self._driver.open_shared(other))
                    addresses.append(self._opened[-1])
            self.memory = PeerMemory(exchange.rank, addresses, device, group)
            # no rank launches before all have opened
            exchange.gather(b"", "device memory is open")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the peers' memory and free this rank's; idempotent. No collective may be under way on any rank."""
        opened, self._opened = self._opened, []
        for address in opened:
            self._driver.close_shared(address)
        own, self._own = self._own, 0
        if own:
            self._driver.free(own)
