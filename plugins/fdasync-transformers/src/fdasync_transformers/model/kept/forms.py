"""The two forms in which matrices stay as they are stored, and the published recipes that make them of plain ones.

FP8: E4M3 values, and a float32 scale for each block of 128 x 128 (DeepSeek-V3, Qwen3-FP8, MiniMax-M2). The recipe is
theirs: a block's largest magnitude over 448 is its scale, each value over it is rounded to the nearest. MXFP4: values
of four bits, and an exponent for each 32 (gpt-oss). Its weights were trained in that form, and no recipe of theirs is
published; this one is the conversion of the OCP microscaling specification 1.0 (section 6.3): the exponent is the
largest magnitude's less 2, values are rounded to the nearest, ties to even, and saturate at 6.

Weights are rounded to bfloat16 first, as a server of plain weights rounds them: so a trainer's float32 and bfloat16
give the same. Knows matrices; knows no models and no files. Used by this room and `weights/kept`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from fdasync_kernels.experts.stored import BLOCK, GROUP, StoredWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

_FP8_MOST = 448.0
_BIAS = 127
# of the largest value of four bits, 6
_FOUR_BITS_EXPONENT = 2
# between neighbouring magnitudes of four bits, where a tie goes up: to the even one of both
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


class Form(ABC):
    """How matrices are kept. "Logical" is what the library's plain weights have: bfloat16, their shape.

    Attributes:
        name: of the scheme, for people.
        kind: as the kernels name it.
        scales_end: of a parameter's name, of its scales.
        stored_ends: of names in a checkpoint: of values and of scales.
        transposed: the library has such weights by columns, and they are stored by rows.
    """

    name: ClassVar[str]
    kind: ClassVar[Literal["fp8", "mxfp4"]]
    scales_end: ClassVar[str]
    stored_ends: ClassVar[tuple[str, str]]
    transposed: ClassVar[bool]

    @abstractmethod
    def shapes(self, logical: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of values and scales."""

    @abstractmethod
    def logical(self, values: Sequence[int]) -> tuple[int, ...]:
        """The logical shape of values of this shape."""

    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of values and scales."""

    @abstractmethod
    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of logical matrices, on their device. Raises BadInput for weights that the form cannot
        have."""

    @abstractmethod
    def dequantised(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Logical matrices, bfloat16, of what a checkpoint has: FP8 with float scales, blocks and exponents of MXFP4.
        Raises BadInput as `quantised`."""

    @abstractmethod
    def problem(self, logical: Sequence[int], *, halves: int) -> str:
        """Why a parameter of this shape cannot be kept, for people; "" if it can be. `halves`: matrices that it has
        one below the other, each stored by itself."""

    def empty(self, logical: Sequence[int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for values and scales of a logical shape."""
        values, scales = (
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes(logical), self.dtypes(), strict=True)
        )
        return values, scales


class Fp8(Form):
    """See the module."""

    name = "FP8"
    kind = "fp8"
    scales_end = "_scale_inv"
    stored_ends = ("", "_scale_inv")
    transposed = False

    def shapes(self, logical: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *lead, rows, columns = logical
        return tuple(logical), (*lead, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))

    def logical(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.float8_e4m3fn, torch.float32

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *lead, height, width = rows.shape
        numbers = rows.to(torch.bfloat16).float()
        whole = torch.nn.functional.pad(numbers, (0, -width % BLOCK, 0, -height % BLOCK))
        grid = whole.view(*lead, whole.shape[-2] // BLOCK, BLOCK, whole.shape[-1] // BLOCK, BLOCK)
        # a tensor: by a number CUDA multiplies with its inverse, which has other last bits
        scales = grid.abs().amax((-3, -1)) / torch.full((), _FP8_MOST, device=rows.device)
        # of a block of zeros, and of numbers so small that their scale is none
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        values = (grid / scales[..., :, None, :, None]).clamp(-_FP8_MOST, _FP8_MOST).view(whole.shape)
        return values[..., :height, :width].to(torch.float8_e4m3fn), scales

    def dequantised(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        *_, height, width = values.shape
        grid = scales.float().repeat_interleave(BLOCK, -2)[..., :height, :].repeat_interleave(BLOCK, -1)[..., :width]
        return (values.float() * grid).to(torch.bfloat16)

    def problem(self, logical: Sequence[int], *, halves: int) -> str:
        rows, columns = logical[-2] // halves, logical[-1]
        if halves > 1 and rows % BLOCK:
            return f"of {rows} rows each, which blocks of {BLOCK} cross"
        return f"with rows of {columns}, no multiple of 16" if columns % 16 else ""


class Mxfp4(Form):
    """See the module. Logical shapes are [experts, columns, rows]."""

    name = "MXFP4"
    kind = "mxfp4"
    scales_end = "_scales"
    stored_ends = ("_blocks", "_scales")
    transposed = True

    def shapes(self, logical: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *lead, columns, rows = logical
        return (*lead, rows, columns // 2), (*lead, rows, columns // GROUP)

    def logical(self, values: Sequence[int]) -> tuple[int, ...]:
        *lead, rows, nbytes = values
        return (*lead, 2 * nbytes, rows)

    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.uint8, torch.uint8

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = rows.to(torch.bfloat16).float().transpose(-2, -1)
        groups = numbers.reshape(*numbers.shape[:-1], -1, GROUP)
        most = groups.abs().amax(-1)
        exponents = torch.frexp(most).exponent - 1 - _FOUR_BITS_EXPONENT
        exponents = torch.where(most > 0, exponents, -_BIAS).clamp(min=-_BIAS)
        # powers of two by their bits, which are exact everywhere
        powers = ((_BIAS - exponents) << 23).to(torch.int32).view(torch.float32)
        sizes = groups.abs() * powers[..., None]
        codes = torch.zeros(groups.shape, dtype=torch.uint8, device=rows.device)
        for middle, up in _MIDDLES:
            codes += sizes >= middle if up else sizes > middle
        codes |= torch.signbit(groups).to(torch.uint8) << 3
        return self.packed(codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + _BIAS).to(torch.uint8))

    def packed(self, blocks: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of blocks as checkpoints have them, [..., groups, 16], in the order of the kernels. Raises
        BadInput for an exponent that no weight has."""
        lead, shape = blocks.shape[:-3], blocks.shape[-3:]
        made = StoredWeights.of_mxfp4(blocks.reshape(-1, *shape), exponents.reshape(-1, *shape[:-1]))
        return made.values.view(*lead, *made.values.shape[1:]), exponents

    def dequantised(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        made = StoredWeights.of_mxfp4(values, scales)
        return torch.stack([made.dequantised(expert).T for expert in range(len(values))])

    def problem(self, logical: Sequence[int], *, halves: int) -> str:  # noqa: ARG002 - the contract's
        return f"with rows of {logical[-2]}, no multiple of {2 * GROUP}" if logical[-2] % (2 * GROUP) else ""


FP8, MXFP4 = Fp8(), Mxfp4()
FORMS: tuple[Form, ...] = (FP8, MXFP4)
