"""What a group of four warps does in `prefill_hopper.py`: 64 rows of queries against tiles of keys in shared memory.

A tile's logits are begun before the values of the tile before are weighed, so that exponents are taken while the tensor
cores multiply. The order of sums is that of `prefill.py`: tiles of keys from the first that a row sees, and within a
tile as the products go; so a row's bits do not depend on the rows beside it. With PART it is that of `fixed.py`: a part
is joined when the products of its last tile are done, which is within the turn of the next part's first tile. Written
in Gluon, Triton's language with explicit layouts. Knows rows and a ring of tiles, and not how tiles come into it.
Called by `prefill_hopper.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fdasync_kernels.attention.fixed import finish, join, weigh

# Triton 3.6 names some things otherwise than later versions do
LATER_NAMES = gl.constexpr(hasattr(gl, "barrier"))
barrier = gl.barrier if LATER_NAMES.value else gl.thread_barrier  # of the threads of a partition
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def first_visible(position, REACH: gl.constexpr, reach_size):
    """As in `tile.py`."""
    if REACH == 1:
        return gl.maximum(position - reach_size + 1, 0)
    elif REACH == 2:
        return position // reach_size * reach_size
    elif REACH == 3:
        return gl.minimum(position, reach_size)
    else:
        return position * 0


@gluon.jit
def _mask(logits, tile, position, first, REACH: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Logits of keys that a row does not see become -inf."""
    numbers = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    seen = numbers[None, :] <= position[:, None]
    if REACH != 0:
        seen = seen & (numbers[None, :] >= first[:, None])
    return gl.where(seen, logits, float("-inf"))


@gluon.jit
def _softmax_step(logits, best, total, scale, REACH: gl.constexpr):
    """As `softmax_step` in `prefill.py`."""
    above = gl.maximum(best, gl.max(logits, 1) * scale)
    base = above
    if REACH != 0:
        # a row that has seen nothing yet: -inf less -inf would be NaN
        base = gl.where(above == float("-inf"), 0.0, above)
    weights = gl.exp2(gl.fma(logits, scale, -base[:, None]))
    shrink = gl.exp2(best - base)
    total = gl.fma(total, shrink, gl.sum(weights, 1))
    return above, total, weights, shrink


@gluon.jit
def _zero_rows(pages, page, begin, end, COUNT: gl.constexpr, PARTS: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Tokens of a page of values outside begin .. end become zeros: they may hold NaN, and 0 * NaN is NaN.

    Both groups of warps do it, each before its own product, and must write the same whichever comes first: every call
    for a page covers all of its tokens outside, except tokens that this group has already zeroed.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, LAYOUT))
    inside = (token >= begin) & (token < end)
    for part in gl.static_range(PARTS):
        target = pages.index(page + part * COUNT)
        value = target.load(LAYOUT)
        target.store(gl.where(inside[:, None], value, gl.full_like(value, 0.0)))
    fence_async_shared()
    barrier()


@gluon.jit
def _joined(whole_best, whole_total, whole_sums, peak, total, sums, SUMS: gl.constexpr):
    """What the parts before gave, and one more."""
    LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    # all columns are the same sum
    weight = gl.convert_layout(gl.max(total, 1), LINE)
    return join(whole_best, whole_total, whole_sums, gl.convert_layout(peak, LINE), weight, sums)


@gluon.jit
def _fold(
    begin, end, turn, best, total, sums, weights, whole_best, whole_total, whole_sums, own, ones, ring, bars,
    position, first, scale, PART: gl.constexpr, TOTALS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REACH: gl.constexpr, MASKED: gl.constexpr,
    LOGITS: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The softmax of tiles begin .. end, and the weighted values of the tile before each. With PART `total` is sums of
    weights [ROWS, 8], all columns alike, and `whole_` what all parts before this one gave."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    key_tiles, value_tiles = ring
    key_full, key_free, value_full, value_free = bars
    for tile in range(begin, end):
        place = turn % STAGES
        place_before = (turn - 1) % STAGES
        mbarrier.wait(key_full.index(place), (turn // STAGES) & 1)
        logits = gl.zeros([ROWS, BLOCK_N], gl.float32, LOGITS)
        logits = warpgroup_mma(own, key_tiles.index(place).permute((1, 0)), logits, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(place_before), ((turn - 1) // STAGES) & 1)
        sums = warpgroup_mma(weights, value_tiles.index(place_before), sums, is_async=True)
        if PART:
            total = warpgroup_mma(
                gl.convert_layout(weights, gl.DotOperandLayout(0, TOTALS, 2)),
                ones.permute((1, 0)),
                total,
                is_async=True,
            )
            logits = warpgroup_mma_wait(2, deps=(logits,))
        else:
            logits = warpgroup_mma_wait(1, deps=(logits,))
        mbarrier.arrive(key_free.index(place), count=1)
        if MASKED:
            logits = _mask(logits, tile, position, first, REACH, BLOCK_N, LOGITS)
        if PART:
            peak = best
            fresh = tile % (PART // BLOCK_N) == 0
            # a part starts from nothing: by -inf earlier sums shrink to 0
            best, raw, shrink = weigh(logits, gl.where(fresh, float("-inf"), best), scale)
        else:
            best, total, raw, shrink = _softmax_step(logits, best, total, scale, REACH)
        following = gl.convert_layout(raw.to(DTYPE), WEIGHTS)
        if PART:
            sums, total, weights, following = warpgroup_mma_wait(0, deps=(sums, total, weights, following))
            if fresh:
                whole_best, whole_total, whole_sums = _joined(
                    whole_best, whole_total, whole_sums, peak, total, sums, SUMS
                )  # fmt: skip
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, TOTALS))[:, None]
        elif OVERLAP:
            # as a dependency of the wait: or the compiler takes the exponents after it
            sums, weights, following = warpgroup_mma_wait(0, deps=(sums, weights, following))
        else:
            sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
        mbarrier.arrive(value_free.index(place_before), count=1)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weights = following
        turn += 1
    return turn, best, total, sums, weights, whole_best, whole_total, whole_sums


@gluon.jit
def attend_rows(
    query, out, sinks, own, ones, ring, bars, value_pages, turn, kv_head, skip, rows, span,
    scale, reach_size, query_row, query_head, out_row, out_head,
    GROUP: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr, ROWS: gl.constexpr, OVERLAP: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """64 rows of one program, the first `skip` left out, from queries to the output.

    `turn` counts the tiles that went through the ring before; returns it as it is then. `own` [64, DIM] holds the
    queries. `rows` and `span` are what `_describe` in `prefill_hopper.py` says of the program.
    """
    row_begin, begin, count, start_position, first_row = rows
    low, lowest, highest = span
    row_begin += skip
    DTYPE: gl.constexpr = query.dtype.element_ty
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = DIM // 64
    COUNT: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    key_tiles, value_tiles = ring
    key_full, key_free, value_full, value_free = bars
    # queries, as lines of memory
    row = row_begin + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    number = begin + row // GROUP
    inside = (row < TILE * GROUP) & (number < count)
    token = first_row + number
    head = (kv_head * GROUP + row % GROUP).to(gl.int64)
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LINES))
    mask = inside[:, None] & (dims >= 0)[None, :]
    own.store(gl.load(query + (token * query_row + head * query_head)[:, None] + dims[None, :], mask=mask, other=0.0))
    fence_async_shared()
    # the same rows as the products hold them; padding sees what the last query sees
    mine = row_begin + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
    position = gl.minimum(start_position + begin + mine // GROUP, highest)
    first = first_visible(position, REACH, reach_size)
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
    if SINKS and not PART:
        best = gl.load(sinks + kv_head * GROUP + mine % GROUP).to(gl.float32) * 1.4426950408889634
        total += 1.0
    sums = gl.zeros([ROWS, DIM], gl.float32, SUMS)
    TOTALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    whole_best = gl.full([ROWS], float("-inf"), gl.float32, LINE)
    whole_total = gl.full([ROWS], 0.0, gl.float32, LINE)
    whole_sums = sums
    first_tile = low // BLOCK_N
    end_tile = highest // BLOCK_N + 1
    # the first tile has no tile before it
    place = turn % STAGES
    mbarrier.wait(key_full.index(place), (turn // STAGES) & 1)
    logits = gl.zeros([ROWS, BLOCK_N], gl.float32, LOGITS)
    logits = warpgroup_mma(own, key_tiles.index(place).permute((1, 0)), logits, use_acc=False, is_async=True)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(key_free.index(place), count=1)
    logits = _mask(logits, first_tile, position, first, REACH, BLOCK_N, LOGITS)
    if PART:
        best, raw, _shrink = weigh(logits, best, scale)
        total = gl.zeros([ROWS, 8], gl.float32, TOTALS)
    else:
        best, total, raw, _shrink = _softmax_step(logits, best, total, scale, REACH)
    weights = gl.convert_layout(raw.to(DTYPE), WEIGHTS)
    if REACH != 0:
        # what a window left behind. What lies behind the last key, where that is in this page too: or one group would
        # write back here what the other has made zeros already
        mbarrier.wait(value_full.index(place), (turn // STAGES) & 1)
        page = place * PARTS * COUNT + low % BLOCK_N // BLOCK_TOKENS
        end = gl.minimum(highest + 1 - low // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS)
        _zero_rows(value_pages, page, low % BLOCK_TOKENS, end, COUNT, PARTS, BLOCK_TOKENS)
    turn += 1
    # tiles that every row sees in full need no mask
    open_begin = (first_visible(highest, REACH, reach_size) + BLOCK_N - 1) // BLOCK_N
    open_begin = gl.maximum(first_tile + 1, gl.minimum(open_begin, end_tile))
    open_end = gl.maximum(open_begin, (lowest + 1) // BLOCK_N)
    if REACH != 0:
        turn, best, total, sums, weights, whole_best, whole_total, whole_sums = _fold(
            first_tile + 1, open_begin, turn, best, total, sums, weights, whole_best, whole_total, whole_sums,
            own, ones, ring, bars, position, first, scale, PART, TOTALS,
            BLOCK_N, STAGES, REACH, True, LOGITS, SUMS, DTYPE, ROWS, OVERLAP,
        )  # fmt: skip
    turn, best, total, sums, weights, whole_best, whole_total, whole_sums = _fold(
        open_begin, open_end, turn, best, total, sums, weights, whole_best, whole_total, whole_sums,
        own, ones, ring, bars, position, first, scale, PART, TOTALS,
        BLOCK_N, STAGES, REACH, False, LOGITS, SUMS, DTYPE, ROWS, OVERLAP,
    )  # fmt: skip
    turn, best, total, sums, weights, whole_best, whole_total, whole_sums = _fold(
        open_end, end_tile, turn, best, total, sums, weights, whole_best, whole_total, whole_sums,
        own, ones, ring, bars, position, first, scale, PART, TOTALS,
        BLOCK_N, STAGES, REACH, True, LOGITS, SUMS, DTYPE, ROWS, OVERLAP,
    )  # fmt: skip
    # the last tile's values; what lies behind the last key in its page is not the sequence's
    place = (turn - 1) % STAGES
    mbarrier.wait(value_full.index(place), ((turn - 1) // STAGES) & 1)
    page = place * PARTS * COUNT + highest % BLOCK_N // BLOCK_TOKENS
    _zero_rows(value_pages, page, 0, highest % BLOCK_TOKENS + 1, COUNT, PARTS, BLOCK_TOKENS)
    sums = warpgroup_mma(weights, value_tiles.index(place), sums, is_async=True)
    if PART:
        operand = gl.convert_layout(weights, gl.DotOperandLayout(0, TOTALS, 2))
        total = warpgroup_mma(operand, ones.permute((1, 0)), total, is_async=True)
        sums, total = warpgroup_mma_wait(0, deps=(sums, total))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(value_free.index(place), count=1)
    if PART:
        whole_best, whole_total, whole_sums = _joined(whole_best, whole_total, whole_sums, best, total, sums, SUMS)
        its_head = kv_head * GROUP + (row_begin + gl.arange(0, ROWS, LINE)) % GROUP
        sums = finish(whole_best, whole_total, whole_sums, sinks, its_head, its_head >= 0, SINKS)
    else:
        sums = sums * gl.convert_layout(1.0 / total, LINE)[:, None]
    result = gl.convert_layout(sums.to(out.dtype.element_ty), LINES)
    gl.store(out + (token * out_row + head * out_head)[:, None] + dims[None, :], result, mask=mask)
    return turn
