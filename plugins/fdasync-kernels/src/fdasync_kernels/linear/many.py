"""The kernel of dense products of many rows, for tensors that the bulk copy engine can read and write.

As many programs as the device holds take the tiles in turn, and the loop over tiles and that over the inner dimension
are one: while results are rounded and stored, the next tile's first rows and weights come. Tiles that are taken at the
same time lie in a block, so that they read the same rows and weights.

Sums and roundings are as in `kernel.py`, bit for bit. Knows no shapes to check. Launched by `product.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.linear.kernel import plus_bias, times
from fdasync_kernels.overlap import wait_for_inputs
from fdasync_kernels.rounding import rounded

# tiles of rows in a block
_HEIGHT = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_rows"])
def linear_many_kernel(
    x, weight, bias, out, num_rows, outputs,
    INPUTS: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program makes COLUMNS outputs of ROWS rows, tile after tile; they are stored in PARTS, 1 or 2."""
    wait_for_inputs(OVERLAP)
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(outputs, COLUMNS)
    block = _HEIGHT * column_tiles
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        first_tile = number // block * _HEIGHT
        height = tl.minimum(row_tiles - first_tile, _HEIGHT)
        row = (first_tile + number % block % height) * ROWS
        column = number % block // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, INPUTS, DEPTH):
            # past the ends there are zeros, and what is past them is not stored
            sums = times(x.load([row, start]), weight.load([column, start]).T, sums, WIDEN)
        if BIASED:
            each = column + tl.arange(0, COLUMNS)
            sums = plus_bias(sums, tl.load(bias + each, mask=each < outputs, other=0.0)[None, :])
        dtype: tl.constexpr = out.dtype
        if PARTS == 1:
            out.store([row, column], rounded(sums, dtype).to(dtype))
        else:
            left, right = tl.split(sums.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
            out.store([row, column], rounded(left, dtype).to(dtype))
            out.store([row, column + COLUMNS // 2], rounded(right, dtype).to(dtype))
