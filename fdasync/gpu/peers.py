"""Device memory of a group of processes that each of them maps: the channels of collectives.

Each process allocates on its own device, tells the others a handle by an `Exchange`, and opens theirs: from then on its
kernels read and write the peers' memory by address, over NVLink or PCIe. Handles are of the driver's legacy
interprocess kind, which needs no descriptors; the memory of a process goes with it, and a peer that writes to it then
has a device error, so a group lives and dies together. Knows no kernels and no models. Made by runners that are ranks
of a group, and given to the collectives of `fdasync_kernels` as addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import RunnerError
from fdasync.gpu.cudart import HANDLE_NBYTES, Driver

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange


class OutOfReach(RunnerError):
    """A rank cannot open the memory of another's device. Raised by all ranks alike."""


def fewest_multiprocessors(exchange: Exchange, device: torch.device) -> int:
    """The smallest number of multiprocessors that any device of the group has; `device` is this rank's."""
    own = torch.cuda.get_device_properties(device).multi_processor_count
    return min(int(bytes(part)) for part in exchange.gather(str(own).encode(), "numbers of multiprocessors"))


class OpenedPeers:
    """Memory of every rank's device, allocated and opened, each byte 0xFF at first.

    Args:
        device: a CUDA device, which is current.
        nbytes: of each rank.

    Attributes:
        addresses: where each rank's memory begins, as this process sees it.

    Raises RunnerError where a device has no memory, OutOfReach where one does not reach a peer's: on every rank, and
    nothing is left open.
    """

    def __init__(self, exchange: Exchange, device: torch.device, nbytes: int) -> None:
        self._driver = Driver()
        self._opened: list[int] = []
        # the driver works in the context that torch made current
        torch.cuda.current_stream(device)
        self._own = 0
        try:
            handle, problem = b"", ""
            try:
                self._own = self._driver.allocate(nbytes, filled=0xFF)
                torch.cuda.synchronize(device)  # blocking: at start-up
                handle = self._driver.share(self._own)
            except RunnerError as error:
                problem = error.problem
            _agree(exchange, problem, "device memory is there", RunnerError)
            handles = [bytes(part) for part in exchange.gather(handle, "handles of device memory")]
            self.addresses: list[int] = []
            try:
                for rank, other in enumerate(handles):
                    self.addresses.append(self._own if rank == exchange.rank else self._open(rank, other))
            except RunnerError as error:
                problem = error.problem
            # no rank launches before all have opened
            _agree(exchange, problem, "device memory is open", OutOfReach)
        except BaseException:
            self.close()
            raise

    def _open(self, rank: int, handle: bytes) -> int:
        """The address of a peer's memory. Raises RunnerError."""
        if len(handle) != HANDLE_NBYTES:
            raise RunnerError(f"rank {rank} gave {len(handle)} bytes for a handle of device memory")
        address = self._driver.open_shared(handle)
        self._opened.append(address)
        return address

    def close(self) -> None:
        """Unmap the peers' memory and free this rank's; idempotent. No collective may be under way on any rank."""
        opened, self._opened = self._opened, []
        for address in opened:
            self._driver.close_shared(address)
        own, self._own = self._own, 0
        if own:
            self._driver.free(own)


def _agree(exchange: Exchange, problem: str, label: str, error: type[RunnerError]) -> None:
    """Raise the error on every rank where any has a problem: if one rank raised alone, the others would wait for it."""
    told = [bytes(part).decode(errors="replace") for part in exchange.gather(problem.encode()[:1000], label)]
    if found := [f"rank {rank}: {said}" for rank, said in enumerate(told) if said]:
        raise error("; ".join(found))
