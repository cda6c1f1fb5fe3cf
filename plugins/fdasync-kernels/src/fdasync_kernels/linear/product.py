"""Dense products in one order of sums: y = x W^T + b, and batches of plain products.

A row's bits depend on that row and the weight, and not on the rows beside it: no product is split over its inner
dimension, and every tile walks that dimension in order. A library's products are split or not by the number of rows.
Knows no models. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fdasync.errors import BadInput
from fdasync_kernels.chip import chip_of, processors_of
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.linear.kernel import linear_kernel
from fdasync_kernels.linear.many import linear_many_kernel
from fdasync_kernels.linear.tiles import Tile, choose_tile
from fdasync_kernels.overlap import overlap
from fdasync_kernels.registry import operation

# a batch is the second dimension of a grid
_MOST_BATCHES = 65535


@operation
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y [..., N] = x [..., K] @ weight [N, K]^T (+ bias), summed in float32 and rounded once.

    A row's bits depend on that row, the weight, the bias and the device, and not on the number of rows. The bias is
    added to the float32 sum, as the library does, and float32 products are exact (no TF32). One launch on the current
    stream, without synchronising; may be captured in a CUDA graph. The number of rows compiles a kernel per regime and
    no more. No gradient. The weight may be written in place between calls.

    Args:
        x: bfloat16, float16 or float32; rows may be strided, a row may not. Rows whose leading dimensions are no view
            of one are copied first. Read.
        weight: of the same dtype; rows or columns may be strided, one of both may not. Read.
        bias: [N], contiguous, of the same dtype; None: none. Read.
        out: [..., N] of the same dtype, whose rows may be strided and whose leading dimensions are a view of one;
            overlaps no other argument. Written. None: a new contiguous tensor.

    Returns:
        y, on the device of `x`.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    if not takes(weight, bias):
        raise BadInput("weight", f"{weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}, or its bias")
    if not x.dim() or x.dtype is not weight.dtype or x.shape[-1] != weight.shape[1]:
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)} beside a weight {weight.dtype} {tuple(weight.shape)}")
    shape = (*x.shape[:-1], len(weight))
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != shape or out.dtype is not x.dtype or out.device != x.device or out.stride(-1) != 1:
        raise BadInput("out", f"{out.dtype} {tuple(out.shape)} where {x.dtype} {shape} was expected")
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    try:
        into = out.view(-1, len(weight))
    except RuntimeError as error:
        raise BadInput("out", f"strides {out.stride()}, which are not those of rows") from error
    if len(rows):
        launch_linear(rows, weight, bias, into, _chosen(rows, weight, into))
    return out


@operation
def batched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [B, M, K] @ b [B, K, N], each in the order of `linear`: c[i] has the bits of `linear(a[i], b[i].T)`.

    Args:
        a: bfloat16, float16 or float32; the last dimension is contiguous. Read.
        b: of the same dtype; K or N is contiguous. Either's batch may be expanded. Read.
        out: [B, M, N], the last dimension contiguous; overlaps no other argument. Written. None: a new tensor.

    Otherwise as `linear`.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    if a.dim() != 3 or a.dtype not in FLOATS or not a.numel() or a.shape[0] > _MOST_BATCHES or a.stride(2) != 1:
        raise BadInput("a", f"{a.dtype} {tuple(a.shape)} with strides {a.stride()}", limit=_MOST_BATCHES)
    fits = b.dim() == 3 and b.dtype is a.dtype and b.shape[:2] == (a.shape[0], a.shape[2]) and b.shape[2] > 0
    if not fits or 1 not in b.stride()[1:]:
        raise BadInput("b", f"{b.dtype} {tuple(b.shape)} with strides {b.stride()} beside a {tuple(a.shape)}")
    batches, rows, outputs = a.shape[0], a.shape[1], b.shape[2]
    if out is None:
        out = torch.empty((batches, rows, outputs), dtype=a.dtype, device=a.device)
    elif tuple(out.shape) != (batches, rows, outputs) or out.dtype is not a.dtype or out.stride(2) != 1:
        raise BadInput("out", f"{out.dtype} {tuple(out.shape)} where {a.dtype} {(batches, rows, outputs)} was expected")
    chip, processors = chip_of(a.device), processors_of(a.device)
    tile = choose_tile(rows, batches * outputs, a.dtype, large=chip.large, bulk=False, processors=processors)
    _walk(a, b.transpose(1, 2), None, out, tile)
    return out


def takes(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernels take a weight and a bias."""
    if weight.dtype not in FLOATS or weight.dim() != 2 or not weight.numel() or 1 not in weight.stride():
        return False
    return bias is None or (bias.shape == weight.shape[:1] and bias.dtype is weight.dtype and bias.is_contiguous())


def launch_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> None:
    """`linear` of rows [T, K], T from 1, by a tile of the caller's into `out`, without checks: for measurements, and
    for tests of the bits. A tile of `many` needs tensors that `bulk` takes."""
    if not tile.many:
        _walk(x.unsqueeze(0), weight.unsqueeze(0), bias, out.unsqueeze(0), tile)
        return
    rows, outputs = out.shape
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns)
    linear_many_kernel[(min(tiles, tile.together * processors_of(x.device)),)](
        _descriptor(x, tile.rows, tile.depth),
        _descriptor(weight, tile.columns, tile.depth),
        weight if bias is None else bias,
        _descriptor(out, tile.rows, tile.columns // tile.parts),
        rows,
        outputs,
        INPUTS=x.shape[1],
        BIASED=bias is not None,
        WIDEN=x.device.type == "cpu",
        PARTS=tile.parts,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(x.device),
    )


def bulk(*tensors: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read and write matrices: rows of 16 byte units, each contiguous."""
    return all(
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors
    )


def _chosen(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Tile:
    rows, outputs = out.shape
    # the stride of a single row may be anything, and few rows are not for the copy engine
    chip, fits = chip_of(x.device), rows > 1 and bulk(x, weight, out)
    return choose_tile(rows, outputs, x.dtype, large=chip.large, bulk=fits, processors=processors_of(x.device))


def _walk(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
    """[B, M, K] by weights [B, N, K]."""
    batches, rows, inputs = a.shape
    outputs = weight.shape[1]
    grid: Any = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns), batches)
    linear_kernel[grid](
        a,
        weight,
        # without a bias any pointer does: that kernel has no instruction for it
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        # the stride of a single row may be anything in torch
        a.stride(1) if rows > 1 else inputs,
        weight.stride(1),
        weight.stride(2),
        out.stride(1) if rows > 1 else outputs,
        a.stride(0) if batches > 1 else 0,
        weight.stride(0) if batches > 1 else 0,
        out.stride(0) if batches > 1 else 0,
        INPUTS=inputs,
        EVEN=outputs % tile.columns == 0,
        BIASED=bias is not None,
        WIDEN=a.device.type == "cpu",
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWAP=tile.swap,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **overlap(a.device),
    )


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])
