"""Kernels that bound the cut of a top-k or a top-p: two logits between which it stands, for `masses_kernel` to list.

The largest logits of chunks bound a top-k. A top-p takes passes over its row; each pass sums the probabilities below 15
pivots between the bounds so far, until few ids are between them; the sums are float32, and err to the safe side. Knows
no requests. Launched by `sample.py`; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.sampling.tile import (
    MASS,
    SCALE,
    TOP_P,
    best_of,
    job_float,
    job_int,
    read_tile,
    top_k_of,
    value_of,
)

#: sums of a pass: of all probabilities, and of those below 15 pivots
PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
# of the sums: what float32 errs at most, generously
_SAFE = tl.constexpr(1e-4)
# a probability below e^-37 of the largest has no mass (2^-52, halved)
_REACH = tl.constexpr(37.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pivot(low, high, number, squared: tl.constexpr):
    """Rising from number 1 to 15, between the bounds; squared: closer to `high`, where most of the mass is."""
    part = 1.0 - number.to(tl.float32) / _PIVOTS
    if squared:
        part = part * part
    # an fma, so that it is the same wherever it is made
    return tl.fma(low - high, part, high)


@triton.jit
def _first_low(best, floats, job, width):
    """All that is below has no part in the nucleus: together less than 1 - p of the largest alone."""
    rest = tl.maximum(1.0 - job_float(floats, job, TOP_P), 1e-17)
    reach = tl.minimum(tl.log(width.to(tl.float64) / rest) + 1e-3, _REACH)
    return tl.maximum(best - (reach / job_float(floats, job, SCALE)).to(tl.float32), -3.0e38)


@triton.jit
def _base_2(floats, job):
    """float32: what a distance between logits is multiplied by."""
    return tl.minimum(job_float(floats, job, SCALE) * _LOG2_E, 3.0e38).to(tl.float32)


@triton.jit(do_not_specialize=["mask_columns"])
def narrow_kernel(
    logits, stride, width, ints, floats, tile_best, bounds, close, sums,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, spans, first: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """float32 sums of the probabilities below 15 pivots, of the ids of a span; nothing where the bounds are close."""
    job = tl.program_id(1).to(tl.int64)
    if (job_int(ints, job, MASS) == 0) | (job_float(floats, job, TOP_P) >= 1.0) | (top_k_of(ints, job, width) > 0):
        return
    if not first:  # noqa: SIM102 - nothing was written before
        if tl.load(close + job) > 0:
            return
    number = tl.program_id(0)
    ids = number * span + tl.arange(0, span)
    _, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    best = best_of(tile_best, job, tiles, padded)
    if first:
        low = _first_low(best, floats, job, width)
        high = best
    else:
        low = tl.load(bounds + job * 2)
        high = tl.minimum(tl.load(bounds + job * 2 + 1), best)
    part = tl.exp2((x - best) * _base_2(floats, job))
    column = tl.arange(0, _PIVOTS)
    found = tl.where(column == 0, tl.sum(part, axis=0), 0.0)
    for pivot in tl.static_range(1, _PIVOTS):
        bound = _pivot(low, high, tl.full((), pivot, tl.int32), first)
        # a product, not a choice: one instruction less a value
        found = tl.where(column == pivot, tl.sum(part * (x < bound).to(tl.float32), axis=0), found)
    tl.store(sums + (job * spans + number) * _PIVOTS + column, found)


@triton.jit(do_not_specialize=["few"])
def bounds_kernel(
    width, ints, floats, chunk_best, tile_best, bounds, close, sums,
    tiles, padded: tl.constexpr, chunks: tl.constexpr, spans, padded_spans: tl.constexpr, first: tl.constexpr, few,
):  # fmt: skip
    """The bounds of a job's cut: it stands at or above `bounds[job, 0]`, and below `bounds[job, 1]`. +inf and -inf
    where nothing is cut. `close`: 1 where it is certain that `few` ids at most are between."""
    job = tl.program_id(0).to(tl.int64)
    if job_int(ints, job, MASS) == 0:
        return
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    low, high = float("inf"), float("-inf")
    if (k == 0) & (top_p < 1.0):
        best = best_of(tile_best, job, tiles, padded)
        if first:
            low = _first_low(best, floats, job, width)
            high = float("inf")
        else:
            low = tl.load(bounds + job * 2)
            high = tl.load(bounds + job * 2 + 1)
            if tl.load(close + job) > 0:
                return
        low, high, count = _closer(sums, job, low, high, best, top_p, _base_2(floats, job), spans, padded_spans, first)
        tl.store(close + job, (count < few).to(tl.int32))
    elif first:
        if k > 0:
            low = _kth(chunk_best, job, tiles * chunks, k, padded * chunks)
            high = float("inf")
    else:
        return
    tl.store(bounds + job * 2, low)
    tl.store(bounds + job * 2 + 1, high)


@triton.jit
def _closer(sums, job, low, high, best, top_p, base_2, spans, padded: tl.constexpr, squared: tl.constexpr):
    """Closer bounds: at or above `low` stands enough mass for sure, at or above `high` too little; and the most ids
    that may be between."""
    span = tl.arange(0, padded)[:, None]
    number = tl.arange(0, _PIVOTS)
    part = tl.load(sums + (job * spans + span) * _PIVOTS + number[None, :], mask=span < spans, other=0.0)
    below = tl.sum(part.to(tl.float64), axis=0)
    whole = tl.sum(tl.where(number == 0, below, 0.0), axis=0)
    rest = whole * (1.0 - top_p)
    pivot = _pivot(low, tl.minimum(high, best), number, squared)
    enough = (number > 0) & (below < rest * (1.0 - _SAFE))
    too_little = (number > 0) & (below > rest * (1.0 + _SAFE))
    low = tl.maximum(low, tl.max(tl.where(enough, pivot, float("-inf")), axis=0))
    high = tl.minimum(high, tl.min(tl.where(too_little, pivot, float("inf")), axis=0))
    most = tl.min(tl.where(too_little, below, whole), axis=0) * (1.0 + _SAFE)
    between = most - tl.max(tl.where(enough, below, 0.0), axis=0) * (1.0 - _SAFE)
    # each has at least the probability of the lower bound
    least = tl.exp2((low - best) * base_2).to(tl.float64)
    count = tl.where(least > 0.0, between / least, float("inf"))
    return low, high, count


@triton.jit
def _key(bits):
    """int32 keys in the order of the floats with these bits, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kth(chunk_best, job, count, k, padded: tl.constexpr):
    """The k-th largest of the chunks' largest logits, which as many ids reach; -inf where there are fewer chunks."""
    number = tl.arange(0, padded)
    order = tl.load(chunk_best + job * count + number, mask=number < count, other=-0x8000000000000000)
    key = (order >> 32).to(tl.int32)
    low = _key(tl.full((), float("-inf"), tl.float32).to(tl.int32, bitcast=True))
    high = tl.max(key, axis=0)
    while low < high:
        # above the middle, rounded up; a sum of two keys may overflow
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        if tl.sum((key >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return value_of(low.to(tl.int64) << 32)
