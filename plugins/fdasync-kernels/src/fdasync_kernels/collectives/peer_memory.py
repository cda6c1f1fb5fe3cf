"""The memory of a group's devices by address, as the kernels of one of them take it.

A kernel's program writes for the same program of its peers, and reads what they wrote for it: the two have a *channel*,
which is theirs alone. A channel has slots for three turns, one for each tile that is sent, and a program
counts its turns on its own device, so graphs may hold any number of launches. `channel.py` tells why three. Ways that
send tiles of another size, or a tile more than once, have channels of their own: an *area*.

Knows no processes; `gpu/peers.py` maps the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: that a channel has slots for
TURNS = 3

# how sums of many bytes are cut: bytes of a tile, programs of a multiprocessor, their warps. Of more ranks a program
# holds more in registers
_WIDE = {2: (8192, 4, 4), 4: (8192, 2, 8)}
_WIDE_ELSE = (4096, 1, 8)
# rows of more bytes, or of more ranks, leave room for one program on a multiprocessor
_SHORT_ROW_NBYTES, _FEW_RANKS = 8192, 4
# elements: in this shape `layer/norm.py` sums a row, so that the bits are the same
_NARROWEST_ROW = 256
# of more rows each rank would send more than two shots do
_MOST_ROWS, _MOST_ROWS_OF_MANY_RANKS = 256, 64


@dataclass(frozen=True)
class Way:
    """How some collective uses its channels.

    Attributes:
        tile_nbytes: of a slot: what a program sends to a peer at once.
        slots: of each rank in a turn.
        programs: most of a launch. All of them must run at once: they wait for programs of other devices.
        warps: of a program; 0: its kernel knows.
    """

    tile_nbytes: int
    slots: int
    programs: int
    warps: int

    def nbytes(self, ranks: int) -> int:
        """Bytes of its area on each rank."""
        return self.programs * TURNS * self.slots * ranks * self.tile_nbytes


@dataclass(frozen=True)
class Group:
    """What all ranks of a group know alike.

    Attributes:
        ranks: how many.
        processors: multiprocessors of each device; of unlike ones the least.
        row_nbytes: of a row that a program of `layer/finish.py` sums, with its padding; 0: none are.
    """

    ranks: int
    processors: int
    row_nbytes: int = 0

    @property
    def places(self) -> int:
        """Rows of a tile that has one for each rank: kernels know powers of two alone."""
        return 1 << (self.ranks - 1).bit_length()

    def ways(self) -> dict[str, Way]:
        """Ways by name, in the order of their areas: sums of few or many bytes, in one or two shots; messages; rows."""
        tile_nbytes, each, warps = _WIDE.get(self.ranks, _WIDE_ELSE)
        found = {
            "one_shot": Way(2048, 1, self.processors, 4),
            "one_shot_wide": Way(tile_nbytes, 1, each * self.processors, warps),
            "two_shot": Way(2048, 2, self.processors, 4),
            "two_shot_wide": Way(tile_nbytes, 2, each * self.processors, warps),
            "message": Way(8192, 1, 1, 8),
        }
        if self.row_nbytes:
            few = self.ranks <= _FEW_RANKS
            each = 2 if few and self.row_nbytes <= _SHORT_ROW_NBYTES else 1
            most = _MOST_ROWS if few else _MOST_ROWS_OF_MANY_RANKS
            found["rows"] = Way(self.row_nbytes, 1, min(most, each * self.processors), 0)
        return found

    def nbytes(self) -> int:
        """Bytes of memory that each rank has to give."""
        return sum(way.nbytes(self.ranks) for way in self.ways().values())


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
        rank, ranks, places: of the group.
        areas: by the names of `Group.ways`.
    """

    def __init__(self, rank: int, addresses: Sequence[int], device: torch.device, group: Group) -> None:
        """`addresses`: where each rank's memory begins, as this process sees it: `Group.nbytes` of it, all bytes
        0xFF."""
        self.rank, self.ranks, self.places = rank, group.ranks, group.places
        self.areas: dict[str, Area] = {}
        first = torch.tensor(addresses, dtype=torch.int64)
        for name, way in group.ways().items():
            turns = torch.zeros(way.programs, dtype=torch.int32, device=device)
            self.areas[name] = Area(way, first.to(device), turns)
            first = first + way.nbytes(self.ranks)

    def takes_rows(self, rows: int, row_nbytes: int) -> bool:
        """Whether `layer/finish.py` sums so many rows of so many bytes with their padding."""
        area = self.areas.get("rows")
        return area is not None and 0 < rows <= area.way.programs and area.way.tile_nbytes == row_nbytes


def row_width(size: int) -> int:
    """Elements that a row of so many takes in a program of `layer/finish.py`, and on its way to a peer."""
    return max(_NARROWEST_ROW, 1 << (size - 1).bit_length())
