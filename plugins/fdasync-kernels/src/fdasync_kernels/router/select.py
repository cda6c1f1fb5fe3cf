"""Choosing the k largest of a row, the lowest place first among equals, whatever NaNs come: parts of kernels.

A row is a tile's row; reductions stay within a warp. Values are compared as integers of the same order, so that a NaN
is below every number and a place that was taken or is none is below a NaN: places exist and do not repeat. Knows no
experts and no memory. Called by `route.py` and `in_turn.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.rounding import rounded as to_nearest

# below every number, and below a NaN, in the order of `ordered`
GONE = tl.constexpr(-0x80000000)
_NAN = tl.constexpr(-0x7FFFFFFF)


@triton.jit
def row_max(values, ROWS: tl.constexpr):
    """[ROWS, 1], or a scalar for a single row: a scalar has no layout, so no change of layout follows."""
    return tl.max(values) if ROWS == 1 else tl.max(values, axis=1, keep_dims=True)


@triton.jit
def row_min(values, ROWS: tl.constexpr):
    return tl.min(values) if ROWS == 1 else tl.min(values, axis=1, keep_dims=True)


@triton.jit
def row_sum(values, ROWS: tl.constexpr):
    return tl.sum(values) if ROWS == 1 else tl.sum(values, axis=1, keep_dims=True)


@triton.jit
def nearest(values, like):
    """float32 values in the dtype that the pointer `like` points to, to nearest and even."""
    return to_nearest(values, like.dtype.element_ty).to(like.dtype.element_ty)


@triton.jit
def rounded(values, like, ON: tl.constexpr):
    """float32 values, rounded to the dtype that the pointer `like` points to if ON."""
    return to_nearest(values, like.dtype.element_ty) if ON else values


@triton.jit
def ordered(values):
    """int32 in the order of float32 values: both zeros are 0, a NaN is below every number and above GONE."""
    whole = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    whole = tl.where(whole < 0, whole ^ 0x7FFFFFFF, whole)
    return tl.where(values != values, _NAN, whole)


@triton.jit
def largest(order, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first place of the largest value of each row of `order` [ROWS, WIDTH]."""
    place = tl.arange(0, WIDTH)[None, :]
    return row_min(tl.where(order == row_max(order, ROWS), place, WIDTH), ROWS)


@triton.jit
def packed(values, like, WIDTH: tl.constexpr):
    """Order and place in one int32, for values of a 16-bit dtype: a device has one instruction for its maximum."""
    equal = tl.where(values == 0.0, 0.0, values)
    half = equal.to(like.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    half = tl.where(half < 0, half ^ 0x7FFF, half)
    half = tl.where(values != values, -0x7FFF, half)
    return half * 65536 + (WIDTH - 1 - tl.arange(0, WIDTH)[None, :])


@triton.jit
def open_groups(
    choice,
    real,
    like,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OPEN: tl.constexpr,
    TWO: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Which places of `choice` [ROWS, GROUPS * SIZE] lie in the OPEN groups of the highest score."""
    each = tl.reshape(tl.where(real, choice, float("-inf")), (ROWS, GROUPS, SIZE))
    order = ordered(each)
    score = tl.max(each, axis=2, keep_dims=True)
    if TWO:
        place = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(order == tl.max(order, axis=2, keep_dims=True), place, SIZE), axis=2, keep_dims=True)
        second = tl.max(tl.where(place == first, float("-inf"), each), axis=2, keep_dims=True)
        score = rounded(score + second, like, ROUNDED)
    group = tl.arange(0, GROUPS)[None, :, None]
    rest = tl.where(group < NUM_GROUPS, ordered(score), GONE)
    chosen = group < 0
    for _ in tl.static_range(OPEN):
        top = tl.max(rest, axis=1, keep_dims=True)
        best = tl.min(tl.where(rest == top, group, GROUPS), axis=1, keep_dims=True)
        chosen = chosen | (group == best)
        rest = tl.where(group == best, GONE, rest)
    return tl.reshape(tl.broadcast_to(chosen, (ROWS, GROUPS, SIZE)), (ROWS, GROUPS * SIZE))
