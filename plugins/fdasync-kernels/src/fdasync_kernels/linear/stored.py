"""Dense products with weights that stay as they were stored: FP8 with a scale for each block of 128 x 128.

Few rows wait for weights: a kernel reads values and scales, makes bfloat16 of them in registers (a value times its
scale, rounded once), and multiplies in float32; warps of a program share its inner dimension, so that enough bytes are
on their way, and their sums are added at the end. More rows are a library's product of the dequantised weight, which
another kernel writes first: that costs less than any kernel here that was tried.
Knows no models. Called by plugins. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.linear.kernel import plus_bias, times
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

#: rows that the kernel takes; more are a library's product
MOST_ROWS = 16
_SIDE = 128
_BLOCK = tl.constexpr(_SIDE)
# of the kernel that dequantises
_ROWS, _COLUMNS = 16, 256


class StoredTile(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, columns: of a program's tile; weights are the left side of its product.
        depth: of the inner dimension, of a step of the loop: a block that shares a scale.
        ways: parts of a program, which take such steps in turn.
        warps, stages: of a program, and of its pipeline of loads.
    """

    rows: int
    columns: int
    depth: int
    ways: int
    warps: int
    stages: int


def choose_stored_tile(rows: int) -> StoredTile:
    """The tile of a product."""
    return StoredTile(8 if rows <= 8 else 16, 16, _SIDE, 4, 4, 4)


def all_stored_tiles() -> tuple[StoredTile, ...]:
    """Whatever `choose_stored_tile` may answer: for proofs and tests."""
    return choose_stored_tile(1), choose_stored_tile(MOST_ROWS)


@operation
def stored_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y [..., N] = x [..., K] @ (values times scales) [N, K]^T (+ bias), bfloat16.

    Queues one launch on the current stream, or for more than `MOST_ROWS` rows two beside a temporary of N x K bfloat16;
    without synchronising; a graph can capture them. No gradient. The weight may be written in place between calls.

    Args:
        x: bfloat16; rows may be strided, a row may not. Read.
        values: float8_e4m3fn [N, K], contiguous, K a multiple of 16. Read.
        scales: float32 [N / 128, K / 128], rounded up, contiguous. Read.
        bias: [N] bfloat16, contiguous. Read.

    Returns:
        A new tensor, the caller's.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    _check(values, scales, bias)
    if not x.dim() or x.dtype is not torch.bfloat16 or x.shape[-1] != values.shape[1]:
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)} beside a weight {tuple(values.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MOST_ROWS:
        return torch.nn.functional.linear(x, dequantised(values, scales), bias)
    out = torch.empty((*x.shape[:-1], len(values)), dtype=x.dtype, device=x.device)
    if len(rows):
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        launch_stored(rows, values, scales, bias, out.view(-1, len(values)), choose_stored_tile(len(rows)))
    return out


def launch_stored(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: StoredTile,
) -> None:
    """`stored_linear` of rows [T, K], T from 1, by a tile of the caller's into `out` [T, N], contiguous, unchecked: for
    measurements and tests."""
    rows, inputs = x.shape
    outputs = len(values)
    stored_linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns),)](
        x, values, scales, scales if bias is None else bias, out, rows, outputs,
        # the stride of a single row may be anything in torch
        x.stride(0) if rows > 1 else inputs,
        INPUTS=inputs, EVEN=outputs % tile.columns == 0, BIASED=bias is not None, WIDEN=x.device.type == "cpu",
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, WAYS=tile.ways, STAGES=tile.stages,
        num_warps=tile.warps, **overlap(x.device),
    )  # fmt: skip


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] that values and scales of `stored_linear` stand for, bfloat16, new: one launch."""
    _check(values, scales, None)
    outputs, inputs = values.shape
    out = torch.empty((outputs, inputs), dtype=torch.bfloat16, device=values.device)
    stored_dequantise[(triton.cdiv(outputs, _ROWS), triton.cdiv(inputs, _COLUMNS))](
        values, scales, out, outputs, inputs, ROWS=_ROWS, COLUMNS=_COLUMNS, **overlap(values.device)
    )
    return out


def _check(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
    if values.dtype is not torch.float8_e4m3fn or values.dim() != 2 or not values.is_contiguous() or not values.numel():
        raise BadInput("values", f"{values.dtype} {tuple(values.shape)} where contiguous float8_e4m3fn was expected")
    outputs, inputs = values.shape
    if inputs % 16:
        raise BadInput("values", f"rows of {inputs}", limit="multiples of 16")
    wanted = (-(-outputs // _SIDE), -(-inputs // _SIDE))
    if scales.dtype is not torch.float32 or tuple(scales.shape) != wanted or not scales.is_contiguous():
        raise BadInput("scales", f"{scales.dtype} {tuple(scales.shape)} where float32 {wanted} was expected")
    if bias is not None and (bias.dtype is not torch.bfloat16 or bias.shape != (outputs,) or bias.stride(0) != 1):
        raise BadInput("bias", f"{bias.dtype} {tuple(bias.shape)} where bfloat16 {(outputs,)} was expected")


@triton.jit
def _plain(value, scale):
    """bfloat16 of FP8 values and their scales."""
    return rounded(value.to(tl.float32) * scale, tl.bfloat16).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_rows"])
def stored_linear_kernel(
    x, values, scales, bias, out, num_rows, outputs, x_row,
    INPUTS: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WAYS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program makes COLUMNS outputs of ROWS rows; each of WAYS parts takes every WAYS-th step of DEPTH inner places.
    EVEN: the outputs are a multiple of COLUMNS."""
    wait_for_inputs(OVERLAP)
    tiles = tl.cdiv(outputs, COLUMNS)
    first_row = tl.program_id(0) // tiles * ROWS
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    # outputs past the last are replaced by the first, and not stored
    own = column if EVEN else tl.where(column < outputs, column, 0)
    way = tl.arange(0, WAYS)
    depth = way[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    weight_at = values + own[None, :, None].to(tl.int64) * INPUTS + depth[:, None, :]
    scale_at = scales + own[None, :] // _BLOCK * ((INPUTS + _BLOCK - 1) // _BLOCK) + (way * DEPTH // _BLOCK)[:, None]
    x_at = x + row[None, None, :].to(tl.int64) * x_row + depth[:, :, None]
    here = (row < num_rows)[None, None, :]
    sums = tl.zeros((WAYS, COLUMNS, ROWS), tl.float32)
    for start in tl.range(0, INPUTS, DEPTH * WAYS, num_stages=STAGES):
        if INPUTS % (DEPTH * WAYS) == 0:
            value = tl.load(weight_at + start)
            scale = tl.load(scale_at + start // _BLOCK)
            rows = tl.load(x_at + start, mask=here, other=0.0)
        else:
            inside = start + depth < INPUTS
            value = tl.load(weight_at + start, mask=inside[:, None, :], other=0.0)
            scale = tl.load(scale_at + start // _BLOCK, mask=(start + way * DEPTH < INPUTS)[:, None], other=0.0)
            rows = tl.load(x_at + start, mask=here & inside[:, :, None], other=0.0)
        sums = times(_plain(value, scale[:, :, None]), rows, sums, WIDEN)
    total = tl.sum(sums, 0)
    if BIASED:
        total = plus_bias(total, tl.load(bias + column, mask=column < outputs, other=0.0)[:, None])
    at = out + row[None, :].to(tl.int64) * outputs + column[:, None]
    real = (row < num_rows)[None, :] & (column < outputs)[:, None]
    tl.store(at, rounded(total, tl.bfloat16).to(tl.bfloat16), mask=real)


@triton.jit
def stored_dequantise(
    values, scales, out, outputs, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr
):
    """A program writes ROWS x COLUMNS values of the weight."""
    # what a product before it reads may lie where this one writes
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < outputs)[:, None] & (column < inputs)[None, :]
    at = row[:, None].to(tl.int64) * inputs + column[None, :]
    value = tl.load(values + at, mask=inside, other=0.0)
    scale_at = row[:, None] // _BLOCK * ((inputs + _BLOCK - 1) // _BLOCK) + column[None, :] // _BLOCK
    scale = tl.load(scales + scale_at, mask=inside, other=0.0)
    tl.store(out + at, _plain(value, scale), mask=inside)
