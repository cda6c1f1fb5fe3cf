"""Where tensors go whose place is kept as stored, or which come so: they are quantised, repacked or joined on the way.

Plain tensors are quantised by the form's recipe, block by block; so a block must have come whole before it is. Memory
is written in place. Knows tensors; knows no models and no files. Made by `mapping.py` and `arriving.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch
from fdasync_kernels.experts.stored import BLOCK, GROUP, check_exponents

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.kept.forms import MXFP4

if TYPE_CHECKING:
    from fdasync_transformers.model.kept.forms import Form
    from fdasync_transformers.parallel.cuts import Target


# most elements that are quantised at once: in float32 they take some times as much
_PUT_ELEMENTS = 1 << 24


class Place(Protocol):
    """Where the bytes of one tensor go, as they come."""

    def put_flat(self, first: int, source: torch.Tensor) -> None:
        """Flat elements, from number `first` of the tensor on."""


class InRows(ABC):
    """Collects flat elements, which come in order, to whole rows of a tensor; a `Place`.

    Attributes:
        shape: of the tensor that comes.
        step: rows that are put at once, or a multiple of them where they come at once; the last ones may be fewer.
    """

    def __init__(self, shape: tuple[int, ...], step: int) -> None:
        self.shape = shape
        self.step = step
        self._row = 0
        self._filled = 0
        self._held: torch.Tensor | None = None

    @abstractmethod
    def put(self, first: int, rows: torch.Tensor) -> None:
        """Rows `first` and further ones; `first` is a multiple of `step`, and so is their number, or they are the
        last."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """On which rows are collected."""

    def put_flat(self, first: int, source: torch.Tensor) -> None:
        """See `Place`; element 0 begins the tensor anew."""
        inner = math.prod(self.shape[1:])
        if not first:
            self._row = self._filled = 0
        if first != self._row * inner + self._filled:
            raise InvariantBroken(f"element {first} came, and not {self._row * inner + self._filled}")
        while len(source):
            left = self.shape[0] - self._row
            # whole steps, many in one put: each put costs a device some launches
            most = max(1, _PUT_ELEMENTS // (self.step * inner)) * self.step
            ready = min(len(source) // inner, left, most)
            count = ready if ready == left else ready // self.step * self.step
            if count and not self._filled:
                rows, source = source[: count * inner], source[count * inner :]
            else:
                count = min(self.step, left)
                if self._held is None or self._held.dtype is not source.dtype:
                    self._held = torch.empty(self.step * inner, dtype=source.dtype, device=self.device)
                taken = min(len(source), count * inner - self._filled)
                self._held[self._filled : self._filled + taken].copy_(source[:taken])
                self._filled += taken
                source = source[taken:]
                if self._filled < count * inner:
                    return
                rows = self._held[: count * inner]
            self.put(self._row, rows.to(self.device).view(count, *self.shape[1:]))
            self._row += count
            self._filled = 0
        if self._row == self.shape[0]:
            self._held = None


class KeptTarget(InRows):
    """The place of a plain tensor whose values are kept: it is quantised there.

    Attributes:
        values, scales: where the parts go.
        form: of the values.
    """

    def __init__(self, form: Form, values: Target, scales: Target) -> None:
        shape = form.logical(values.shape)
        if len(shape) == 2 and form is MXFP4:
            raise InvariantBroken("experts of MXFP4 come together")
        # a matrix by bands of blocks, several matrices one by one
        super().__init__(shape, BLOCK if len(shape) == 2 else 1)
        self.form = form
        self.values = values
        self.scales = scales

    @property
    def device(self) -> torch.device:
        return self.values.device

    def put(self, first: int, rows: torch.Tensor) -> None:
        values, scales = self.form.quantised(rows)
        self.put_stored(first, values, scales)

    def put_stored(self, first: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Rows `first` and further ones as the form has them, and their scales."""
        self.values.put(first, values)
        self.scales.put(first // self.step, scales)


class Blocks(InRows):
    """The place of MXFP4 values as a checkpoint has them, of matrices that are kept so: [experts, rows, groups, 16]."""

    def __init__(self, values: Target) -> None:
        experts, rows, nbytes = values.shape
        super().__init__((experts, rows, nbytes // (GROUP // 2), GROUP // 2), 1)
        self._values = values

    @property
    def device(self) -> torch.device:
        return self._values.device

    def put(self, first: int, rows: torch.Tensor) -> None:
        # exponents come by themselves, where they are judged
        nothing = torch.zeros(rows.shape[:-1], dtype=torch.uint8, device=rows.device)
        self._values.put(first, MXFP4.packed(rows, nothing)[0])


class Exponents(InRows):
    """The place of MXFP4 exponents. Raises BadInput for an exponent that no weight has."""

    def __init__(self, scales: Target) -> None:
        super().__init__(scales.shape, 1)
        self._scales = scales

    @property
    def device(self) -> torch.device:
        return self._scales.device

    def put(self, first: int, rows: torch.Tensor) -> None:
        check_exponents(rows)
        self._scales.put(first, rows)


class Joining:
    """Values and scales that come, as a checkpoint has them, for a place which is not kept so: they are put there
    dequantised when both are whole.

    Args:
        form: of the values.
        shapes: of values and scales, as they come.
        target: where they go.

    Attributes:
        sides: the places of values and of scales.
    """

    def __init__(
        self,
        form: Form,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        target: Target | KeptTarget,
    ) -> None:
        self._form = form
        self._target = target
        values, scales = shapes
        self.sides = _Side(self, values), _Side(self, scales)

    @property
    def device(self) -> torch.device:
        """On which both are held until then."""
        return self._target.device

    def join(self) -> None:
        """Put them, if both are whole."""
        values, scales = (side.whole for side in self.sides)
        if values is None or scales is None:
            return
        for side in self.sides:
            side.whole = None
        self._target.put(0, self._form.dequantised(values, scales))


class _Side(InRows):
    """One of both, which comes as one row."""

    def __init__(self, joining: Joining, shape: tuple[int, ...]) -> None:
        super().__init__((1, *shape), 1)
        self.whole: torch.Tensor | None = None
        self._joining = joining

    @property
    def device(self) -> torch.device:
        return self._joining.device

    def put(self, first: int, rows: torch.Tensor) -> None:
        del first
        # what it was collected in is used again
        self.whole = rows[0].clone()
        self._joining.join()
