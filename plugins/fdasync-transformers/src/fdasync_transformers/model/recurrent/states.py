"""The memory of recurrent state: the live state of each lane, and places of snapshots, both of the same bytes.

Where steps verify drafts a lane has several *versions* of its state: the version that a step begins from, and a version
behind each of its rows, since it is not known before how many rows stand.

A state is the parts of `StateLayout.specs`, one after the other, as `fdasync.cache.snapshots` lays out a snapshot: so a
snapshot is one run of bytes, in a place here or on the host. Knows no modules and no steps. Made by `bound_runner.py`,
and by what plays steps at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from fdasync.cache.snapshots import StateSpec, snapshot_nbytes
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["convolution", "recurrent"]


class Part(NamedTuple):
    """One tensor of a mixer's state.

    Attributes:
        kind: which of the library's cache.
        number: of the state in the layer's cache.
        spec, row: where it lies: the spec, and the layer's place in it.
        turned: it lies with its last two dimensions the other way round than the library has them.
    """

    kind: Kind
    number: int
    spec: int
    row: int
    turned: bool = False

    def as_library(self, lies: torch.Tensor) -> torch.Tensor:
        """A view of this part as the library has it, of how it lies."""
        return lies.transpose(-1, -2) if self.turned else lies


@dataclass(frozen=True)
class StateLayout:
    """The state of one sequence of a model.

    Attributes:
        specs: in the order of their bytes.
        parts: by a mixer's name.
    """

    specs: tuple[StateSpec, ...]
    parts: Mapping[str, tuple[Part, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of a live state, and of a snapshot."""
        return snapshot_nbytes(self.specs)


def versions_of(speculation: int) -> int:
    """How many versions of its state a lane has where a step verifies so many drafts of a sequence."""
    return speculation + 2 if speculation else 1


class States:
    """See the module. Zeroed.

    Attributes:
        versions: of each lane's state, side by side.
        memory: uint8 [lanes * versions + places, nbytes], all there is.
        places: uint8 [places, nbytes], a view of it.
        first_place: row of `memory` where the places begin.
        rows: by spec, [lanes * versions + places, layers, *shape], views of it.
        live: by spec, [lanes, layers, *shape], views of these: the first version of each lane.
        kept: by spec, [places, layers, *shape], likewise.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_lanes: int,
        num_places: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] | None = None,
        versions: int = 1,
    ) -> None:
        """`allocate`: makes uint8 memory of so many bytes; None: torch does."""
        self.versions = versions
        self.first_place = num_lanes * versions
        shape = self.first_place + num_places, layout.nbytes
        if allocate is None:
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        else:
            self.memory = allocate(shape[0] * shape[1]).view(shape).zero_()
        self.places = self.memory[self.first_place :]
        self.rows = _views(self.memory, layout.specs)
        self.live = tuple(rows[: self.first_place : versions] for rows in self.rows)
        self.kept = tuple(rows[self.first_place :] for rows in self.rows)

    def row_of(self, lane: int, version: int = 0) -> int:
        """The lane's row in `memory` and `rows`."""
        return lane * self.versions + version

    def check_start(self, place: int, num_cached: int) -> None:
        """Raise InvariantBroken unless a sequence can start so: behind cached tokens from a snapshot, else (-1) from
        nothing."""
        if (place < 0) != (num_cached == 0) or place >= len(self.places):
            raise InvariantBroken(f"a sequence starts behind {num_cached} tokens, from snapshot {place}")

    def begin(self, lane: int, place: int) -> None:
        """A sequence starts in a lane from a snapshot."""
        self.memory[self.row_of(lane)] = self.places[place]

    def settle(self, lane: int, version: int) -> None:
        """The lane goes on from this version, which becomes its first."""
        self.memory[self.row_of(lane)] = self.memory[self.row_of(lane, version)]

    def take_version(self, lane: int, version: int, place: int) -> None:
        """Copy a version of a lane's state to a place of snapshots."""
        self.places[place] = self.memory[self.row_of(lane, version)]

    def take(self, part: Part, lane: int, place: int) -> None:
        """Copy a part of a lane's state to a place of snapshots."""
        self.kept[part.spec][place, part.row] = self.live[part.spec][lane, part.row]


def _views(memory: torch.Tensor, specs: tuple[StateSpec, ...]) -> tuple[torch.Tensor, ...]:
    views, offset = [], 0
    for spec in specs:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        shape = (len(spec.layers), *spec.shape)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        views.append(memory[:, offset : offset + nbytes].view(dtype).view(len(memory), *shape))
        offset += spec.nbytes
    return tuple(views)
