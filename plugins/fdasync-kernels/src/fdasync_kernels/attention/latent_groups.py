"""What a group of four warps does in `latent_hopper.py`: half of the values of 64 heads, and every other tile's logits.

A tile belongs to the group of its place, which takes its logits and weights and publishes them: the weights where the
rotary part of the tile's keys was, and by how much earlier sums shrink. The other group waits for them. Sums go through
the tiles in order in both groups, so a head's bits depend on its sequence and the splits alone. Written in Gluon. Knows
two places in shared memory, and not how latents come into them. Called by `latent_hopper.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fdasync_kernels.attention.hopper_tile import barrier


@gluon.jit
def _zero_rows(key_pages, half, count, BLOCK_TOKENS: gl.constexpr):
    """Tokens from `count` on in their page of half a tile become zeros: they may hold NaN, and 0 * NaN is NaN. Pages
    behind it are zeros already."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COUNT: gl.constexpr = 64 // BLOCK_TOKENS
    page = count // BLOCK_TOKENS
    inside = page * BLOCK_TOKENS + gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, LAYOUT)) < count
    for part in gl.static_range(4):
        target = key_pages.index((half * 4 + part) * COUNT + page)
        value = target.load(LAYOUT)
        target.store(gl.where(inside[:, None], value, gl.full_like(value, 0.0)))
    fence_async_shared()
    barrier()


@gluon.jit
def _load_queries(rows, whose, queries, rotaries, HEADS: gl.constexpr, WHICH: gl.constexpr):
    """Half of the queries, and the first group their rotary part too."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    query, rotary, query_row, query_head, rotary_row, rotary_head = rows
    sequence, first_head, _split, _low, _high = whose
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    dims = WHICH * 256 + gl.arange(0, 256, gl.SliceLayout(0, WIDE))
    source = query + sequence * query_row + heads[:, None] * query_head + dims[None, :]
    queries.index(WHICH).store(gl.load(source, mask=(heads < HEADS)[:, None] & (dims >= 0)[None, :], other=0.0))
    if WHICH == 0:
        heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, NARROW))
        dims = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
        source = rotary + sequence * rotary_row + heads[:, None] * rotary_head + dims[None, :]
        rotaries.store(gl.load(source, mask=(heads < HEADS)[:, None] & (dims >= 0)[None, :], other=0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _begin_logits(memory, bars, turn, WHICH: gl.constexpr, LOGITS: gl.constexpr):
    """Three products of a tile of this group's, under way."""
    queries, rotaries, keys, turned, _pages, _shrinks, _peaks, _totals = memory
    first_full, second_full, _first_free, _second_free, _ready, _both = bars
    logits = gl.zeros([64, 64], gl.float32, LOGITS)
    mbarrier.wait(first_full.index(WHICH), turn)
    key = keys.index(2 * WHICH).permute((1, 0))
    logits = warpgroup_mma(queries.index(WHICH), key, logits, use_acc=False, is_async=True)
    mbarrier.wait(second_full.index(WHICH), turn)
    key = keys.index(2 * WHICH + 1).permute((1, 0))
    logits = warpgroup_mma(queries.index(1 - WHICH), key, logits, is_async=True)
    return warpgroup_mma(rotaries, turned.index(WHICH).permute((1, 0)), logits, is_async=True)


@gluon.jit
def _softmax(logits, best, left, scale, memory, bars, WHICH: gl.constexpr, LOGITS: gl.constexpr, DTYPE: gl.constexpr):
    """Weights of a tile with `left` positions, and what sums before it shrink by; the other group is told both."""
    _queries, _rotaries, _keys, turned, _pages, shrinks, peaks, _totals = memory
    _first_full, _second_full, _first_free, _second_free, ready, _both = bars
    if left < 64:
        real = gl.arange(0, 64, gl.SliceLayout(0, LOGITS)) < left
        logits = gl.where(real[None, :], logits, float("-inf"))
    # a tile has at least one position, so `above` is finite
    above = gl.maximum(best, gl.max(logits, 1) * scale)
    weights = gl.exp2(gl.fma(logits, scale, -above[:, None])).to(DTYPE)
    shrink = gl.exp2(best - above)
    turned.index(WHICH).store(weights)
    shrinks.index(WHICH).store(shrink)
    peaks.index(WHICH).store(above)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(WHICH), count=1)
    return weights, shrink


@gluon.jit
def _weigh_own(
    weights, shrink, sums, left, memory, bars, BLOCK_TOKENS: gl.constexpr, WHICH: gl.constexpr, SUMS: gl.constexpr
):
    """Add the weighted values of a tile of this group's, whose weights are in its registers."""
    _queries, _rotaries, keys, _turned, pages, _shrinks, _peaks, _totals = memory
    _first_full, _second_full, first_free, _second_free, _ready, _both = bars
    if left < 64:
        _zero_rows(pages, 2 * WHICH, left, BLOCK_TOKENS)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    sums = warpgroup_mma(operand, keys.index(2 * WHICH), sums, is_async=True)
    # before the next turn: a product that is under way there would make the compiler wait for each one in the loop
    sums = warpgroup_mma_wait(0, deps=(sums,))
    barrier()
    mbarrier.arrive(first_free.index(WHICH), count=1)
    return sums


@gluon.jit
def _begin_other(
    sums, total, turn, left, memory, bars, BLOCK_TOKENS: gl.constexpr, WHICH: gl.constexpr, SUMS: gl.constexpr,
    LOGITS: gl.constexpr,
):  # fmt: skip
    """The weighted values of the other group's tile, under way."""
    _queries, _rotaries, keys, turned, pages, shrinks, _peaks, _totals = memory
    _first_full, second_full, _first_free, _second_free, ready, _both = bars
    OTHER: gl.constexpr = 1 - WHICH
    mbarrier.wait(ready.index(OTHER), turn)
    # that the other group saw the tile does not mean that this one does
    mbarrier.wait(second_full.index(OTHER), turn)
    if left < 64:
        _zero_rows(pages, 2 * OTHER + 1, left, BLOCK_TOKENS)
    shrink = shrinks.index(OTHER).load(gl.SliceLayout(1, LOGITS))
    total = total * shrink
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    return warpgroup_mma(turned.index(OTHER), keys.index(2 * OTHER + 1), sums, is_async=True), total


@gluon.jit
def _write(
    sums, whole, peak, results, whose, HEADS: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """This group's dimensions: what a split leaves, or the result."""
    out, partials, stats, splits, capacity, width, out_row, out_head = results
    sequence, first_head, split, _low, _high = whose
    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dims = WHICH * 256 + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
    inside = head < HEADS
    if SPLIT:
        partial = (sequence * splits + split) * HEADS + head
        gl.store(partials + partial[:, None] * width + dims[None, :], sums, mask=inside[:, None])
        if WHICH == 0:
            gl.store(stats + partial, peak, mask=inside)
            gl.store(stats + capacity + partial, whole, mask=inside)
    else:
        target = out + sequence * out_row + head[:, None] * out_head + dims[None, :]
        gl.store(target, (sums / whole[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@gluon.jit
def attend_half(
    rows, results, whose, memory, bars, scale,
    HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Positions low .. high of one sequence and 64 heads, from queries to what is written; nothing where there are
    none, but zeros where a split has no other to write them.

    `whose` is (sequence, first head, split, low, high); `memory` and `bars` are as `latents_hopper` makes them.
    """
    queries, rotaries, _keys, _turned, _pages, _shrinks, peaks, totals = memory
    _first_full, _second_full, _first_free, second_free, _ready, both = bars
    _sequence, _first_head, _split, low, high = whose
    DTYPE: gl.constexpr = queries.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    OTHER: gl.constexpr = 1 - WHICH
    sums = gl.zeros([64, 256], gl.float32, SUMS)
    if low < high:
        _load_queries(rows, whose, queries, rotaries, HEADS, WHICH)
        mbarrier.arrive(both, count=1)
        mbarrier.wait(both, 0)
        tiles = (high - low + 63) // 64
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
        if WHICH == 0:
            # no tile comes before the first
            best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
            logits = _begin_logits(memory, bars, 0, WHICH, LOGITS)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            weights, shrink = _softmax(logits, best, high - low, scale, memory, bars, WHICH, LOGITS, DTYPE)
            total = gl.sum(weights.to(gl.float32), 1)
            sums = _weigh_own(weights, shrink, sums, high - low, memory, bars, BLOCK_TOKENS, WHICH, SUMS)
        for tile in range(2 - WHICH, tiles, 2):
            left = high - low - tile * 64
            turn = (tile - 1) // 2 & 1
            sums, total = _begin_other(sums, total, turn, 64, memory, bars, BLOCK_TOKENS, WHICH, SUMS, LOGITS)
            best = peaks.index(OTHER).load(gl.SliceLayout(1, LOGITS))
            logits = _begin_logits(memory, bars, tile // 2 & 1, WHICH, LOGITS)
            sums = warpgroup_mma_wait(3, deps=(sums,))
            barrier()
            mbarrier.arrive(second_free.index(OTHER), count=1)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            weights, shrink = _softmax(logits, best, left, scale, memory, bars, WHICH, LOGITS, DTYPE)
            total = total * shrink + gl.sum(weights.to(gl.float32), 1)
            sums = _weigh_own(weights, shrink, sums, left, memory, bars, BLOCK_TOKENS, WHICH, SUMS)
        if (tiles - 1) % 2 == OTHER:
            # the last tile is the other group's
            left = high - low - (tiles - 1) * 64
            turn = (tiles - 1) // 2 & 1
            sums, total = _begin_other(sums, total, turn, left, memory, bars, BLOCK_TOKENS, WHICH, SUMS, LOGITS)
            sums = warpgroup_mma_wait(0, deps=(sums,))
        totals.index(WHICH).store(total)
        barrier()
        mbarrier.arrive(both, count=1)
        mbarrier.wait(both, 1)
        LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
        whole = totals.index(0).load(LINE) + totals.index(1).load(LINE)
        _write(sums, whole, peaks.index((tiles - 1) % 2).load(LINE), results, whose, HEADS, SPLIT, WHICH, SUMS)
    elif not SPLIT:
        one = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SUMS))
        _write(sums, one, one, results, whose, HEADS, SPLIT, WHICH, SUMS)
