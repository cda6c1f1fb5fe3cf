"""The kernel of dense products: every tile walks the inner dimension in order, in float32, and rounds once.

Products of few rows wait for weights, so many programs take few outputs each, whose weights are many steps ahead in
flight. Knows no shapes to check and no tiles to choose: `product.py` launches it. `many.py` is for many rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.overlap import wait_for_inputs
from fdasync_kernels.rounding import rounded


@triton.jit
def times(left, right, sums, WIDEN: tl.constexpr):
    """sums + left @ right in float32, in order; WIDEN: for the interpreter, which takes bfloat16 for its bits."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def plus_bias(sums, bias):
    """sums + bias, in this order at every length of a product: the compiler takes what a plain addition adds to a
    product of one step as that product's first addend. A fused addition it leaves where it is; times 1 it rounds once.
    """
    return tl.fma(sums, 1.0, bias.to(tl.float32))


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, bias, out, num_rows, outputs, x_row, weight_output, weight_input, out_row,
    x_batch, weight_batch, out_batch,
    INPUTS: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program makes COLUMNS outputs of ROWS rows of one product; EVEN: the outputs are a multiple of COLUMNS."""
    wait_for_inputs(OVERLAP)
    tiles = tl.cdiv(outputs, COLUMNS)
    first_row = tl.program_id(0) // tiles * ROWS
    first = tl.program_id(0) % tiles * COLUMNS
    # scalar places are wide, places within a tile are narrow and live in fewer registers
    batch = tl.program_id(1).to(tl.int64)
    x += batch * x_batch + first_row.to(tl.int64) * x_row
    weight += batch * weight_batch + first.to(tl.int64) * weight_output
    out += batch * out_batch + first_row.to(tl.int64) * out_row + first
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    EVEN_DEPTH: tl.constexpr = INPUTS % DEPTH == 0
    if SWAP:
        x_at = row[None, :] * x_row + depth[:, None]
        weight_at = column[:, None] * weight_output + depth[None, :] * weight_input
        here = (first_row + row < num_rows)[None, :]
        real = (first + column < outputs)[:, None]
        at = row[None, :] * out_row + column[:, None]
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        x_at = row[:, None] * x_row + depth[None, :]
        weight_at = column[None, :] * weight_output + depth[:, None] * weight_input
        here = (first_row + row < num_rows)[:, None]
        real = (first + column < outputs)[None, :]
        at = row[:, None] * out_row + column[None, :]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        inputs = weight + tl.cast(start, tl.int64) * weight_input
        if EVEN_DEPTH:
            rows = tl.load(x + start + x_at, mask=here, other=0.0)
            weights = tl.load(inputs + weight_at) if EVEN else tl.load(inputs + weight_at, mask=real, other=0.0)
        else:
            inside = start + depth < INPUTS
            inside_x = inside[:, None] if SWAP else inside[None, :]
            inside_weight = inside[None, :] if SWAP else inside[:, None]
            rows = tl.load(x + start + x_at, mask=here & inside_x, other=0.0)
            weights = tl.load(inputs + weight_at, mask=real & inside_weight, other=0.0)
        sums = times(weights, rows, sums, WIDEN) if SWAP else times(rows, weights, sums, WIDEN)
    if BIASED:
        more = tl.load(bias + first + column, mask=first + column < outputs, other=0.0)
        sums = plus_bias(sums, more[:, None] if SWAP else more[None, :])
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, rounded(sums, dtype).to(dtype), mask=here & real)
