"""The memory of recurrent state: one live state by lane, and places of snapshots, both of the same bytes.

A state is the parts of `StateLayout.specs`, one after the other, as `fdasync.cache.snapshots` lays out a snapshot: so a
snapshot is one run of bytes, in a place here or on the host. Knows no modules and no steps. Made by `runner.py`, and by
what plays steps at the start.
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
        """Of a live state, and of a snapshot."""
        return snapshot_nbytes(self.specs)


class States:
    """See the module. Zeroed.

    Attributes:
        memory: uint8 [lanes + places, nbytes], all there is.
        places: uint8 [places, nbytes], a view of it.
        rows: by spec, [lanes + places, layers, *shape], views of it.
        live: by spec, [lanes, layers, *shape], views of these.
        kept: by spec, [places, layers, *shape], likewise.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_lanes: int,
        num_places: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`allocate`: makes uint8 memory of so many bytes; None: torch does."""
        shape = num_lanes + num_places, layout.nbytes
        if allocate is None:
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        else:
            self.memory = allocate(shape[0] * shape[1]).view(shape).zero_()
        self._lanes, self.places = self.memory[:num_lanes], self.memory[num_lanes:]
        self.rows = _views(self.memory, layout.specs)
        self.live = tuple(rows[:num_lanes] for rows in self.rows)
        self.kept = tuple(rows[num_lanes:] for rows in self.rows)

    @property
    def num_lanes(self) -> int:
        """Live states; the places begin behind them."""
        return len(self._lanes)

    def check_start(self, place: int, num_cached: int) -> None:
        """Raise InvariantBroken unless a sequence can start so: behind cached tokens from a snapshot, else (-1) from
        nothing."""
        if (place < 0) != (num_cached == 0) or place >= len(self.places):
            raise InvariantBroken(f"a sequence starts behind {num_cached} tokens, from snapshot {place}")

    def begin(self, lane: int, place: int) -> None:
        """A sequence starts in a lane from a snapshot."""
        self._lanes[lane] = self.places[place]

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
