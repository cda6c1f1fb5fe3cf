"""Prefill attention for Hopper: the copy engine loads pages, two groups of warps multiply and take exponents in turns.

The same tiles, tables and results as `prefill.py`, for heads that fit: 64 or 128 wide, two bytes an element, a pool
whose rows of tokens stand at one distance. One warp asks the copy engine for keys and values, page by page, into a ring;
each of two groups of four warps owns 64 rows (query, head of the group), and starts a tile's logits before it weighs the
values of the tile before, so that exponents are taken while the tensor cores work. Written in Gluon, Triton's language
with explicit layouts, which has no interpreter: `prefill.py` is what runs everywhere else, and says what is right.
Knows no scheduling and no model. Called by `prefill.py`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64  # of a group of four warps: what one of its products takes


@gluon.jit
def _first_visible(position, REACH: gl.constexpr, reach_size):
    if REACH == 1:
        return gl.maximum(position - reach_size + 1, 0)
    elif REACH == 2:
        return position // reach_size * reach_size
    else:
        return position * 0


@gluon.jit
def _ask_pages(
    descriptor, pages, full, blocks, block_rows, place, kv_head,
    COUNT: gl.constexpr, HALVES: gl.constexpr, NBYTES: gl.constexpr,
):  # fmt: skip
    """Load a tile of keys or values, 64 elements of a page's tokens at a time; a block of -1 becomes zeros."""
    mbarrier.expect(full, NBYTES)
    for page in gl.static_range(COUNT):
        # a row past the end: the copy engine writes zeros
        row = gl.where(blocks[page] < 0, 1 << 30, blocks[page] * block_rows)
        for half in gl.static_range(HALVES):
            target = pages.index((place * HALVES + half) * COUNT + page)
            tma.async_copy_global_to_shared(descriptor, [row, (kv_head * HALVES + half) * 64], full, target)


@gluon.jit
def _load(
    keys, values, key_pages, value_pages, key_full, key_free, value_full, value_free,
    table, low, high, kv_head, key_rows, value_rows,
    BLOCK_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the loading warp does: keep the ring full."""
    COUNT: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    HALVES: gl.constexpr = DIM // 64
    NBYTES: gl.constexpr = BLOCK_N * DIM * 2
    begin = low // BLOCK_N
    for tile in range(begin, (high + BLOCK_N - 1) // BLOCK_N):
        turn = tile - begin
        place = turn % STAGES
        phase = (turn // STAGES) & 1
        # all entries before any of them is used: they arrive together
        blocks = ()
        for page in gl.static_range(COUNT):
            number = tile * BLOCK_N + page * BLOCK_TOKENS
            real = (number < high) & (number + BLOCK_TOKENS > low)
            blocks = blocks + (gl.load(table + number // BLOCK_TOKENS, mask=real, other=-1),)
        mbarrier.wait(key_free.index(place), phase ^ 1)
        _ask_pages(keys, key_pages, key_full.index(place), blocks, key_rows, place, kv_head, COUNT, HALVES, NBYTES)
        mbarrier.wait(value_free.index(place), phase ^ 1)
        _ask_pages(
            values, value_pages, value_full.index(place), blocks, value_rows, place, kv_head, COUNT, HALVES, NBYTES
        )


@gluon.jit
def _softmax_step(logits, best, total, scale, REACH: gl.constexpr):
    """As in `prefill.py`."""
    above = gl.maximum(best, gl.max(logits, 1) * scale)
    base = above
    if REACH != 0:
        base = gl.where(above == float("-inf"), 0.0, above)
    weights = gl.exp2(gl.fma(logits, gl.full_like(logits, 0.0) + scale, gl.full_like(logits, 0.0) - base[:, None]))
    shrink = gl.exp2(best - base)
    total = gl.fma(total, shrink, gl.sum(weights, 1))
    return above, total, weights, shrink


@gluon.jit
def _zero_rows(pages, place, page, begin, end, COUNT: gl.constexpr, HALVES: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Tokens of a page of values outside begin .. end become zeros: they may hold NaN, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, LAYOUT))
    inside = (token >= begin) & (token < end)
    for half in gl.static_range(HALVES):
        target = pages.index((place * HALVES + half) * COUNT + page)
        value = target.load(LAYOUT)
        target.store(gl.where(inside[:, None], value, gl.full_like(value, 0.0)))
    fence_async_shared()


@gluon.jit
def _fold(
    begin, end, first_tile, best, total, sums, weights, own, key_tiles, value_tiles, key_full, key_free, value_full, value_free,
    position, first, scale,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REACH: gl.constexpr, MASKED: gl.constexpr,
    LOGITS: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Tiles begin .. end: the logits of each, and the values of the tile before each."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for tile in range(begin, end):
        turn = tile - first_tile
        place = turn % STAGES
        phase = (turn // STAGES) & 1
        place_before = (turn - 1) % STAGES
        phase_before = ((turn - 1) // STAGES) & 1
        mbarrier.wait(key_full.index(place), phase)
        logits = gl.zeros([ROWS, BLOCK_N], gl.float32, LOGITS)
        logits = warpgroup_mma(own, key_tiles.index(place).permute((1, 0)), logits, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(place_before), phase_before)
        sums = warpgroup_mma(weights, value_tiles.index(place_before), sums, is_async=True)
        logits = warpgroup_mma_wait(1, deps=(logits,))
        mbarrier.arrive(key_free.index(place), count=1)
        if MASKED:
            numbers = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))
            seen = numbers[None, :] <= position[:, None]
            if REACH != 0:
                seen = seen & (numbers[None, :] >= first[:, None])
            logits = gl.where(seen, logits, float("-inf"))
        best, total, next_weights, shrink = _softmax_step(logits, best, total, scale, REACH)
        sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
        mbarrier.arrive(value_free.index(place_before), count=1)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(next_weights.to(DTYPE), WEIGHTS)
    return best, total, sums, weights


@gluon.jit
def _multiply(
    query, out, sinks, queries, key_tiles, value_tiles, value_pages, key_full, key_free, value_full, value_free,
    first_row, start_position, begin, count, low, high, open_from, open_to, row_begin, kv_head, scale, reach_size,
    query_row, query_head, out_row, out_head,
    GROUP: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr, ROWS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: its 64 rows, from queries to the output."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    HALVES: gl.constexpr = DIM // 64
    COUNT: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    row_begin += WHICH * ROWS
    # queries, in rows of memory
    row = row_begin + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    number = begin + row // GROUP
    inside = (row < TILE * GROUP) & (number < count)
    token = first_row + number
    head = (kv_head * GROUP + row % GROUP).to(gl.int64)
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LINES))
    mask = inside[:, None] & (dims >= 0)[None, :]
    own = queries.index(WHICH)
    own.store(gl.load(query + (token * query_row + head * query_head)[:, None] + dims[None, :], mask=mask, other=0.0))
    fence_async_shared()
    # the same rows as the products hold them
    mine = row_begin + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
    position = gl.minimum(start_position + begin + mine // GROUP, high - 1)
    first = _first_visible(position, REACH, reach_size)
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
    if SINKS:
        own_head = kv_head * GROUP + mine % GROUP
        best = gl.load(sinks + own_head).to(gl.float32) * 1.4426950408889634
        total += 1.0
    sums = gl.zeros([ROWS, DIM], gl.float32, SUMS)
    first_tile = low // BLOCK_N
    end_tile = (high + BLOCK_N - 1) // BLOCK_N
    # the first tile's logits
    mbarrier.wait(key_full.index(0), 0)
    logits = gl.zeros([ROWS, BLOCK_N], gl.float32, LOGITS)
    logits = warpgroup_mma(own, key_tiles.index(0).permute((1, 0)), logits, use_acc=False, is_async=True)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(key_free.index(0), count=1)
    numbers = first_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))
    seen = numbers[None, :] <= position[:, None]
    if REACH != 0:
        seen = seen & (numbers[None, :] >= first[:, None])
    logits = gl.where(seen, logits, float("-inf"))
    best, total, first_weights, shrink = _softmax_step(logits, best, total, scale, REACH)
    weights = gl.convert_layout(first_weights.to(DTYPE), WEIGHTS)
    if REACH != 0:
        # what a window left behind
        mbarrier.wait(value_full.index(0), 0)
        page = (low - first_tile * BLOCK_N) // BLOCK_TOKENS
        _zero_rows(value_pages, 0, page, low % BLOCK_TOKENS, BLOCK_TOKENS, COUNT, HALVES, BLOCK_TOKENS)
    # tiles of keys that every row sees need no mask
    middle = gl.maximum(first_tile + 1, gl.minimum((open_from + BLOCK_N - 1) // BLOCK_N, end_tile))
    rest = gl.maximum(middle, (open_to + 1) // BLOCK_N)
    if REACH != 0:
        best, total, sums, weights = _fold(
            first_tile + 1, middle, first_tile, best, total, sums, weights, own, key_tiles, value_tiles, key_full, key_free, value_full, value_free,
            position, first, scale, BLOCK_N, STAGES, REACH, True, LOGITS, SUMS, DTYPE, ROWS,
        )  # fmt: skip
    best, total, sums, weights = _fold(
        middle, rest, first_tile, best, total, sums, weights, own, key_tiles, value_tiles, key_full, key_free, value_full, value_free,
        position, first, scale, BLOCK_N, STAGES, REACH, False, LOGITS, SUMS, DTYPE, ROWS,
    )  # fmt: skip
    best, total, sums, weights = _fold(
        rest, end_tile, first_tile, best, total, sums, weights, own, key_tiles, value_tiles, key_full, key_free, value_full, value_free,
        position, first, scale, BLOCK_N, STAGES, REACH, True, LOGITS, SUMS, DTYPE, ROWS,
    )  # fmt: skip
    # the last tile's values; what lies behind the last key in its page is not the sequence's
    turn = end_tile - 1 - first_tile
    place = turn % STAGES
    mbarrier.wait(value_full.index(place), (turn // STAGES) & 1)
    page = (high - 1) % BLOCK_N // BLOCK_TOKENS
    _zero_rows(value_pages, place, page, 0, (high - 1) % BLOCK_TOKENS + 1, COUNT, HALVES, BLOCK_TOKENS)
    gl.thread_barrier()
    sums = warpgroup_mma(weights, value_tiles.index(place), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
    result = gl.convert_layout((sums * share[:, None]).to(DTYPE), LINES)
    gl.store(out + (token * out_row + head * out_head)[:, None] + dims[None, :], result, mask=mask)


@gluon.jit(do_not_specialize=["lanes", "starts", "first_rows", "counts", "tiles", "reach_size"])
def prefill_hopper(
    keys, values, query, tables, lanes, starts, first_rows, counts, tiles, sinks, out,
    scale, reach_size, key_rows, value_rows, query_row, query_head, table_row, out_row, out_head,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    DIM: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 2 * ROWS
    DTYPE: gl.constexpr = query.dtype.element_ty
    HALVES: gl.constexpr = DIM // 64
    PAGES: gl.constexpr = STAGES * HALVES * BLOCK_N // BLOCK_TOKENS
    kv_head = gl.program_id(0) % KV_HEADS
    piece = gl.program_id(0) // KV_HEADS
    tile = piece // PIECES
    piece = PIECES - 1 - piece % PIECES
    sequence = gl.load(tiles + 2 * tile)
    begin = gl.load(tiles + 2 * tile + 1) * TILE
    count = gl.load(counts + sequence).to(gl.int32)
    start_position = gl.load(starts + sequence).to(gl.int32)
    first_row = gl.load(first_rows + sequence).to(gl.int64)
    table = tables + gl.load(lanes + sequence).to(gl.int64) * table_row
    if begin + piece * BLOCK_M // GROUP >= count:
        return
    lowest = start_position + begin + piece * BLOCK_M // GROUP
    highest = start_position + gl.minimum(begin + (piece * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    low = _first_visible(lowest, REACH, reach_size)
    high = highest + 1
    open_from = _first_visible(highest, REACH, reach_size)
    open_to = lowest

    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, DIM], SHARED)
    key_pages = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK_TOKENS, 64], SHARED)
    value_pages = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK_TOKENS, 64], SHARED)
    key_tiles = key_pages._reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    value_tiles = value_pages._reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(key_full.index(place), count=1)
        mbarrier.init(key_free.index(place), count=2)
        mbarrier.init(value_full.index(place), count=1)
        mbarrier.init(value_free.index(place), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                query, out, sinks, queries, key_tiles, value_tiles, value_pages, key_full, key_free, value_full, value_free,
                first_row, start_position, begin, count, low, high, open_from, open_to, piece * BLOCK_M, kv_head, scale, reach_size,
                query_row, query_head, out_row, out_head,
                GROUP, TILE, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, SINKS, REACH, ROWS, gl.constexpr(0),
            )),
            (_multiply, (
                query, out, sinks, queries, key_tiles, value_tiles, value_pages, key_full, key_free, value_full, value_free,
                first_row, start_position, begin, count, low, high, open_from, open_to, piece * BLOCK_M, kv_head, scale, reach_size,
                query_row, query_head, out_row, out_head,
                GROUP, TILE, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, SINKS, REACH, ROWS, gl.constexpr(1),
            )),
            (_load, (
                keys, values, key_pages, value_pages, key_full, key_free, value_full, value_free,
                table, low, high, kv_head, key_rows, value_rows, BLOCK_TOKENS, BLOCK_N, DIM, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(view: torch.Tensor) -> TensorDescriptor:
    """Of pages of 64 elements of a layer's keys or values: rows are tokens, of all blocks, at one distance."""
    blocks, block_tokens, heads, dim = view.shape
    distance = view.stride(1)
    rows = (blocks - 1) * (view.stride(0) // distance) + block_tokens
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(view, [rows, heads * dim], [distance, 1], [block_tokens, 64], layout)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None) -> bool:
    """Whether these heads and this pool can be attended by this module's kernel, on this device."""
    if query.device.type != "cuda" or values is None or query.dtype not in _GLUON_TYPES:
        return False
    if torch.cuda.get_device_capability(query.device)[0] != 9:
        return False
    dim = query.shape[2]
    if dim not in (64, 128) or values.shape[3] != dim or keys.shape[1] not in (8, 16, 32, 64):
        return False
    return all(
        view.stride(2) == dim
        and view.stride(0) % view.stride(1) == 0
        and view.stride(1) % 8 == 0
        and view.data_ptr() % 16 == 0
        and view.shape[0] * (view.stride(0) // view.stride(1)) < 1 << 30
        for view in (keys, values)
    )


def attend_hopper(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    counts: torch.Tensor,
    tiles: torch.Tensor,
    *,
    tile: int,
    scale: float,
    reach: int,
    reach_size: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    keys_at_once: int = 128,
    stages: int = 2,
) -> None:
    """`attend_prefill` where `fits`; `scale` is in base 2, `tile` queries are a tile, `reach` the kernels' code of it."""
    heads, dim = query.shape[1:]
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    pieces = triton.cdiv(tile * group, 2 * ROWS)
    prefill_hopper[(len(tiles) * pieces * kv_heads,)](
        _descriptor(keys), _descriptor(values), query, tables, lanes, starts, first_rows, counts, tiles, sinks, out,
        scale, reach_size, keys.stride(0) // keys.stride(1), values.stride(0) // values.stride(1),
        query.stride(0), query.stride(1), tables.stride(0), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=group, PIECES=pieces, TILE=tile, BLOCK_TOKENS=keys.shape[1], DIM=dim,
        SINKS=sinks is not None, REACH=reach, BLOCK_N=keys_at_once, STAGES=stages, ROWS=ROWS,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
