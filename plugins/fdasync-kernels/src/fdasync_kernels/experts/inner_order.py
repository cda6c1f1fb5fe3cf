"""The order in which rows meet FP8 weights that the bulk copy engine brings.

A thread of the hardware's product of 16 inner places wants 2t, 2t + 1, 2t + 8 and 2t + 9. Of bytes that is two loads of
two; bytes 4t .. 4t + 3 are one load of four. So weights stay as they are and are taken for those places, and rows are
permuted likewise, within their 16: sums of 16 products have no order in hardware, so no bit changes. Knows no experts.
Used by `stored_kernels.py` and `chain.py`. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fdasync_kernels.overlap import overlap, wait_for_inputs

# columns of a program
_BLOCK = 2048


@triton.jit
def in_order(value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS], a multiple of 16, with columns 4t + 2h + r of each 16 at 8h + 2t + r."""
    return value.reshape(ROWS, COLUMNS // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


@triton.jit
def column_at(COLUMNS: tl.constexpr):
    """The column that is at each place of such a row."""
    place = tl.arange(0, COLUMNS)
    pair = place // 2
    column = (pair // 8 * 8 + pair % 4 * 2 + pair // 4 % 2) * 2 + place % 2
    # what the compiler does not see: two of them are one load
    return tl.max_contiguous(tl.multiple_of(column, [2]), [2])


def ordered_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, K], K a multiple of 16, in that order: new, contiguous. One launch; a row may not be strided."""
    count, width = rows.shape
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    ordered_rows_kernel[(count, triton.cdiv(width, _BLOCK))](
        rows, out, rows.stride(0), WIDTH=width, BLOCK=_BLOCK, **overlap(rows.device)
    )
    return out


@triton.jit
def ordered_rows_kernel(rows, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A program writes BLOCK columns of a row."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + row * row_stride + column, mask=column < WIDTH, other=0.0)
    value = in_order(value[None, :], 1, BLOCK).reshape(BLOCK)
    tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)
