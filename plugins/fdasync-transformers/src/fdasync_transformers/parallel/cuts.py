"""A tensor of the model, and the part of it that one rank holds.

A cut runs along one dimension. A tensor that packs several matrices along it (gate and up projections) is cut in each
of them. Stored tensors reach a part in any pieces: whole, rows, flat runs. Knows tensors; knows no models and no files.
Made by `plan.py`; used by the room `weights`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank holds: slice `index` of `count` equal ones.

    Attributes:
        dim: that is cut, from 0.
        count: of slices. Fewer than ranks: several ranks hold the same.
        index: of this rank's slice.
        pieces: how many equal pieces along `dim` are cut each: the part is the slice of the first, then of the second.
    """

    dim: int
    count: int
    index: int
    pieces: int = 1

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part."""
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `shape`."""
        return (*part[: self.dim], part[self.dim] * self.count, *part[self.dim + 1 :])

    def of_rank(self, rank: int, ranks: int) -> Cut:
        """The cut of another rank."""
        return replace(self, index=rank * self.count // ranks)

    def runs(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(first, in the part; first, in the whole; how many) of each piece, along a dimension of `size`."""
        piece = size // self.pieces
        each = piece // self.count
        for number in range(self.pieces):
            yield number * each, number * piece + self.index * each, each

    def inside_row(self, parts: int) -> Cut:
        """The cut of one of `parts` equal ones, along their first dimension, of a row of this tensor.

        Raises InvariantBroken where those parts are not cut alike.
        """
        if not self.dim or (self.dim == 1 and self.pieces % parts):
            raise InvariantBroken(f"one of {parts} parts of a row, of a tensor that is cut by {self}")
        return replace(self, dim=self.dim - 1, pieces=self.pieces // parts if self.dim == 1 else self.pieces)


@dataclass(frozen=True)
class Target:
    """Where a stored tensor goes: a tensor of its shape, or the part of it that this rank holds.

    Attributes:
        tensor: of the model, or a view of one.
        shape: of the stored tensor.
        cut: None: `tensor` has that shape.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    cut: Cut | None = None

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Target:
        """A tensor that is not cut."""
        return cls(tensor, tuple(tensor.shape))

    @property
    def device(self) -> torch.device:
        """That the tensor lies on."""
        return self.tensor.device

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Copy rows `first` and further ones of the stored tensor, of any dtype and device."""
        cut = self.cut
        if cut is None:
            (self.tensor[first : first + len(rows)] if self.shape else self.tensor).copy_(rows)
            return
        for here, there, count in cut.runs(self.shape[cut.dim]):
            if cut.dim:
                held = self.tensor[first : first + len(rows)].narrow(cut.dim, here, count)
                held.copy_(rows.narrow(cut.dim, there, count))
                continue
            begin, end = max(first, there), min(first + len(rows), there + count)
            if begin < end:
                self.tensor[here + begin - there : here + end - there].copy_(rows[begin - first : end - first])

    def put_flat(self, first: int, source: torch.Tensor) -> None:
        """Copy flat elements, from number `first` of the stored tensor on, in the order of its shape."""
        cut = self.cut
        if cut is None:
            _fill(self.tensor, first, source)
            return
        inner = math.prod(self.shape[1:])
        if not cut.dim:
            for here, there, count in cut.runs(self.shape[0]):
                begin, end = max(first, there * inner), min(first + len(source), (there + count) * inner)
                if begin < end:
                    _fill(self.tensor, begin + (here - there) * inner, source[begin - first : end - first])
            return
        while len(source):
            row, offset = divmod(first, inner)
            rows = 0 if offset else len(source) // inner
            count = rows * inner or min(inner - offset, len(source))
            if rows:
                self.put(row, source[:count].view(rows, *self.shape[1:]))
            else:
                within = Target(self.tensor[row], self.shape[1:], replace(cut, dim=cut.dim - 1))
                within.put_flat(offset, source[:count])
            first += count
            source = source[count:]


def _fill(target: torch.Tensor, first: int, source: torch.Tensor) -> None:
    """Copy flat `source` to the elements of `target` from number `first` on, in the order of its shape."""
    if target.is_contiguous():
        target.view(-1)[first : first + len(source)].copy_(source)
        return
    inner = target[0].numel()
    while len(source):
        row, offset = divmod(first, inner)
        rows = 0 if offset else len(source) // inner
        count = rows * inner or min(inner - offset, len(source))
        if rows:
            target[row : row + rows].copy_(source[:count].view(rows, *target.shape[1:]))
        else:
            _fill(target[row], offset, source[:count])
        first += count
        source = source[count:]
