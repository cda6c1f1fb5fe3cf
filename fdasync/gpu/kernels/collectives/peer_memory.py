"""The memory of a group's devices by address, as the kernels of one of them take it.

Knows no processes; `gpu/peers.py` maps the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: most programs of a launch; every rank has flags for so many
PROGRAMS = 64


class PeerMemory:
    """Two buffers and the flags of every rank, by their addresses on one rank's device.

    Attributes:
        rank, ranks: of the group.
        buffer_nbytes: of each of the two buffers.
        flags: int64 [ranks] on the device, the addresses of each rank's flags, uint32 [programs, ranks].
    """

    def __init__(self, rank: int, addresses: Sequence[int], buffer_nbytes: int, device: torch.device) -> None:
        """`addresses`: where each rank's memory begins, as this process sees it: two buffers, then flags that are 0."""
        self.rank, self.ranks, self.buffer_nbytes = rank, len(addresses), buffer_nbytes
        first = torch.tensor(addresses, dtype=torch.int64)
        self._buffers = [(first + number * buffer_nbytes).to(device) for number in range(2)]
        self.flags = (first + 2 * buffer_nbytes).to(device)
        self._turn = 0

    def next_buffers(self) -> torch.Tensor:
        """int64 [ranks] on the device, the addresses of the buffers of the next collective: each call takes the other
        pair. Where calls are captured in graphs, a graph must take an even number of them, or a call outside of graphs
        must stand between two replays."""
        self._turn = 1 - self._turn
        return self._buffers[self._turn]
