"""Joins the float32 partials of decode's splits, in the order of the splits; or of parts, in the fixed order.

A few splits are joined by the program of `decode.py` that ends last, many by a kernel of its own, `join_splits`, whose
programs share that work. A partial is the sum of weighted values of a split, the largest logit (base 2) and the sum of
weights. Knows the layout of partials; knows no queries and no keys. Called by `decode.py`; `latent.py` splits alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.attention.fixed import finish, join
from fdasync_kernels.attention.tile import first_visible
from fdasync_kernels.overlap import wait_for_inputs


@triton.jit
def span_of(length, splits, BLOCK_N: tl.constexpr):
    """Keys per split, in whole tiles."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit
def join_at_once(
    partials, stats, first, head, inside, out_inside, used, capacity, width,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sums and weights of all splits, added in their order. Others wrote them: past this processor's own cache."""
    numbers = tl.arange(0, MOST)[:, None]
    peaks = tl.load(
        stats + (first + numbers) * HEADS + head[None, :],
        mask=(numbers < used) & inside[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    best = tl.where(inside, tl.max(peaks, 0), 0.0)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DV], tl.float32)
    dims = tl.arange(0, DV)
    for start in range(0, used, AT_ONCE):
        # unrolled, so that the loads of one do not wait for the sums of the one before it
        for number in tl.static_range(AT_ONCE):
            row = (first + start + number) * HEADS + head
            real = inside & (head * 0 + start + number < used)
            # every used split saw a key, so its peak is finite; the weight of the others is exp2(-inf)
            peak = tl.load(stats + row, mask=real, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(stats + capacity + row, mask=real, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partials + row[:, None] * width + dims[None, :],
                mask=out_inside & real[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            grow = tl.math.exp2(peak - best)
            total += weight * grow
            sums += part * grow[:, None]
    # rows that are no head have no weights
    return sums, tl.where(inside, total, 1.0)


@triton.jit
def parts_of(position, begin, PART: tl.constexpr):
    """The first part, and how many, of a query at `position` that sees keys from `begin`."""
    return begin // PART, position // PART - begin // PART + 1


@triton.jit
def join_in_order(
    partials, stats, sinks, first, head, inside, dims, out_inside, used, capacity, width,
    HEADS: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The output of rows [M] from their `used` written parts, as `fixed.py` says, for these dimensions [D]."""
    best = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    sums = tl.zeros([head.shape[0], dims.shape[0]], tl.float32)
    for start in range(0, used, AT_ONCE):
        # unrolled, so that the loads of one do not wait for the sums of the one before it
        for number in tl.static_range(AT_ONCE):
            row = (first + start + number) * HEADS + head
            real = inside & (head * 0 + start + number < used)
            # other programs wrote the parts: read past this processor's own cache. A part without keys changes nothing
            peak = tl.load(stats + row, mask=real, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(stats + capacity + row, mask=real, other=0.0, cache_modifier=".cg")
            where = partials + row[:, None] * width + dims[None, :]
            part = tl.load(where, mask=out_inside & real[:, None], other=0.0, cache_modifier=".cg")
            best, total, sums = join(best, total, sums, peak, weight, part)
    return finish(best, total, sums, sinks, head, inside, SINKS)


@triton.jit(do_not_specialize=["lanes", "positions", "reach_size", "most"])
def join_parts(
    partials, stats, lanes, positions, sinks, out, reach_size, most, capacity, width, out_row, out_head,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, REACH: tl.constexpr, SINKS: tl.constexpr,
    PART: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # a program does one head of one sequence, which has room for `most` parts; padding was written before
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + sequence).to(tl.int32)
    if (lane < 0) | (position < 0):
        return
    _first, used = parts_of(position, first_visible(position, REACH, reach_size), PART)
    dims = tl.arange(0, DV)
    inside = head >= 0
    out_inside = inside[:, None] & (dims < VALUE_DIM)[None, :]
    result = join_in_order(
        partials, stats, sinks, sequence * most, head, inside, dims, out_inside, used, capacity, width,
        HEADS, SINKS, AT_ONCE,
    )  # fmt: skip
    out_rows = out + sequence * out_row + head.to(tl.int64)[:, None] * out_head + dims[None, :]
    tl.store(out_rows, result.to(out.dtype.element_ty), mask=out_inside)


@triton.jit(do_not_specialize=["lanes", "positions", "reach_size", "splits"])
def join_splits(
    partials, stats, lanes, positions, out, reach_size, splits, capacity, width, out_row, out_head,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, REACH: tl.constexpr,
    BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # a program does one head of one sequence
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + sequence).to(tl.int32)
    dims = tl.arange(0, DV)
    numbers = tl.arange(0, AT_ONCE)
    first = sequence * splits * HEADS + head
    # the first parts are read beside the length: parts that no program wrote count for nothing
    peaks, weights, parts = _partials(partials, stats, first, numbers, numbers < splits, dims, capacity, width, HEADS)
    if (lane < 0) | (position < 0):
        return
    length = position + 1 - first_visible(position, REACH, reach_size)
    used = tl.cdiv(length, span_of(length, splits, BLOCK_N))
    best, total, sums = _added(peaks, weights, parts, numbers < used, float("-inf"), 0.0, tl.zeros([DV], tl.float32))
    for start in range(AT_ONCE, used, AT_ONCE):
        real = start + numbers < used
        peaks, weights, parts = _partials(
            partials, stats, first, start + numbers, real, dims, capacity, width, HEADS
        )  # fmt: skip
        best, total, sums = _added(peaks, weights, parts, real, best, total, sums)
    out_row_at = out + sequence * out_row + head.to(tl.int64) * out_head + dims
    tl.store(out_row_at, (sums / total).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit(do_not_specialize=["lanes", "positions", "tiles", "reach_size", "splits"])
def join_rows(
    partials, stats, lanes, positions, tiles, out, reach_size, splits, capacity, width, out_row, out_head,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, REACH: tl.constexpr,
    BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # a program does one head of one row, whose tile's keys were split; padding was written before
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.load(lanes + row)
    if (lane < 0) | (tl.load(positions + row) < 0):
        return
    lowest = tl.load(positions + tl.load(tiles + 2 * row)).to(tl.int32)
    length = lowest + tl.load(tiles + 2 * row + 1) - first_visible(lowest, REACH, reach_size)
    used = tl.cdiv(length, span_of(length, splits, BLOCK_N))
    dims = tl.arange(0, DV)
    numbers = tl.arange(0, AT_ONCE)
    first = row * splits * HEADS + head
    # a number that the loop carries keeps its type
    best = tl.max(tl.full([AT_ONCE], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([AT_ONCE], tl.float32), 0)
    sums = tl.zeros([DV], tl.float32)
    for start in range(0, used, AT_ONCE):
        real = start + numbers < used
        peaks, weights, parts = _partials(
            partials, stats, first, start + numbers, real, dims, capacity, width, HEADS
        )  # fmt: skip
        best, total, sums = _added(peaks, weights, parts, real, best, total, sums)
    out_row_at = out + row * out_row + head.to(tl.int64) * out_head + dims
    tl.store(out_row_at, (sums / total).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _partials(partials, stats, first, numbers, real, dims, capacity, width, HEADS: tl.constexpr):
    """Peaks, weights and sums of one head's splits."""
    row = first + numbers * HEADS
    peaks = tl.load(stats + row, mask=real, other=float("-inf"))
    weights = tl.load(stats + capacity + row, mask=real, other=0.0)
    parts = tl.load(
        partials + row[:, None] * width + dims[None, :], mask=real[:, None] & (dims < width)[None, :], other=0.0
    )
    return peaks, weights, parts


@triton.jit
def _added(peaks, weights, parts, real, best, total, sums):
    """What was summed, and these splits with it."""
    peaks = tl.where(real, peaks, float("-inf"))
    higher = tl.maximum(best, tl.max(peaks, 0))
    # a row of a tile may see nothing in its first splits: -inf less -inf would be NaN
    base = tl.where(higher == float("-inf"), 0.0, higher)
    grow = tl.math.exp2(peaks - base)
    shrink = tl.math.exp2(best - base)
    total = total * shrink + tl.sum(tl.where(real, weights, 0.0) * grow, 0)
    sums = sums * shrink + tl.sum(tl.where(real[:, None], parts, 0.0) * grow[:, None], 0)
    return higher, total, sums
