"""The memory of a group's devices by address, as the kernels of one of them take it.

A kernel's program writes for the same program of its peers, and reads what they wrote for it: the two have a *channel*,
which is theirs alone. A channel has slots for three launches, used in turn, and a program counts its turns on its own
device, so graphs may hold any number of launches. `channel.py` tells why three. Ways that send tiles of another size,
or a tile more than once, have channels of their own: an *area*.

Knows no processes; `gpu/peers.py` maps the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: launches that a channel has slots for
TURNS = 3


@dataclass(frozen=True)
class Way:
    """How some collective uses its channels.

    Attributes:
        tile_nbytes: of a slot: what a program sends to a peer at once.
        slots: of each rank in a turn.
        programs: most of a launch. All of them must run at once: they wait for those of other devices.
        warps: of a program.
    """

    tile_nbytes: int
    slots: int
    programs: int
    warps: int

    def nbytes(self, ranks: int) -> int:
        """Of its area on each rank."""
        return self.programs * TURNS * self.slots * ranks * self.tile_nbytes


#: by name, in the order of their areas: sums of few and of many bytes, in one or two shots, and messages. Behind them
#: stands the way "rows", where rows have a size: a program sends a row, and `layer/finish.py` goes on from its sum
WAYS = {
    "one_shot": Way(2048, 1, 128, 4),
    "one_shot_wide": Way(8192, 1, 256, 8),
    "two_shot": Way(2048, 2, 128, 4),
    "two_shot_wide": Way(8192, 2, 256, 8),
    "message": Way(8192, 1, 1, 8),
}

# by ranks; of more rows each rank would send more than two shots do
_MOST_ROWS = {2: 256, 4: 256}
_MOST_ROWS_ELSE = 64


@dataclass(frozen=True)
class Area:
    """The channels of a way on one rank's device.

    Attributes:
        addresses: int64 [ranks], of the same area on every rank.
        turns: int32 [programs], of each channel; kernels count it up.
    """

    way: Way
    addresses: torch.Tensor
    turns: torch.Tensor


class PeerMemory:
    """The areas of every rank, by their addresses on one rank's device.

    Attributes:
        rank, ranks: of the group.
        areas: by the names of `ways`.
    """

    def __init__(self, rank: int, addresses: Sequence[int], device: torch.device, row_nbytes: int = 0) -> None:
        """`addresses`: where each rank's memory begins, as this process sees it: `nbytes` of it, all of which are
        0xFF. `row_nbytes`: see `ways`."""
        self.rank, self.ranks = rank, len(addresses)
        self.areas: dict[str, Area] = {}
        first = torch.tensor(addresses, dtype=torch.int64)
        for name, way in ways(row_nbytes).items():
            turns = torch.zeros(way.programs, dtype=torch.int32, device=device)
            self.areas[name] = Area(way, first.to(device), turns)
            first = first + way.nbytes(self.ranks)

    def takes_rows(self, rows: int, row_nbytes: int) -> bool:
        """Whether `layer/finish.py` sums so many padded rows of so many bytes."""
        area = self.areas.get("rows")
        most = _MOST_ROWS.get(self.ranks, _MOST_ROWS_ELSE)
        return area is not None and 0 < rows <= most and area.way.tile_nbytes == row_nbytes

    @staticmethod
    def nbytes(ranks: int, row_nbytes: int = 0) -> int:
        """Of the memory that each rank of a group has to give."""
        return sum(way.nbytes(ranks) for way in ways(row_nbytes).values())


def ways(row_nbytes: int) -> dict[str, Way]:
    """`WAYS`, and that of rows of so many bytes with their padding; 0: without."""
    # a program's warps are those of the kernel that sums it
    return {**WAYS, "rows": Way(row_nbytes, 1, max(_MOST_ROWS.values()), 0)} if row_nbytes else WAYS
