"""Sums and means over the last dimension whose bits do not depend on the number of rows.

torch's own choose by the number of rows how many threads sum one. Here a program sums one row, by a tile and warps that
the row's size and dtype alone give. Accumulates in float32, as torch does. Knows no models. Runs on CUDA, or on the CPU
under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.layer.norm import as_rows, warps_of
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

# of a row, that a program holds at a time; no fewer than a warp of float32 takes
_WIDEST = 4096
_NARROWEST = 256


@triton.jit(do_not_specialize=["x_row"])
def _sum_kernel(x, out, x_row, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, MEAN: tl.constexpr):
    """A program sums a row: places WIDTH apart in order, then those sums."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, COLUMNS, WIDTH):
        sums += tl.load(x + row * x_row + start + at, mask=start + at < COLUMNS, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)
    if MEAN:
        total = tl.div_rn(total, COLUMNS + 0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row, rounded(total, dtype).to(dtype))


@operation
def row_sum(x: torch.Tensor, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sums of rows [..., H] over their last dimension: [...], or [..., 1] with `keepdim`.

    Summed in float32 and rounded once. One launch on the current stream, without synchronising; may be captured in a
    CUDA graph; the number of rows compiles nothing anew. No gradient.

    Args:
        x: bfloat16, float16 or float32. Read; rows whose leading dimensions are no view of one are copied first.
        dtype: of the result, of the three; None: of x.

    Returns:
        A new contiguous tensor on the device of `x`.

    Raises:
        BadInput: shapes or dtypes that the kernel does not take.
    """
    return _launch(x, keepdim, dtype, mean=False)


@operation
def row_mean(x: torch.Tensor, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The means of rows: the float32 sum of `row_sum`, divided by H, and then rounded. Otherwise as that."""
    return _launch(x, keepdim, dtype, mean=True)


def _launch(x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None, *, mean: bool) -> torch.Tensor:
    dtype = dtype or x.dtype
    if x.dtype not in FLOATS or dtype not in FLOATS:
        raise BadInput("x", f"{x.dtype}, summed as {dtype}, where bfloat16, float16 or float32 was expected")
    if not x.dim() or not x.shape[-1]:
        raise BadInput("x", f"shape {tuple(x.shape)} where [..., columns] was expected")
    columns = x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=dtype, device=x.device)
    if out.numel():
        flat, stride = as_rows(x, out.numel(), columns)
        width = min(_WIDEST, max(_NARROWEST, triton.next_power_of_2(columns)))
        grid: Any = (out.numel(),)
        _sum_kernel[grid](
            flat, out, stride, COLUMNS=columns, WIDTH=width, MEAN=mean,
            num_warps=warps_of(width, x.element_size()), enable_fp_fusion=False,
        )  # fmt: skip
    return out.unsqueeze(-1) if keepdim else out
