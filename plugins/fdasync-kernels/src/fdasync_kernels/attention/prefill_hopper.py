"""Prefill attention for Hopper: the copy engine loads pages, two groups of warps multiply and take exponents in turns.

The same tiles and tables as `prefill.py`, for heads that fit: 64 or 128 wide, two bytes an element, a pool whose pages
stand on a grid. One warp asks the copy engine for keys and values, page by page, into a ring in shared memory; each of
two groups of four warps owns 64 rows (query, head of the group) and reads the ring (`hopper_tile.py`). A processor
takes one program after another, so that the next program's keys are loaded while the last one is stored, and programs
without queries, which a graph's padding is full of, cost next to nothing. Written in Gluon, Triton's language with
explicit layouts, which has no interpreter: `prefill.py` runs elsewhere, and this module is compared with it. Knows no
scheduling and no model. `registry.py` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fdasync.errors import BadInput
from fdasync_kernels.attention.fixed import Grain, grain_of
from fdasync_kernels.attention.hopper_pages import page_descriptor, page_rows
from fdasync_kernels.attention.hopper_tile import LATER_NAMES, attend_rows, barrier, copy_in, first_visible
from fdasync_kernels.attention.prefill import PREFILL_TILE
from fdasync_kernels.attention.tile import LOG2E, REACH_CODES, check_views
from fdasync_kernels.chip import processors_of
from fdasync_kernels.registry import Kernel

if TYPE_CHECKING:
    from fdasync_kernels.attention.tile import Launch, ReachKind

ROWS = 64  # of a group of four warps: what one of its products takes
# of a thread when it starts, with 12 warps; `_prefill_hopper` shares them out again
REGISTERS = 168
# Keys of a tile and places in the ring, by the width of a head: 160 KB with the queries at 128. Heads of 256 are the
# other kernel's: this one was not timed with them.
_TILES = {64: (128, 2), 128: (128, 2)}


@gluon.jit
def _find(
    programs, step, base,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which of this processor's next 32 programs have queries."""
    _tables, _lanes, _starts, _first_rows, counts, tiles = step
    program = base + gl.arange(0, 32, LAYOUT) * gl.num_programs(0)
    inside = program < programs
    unit = gl.where(inside, program, 0) // KV_HEADS
    tile = unit // PIECES
    piece = PIECES - 1 - unit % PIECES
    sequence = gl.load(tiles + 2 * tile)
    begin = gl.load(tiles + 2 * tile + 1) * TILE
    count = gl.load(counts + sequence).to(gl.int32)
    return inside & (begin + piece * BLOCK_M // GROUP < count)


@gluon.jit
def _describe(
    program, step, table_row, reach_size,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr,
    REACH: gl.constexpr,
):  # fmt: skip
    """One program: its kv head and table; its rows of one tile, whose they are; and the keys that they see."""
    tables, lanes, starts, first_rows, counts, tiles = step
    kv_head = program % KV_HEADS
    unit = program // KV_HEADS
    tile = unit // PIECES
    # the later rows first
    row_begin = (PIECES - 1 - unit % PIECES) * BLOCK_M
    sequence = gl.load(tiles + 2 * tile)
    begin = gl.load(tiles + 2 * tile + 1) * TILE
    count = gl.load(counts + sequence).to(gl.int32)
    start_position = gl.load(starts + sequence).to(gl.int32)
    first_row = gl.load(first_rows + sequence).to(gl.int64)
    table = tables + gl.load(lanes + sequence).to(gl.int64) * table_row
    lowest = start_position + begin + row_begin // GROUP
    highest = start_position + gl.minimum(begin + (row_begin + BLOCK_M - 1) // GROUP, count - 1)
    low = first_visible(lowest, REACH, reach_size)
    return kv_head, table, (row_begin, begin, count, start_position, first_row), (low, lowest, highest)


@gluon.jit
def _ask_pages(
    descriptor, pages, full, blocks, block_rows, share_rows, place, kv_head,
    COUNT: gl.constexpr, PARTS: gl.constexpr, NBYTES: gl.constexpr, PER_SHARE: gl.constexpr,
):  # fmt: skip
    """Load a tile of keys or values, 64 elements of a page's tokens at a time; a block of -1 becomes zeros."""
    mbarrier.expect(full, NBYTES)
    for page in gl.static_range(COUNT):
        # a row past the end: the copy engine writes zeros
        row = gl.where(blocks[page] < 0, 1 << 30, blocks[page] * block_rows + kv_head // PER_SHARE * share_rows)
        for part in gl.static_range(PARTS):
            target = pages.index((place * PARTS + part) * COUNT + page)
            copy_in(descriptor, [row, (kv_head % PER_SHARE * PARTS + part) * 64], full, target)


@gluon.jit
def _load(
    keys, values, key_pages, value_pages, bars, step, programs, table_row, reach_size,
    key_block, key_share, value_block, value_share,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, REACH: gl.constexpr,
    PER_SHARE: gl.constexpr,
):  # fmt: skip
    """What the loading warp does: keep the ring full."""
    COUNT: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    PARTS: gl.constexpr = DIM // 64
    NBYTES: gl.constexpr = BLOCK_N * DIM * 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    key_full, key_free, value_full, value_free = bars
    lane = gl.arange(0, 32, LAYOUT)
    turn = 0
    for base in range(gl.program_id(0), programs, 32 * gl.num_programs(0)):
        found = _find(programs, step, base, KV_HEADS, GROUP, PIECES, TILE, BLOCK_M, LAYOUT)
        at = -1
        for _ in range(gl.sum(found.to(gl.int32), 0)):
            at = gl.min(gl.where(found & (lane > at), lane, 32), 0)
            kv_head, table, _rows, span = _describe(
                base + at * gl.num_programs(0), step, table_row, reach_size,
                KV_HEADS, GROUP, PIECES, TILE, BLOCK_M, REACH,
            )  # fmt: skip
            low, _lowest, highest = span
            for tile in range(low // BLOCK_N, highest // BLOCK_N + 1):
                place = turn % STAGES
                phase = (turn // STAGES) & 1
                # all entries before any of them is used: they arrive together
                blocks = ()
                for page in gl.static_range(COUNT):
                    number = tile * BLOCK_N + page * BLOCK_TOKENS
                    real = (number <= highest) & (number + BLOCK_TOKENS > low)
                    # a tuple that grows
                    blocks = blocks + (gl.load(table + number // BLOCK_TOKENS, mask=real, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
                mbarrier.wait(key_free.index(place), phase ^ 1)
                _ask_pages(
                    keys, key_pages, key_full.index(place), blocks, key_block, key_share, place, kv_head,
                    COUNT, PARTS, NBYTES, PER_SHARE,
                )  # fmt: skip
                mbarrier.wait(value_free.index(place), phase ^ 1)
                _ask_pages(
                    values, value_pages, value_full.index(place), blocks, value_block, value_share, place, kv_head,
                    COUNT, PARTS, NBYTES, PER_SHARE,
                )  # fmt: skip
                turn += 1


@gluon.jit
def _multiply(
    query, out, sinks, own, ones, ring, bars, value_pages, step, programs, scale, reach_size,
    query_row, query_head, table_row, out_row, out_head,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr,
    ROWS: gl.constexpr, OVERLAP: gl.constexpr, PART: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: half of the rows of each program."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 32, LAYOUT)
    turn = 0
    for base in range(gl.program_id(0), programs, 32 * gl.num_programs(0)):
        found = _find(programs, step, base, KV_HEADS, GROUP, PIECES, TILE, 2 * ROWS, LAYOUT)
        at = -1
        for _ in range(gl.sum(found.to(gl.int32), 0)):
            at = gl.min(gl.where(found & (lane > at), lane, 32), 0)
            kv_head, _table, rows, span = _describe(
                base + at * gl.num_programs(0), step, table_row, reach_size,
                KV_HEADS, GROUP, PIECES, TILE, 2 * ROWS, REACH,
            )  # fmt: skip
            turn = attend_rows(
                query, out, sinks, own, ones, ring, bars, value_pages, turn, kv_head, WHICH * ROWS, rows, span,
                scale, reach_size, query_row, query_head, out_row, out_head,
                GROUP, TILE, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, SINKS, REACH, ROWS, OVERLAP, PART,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "lanes", "starts", "first_rows", "counts", "tiles", "programs", "reach_size", "table_row", "key_block",
        "key_share", "value_block", "value_share",
    ]
)  # fmt: skip
def _prefill_hopper(
    keys, values, query, tables, lanes, starts, first_rows, counts, tiles, sinks, out,
    programs, scale, reach_size, key_block, key_share, value_block, value_share,
    query_row, query_head, table_row, out_row, out_head,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    DIM: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, OVERLAP: gl.constexpr, PART: gl.constexpr, PER_SHARE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype.element_ty
    PAGES: gl.constexpr = STAGES * (DIM // 64) * (BLOCK_N // BLOCK_TOKENS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, DIM], SHARED)
    ones = queries.index(0)  # for nothing
    if PART:
        # rows of ones, which weights are multiplied by for their sums in the fixed order
        ones = gl.allocate_shared_memory(DTYPE, [8, BLOCK_N], SHARED)
        lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ones.store(gl.full([8, BLOCK_N], 1.0, DTYPE, lines))
    key_pages = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK_TOKENS, 64], SHARED)
    value_pages = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK_TOKENS, 64], SHARED)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for place in gl.static_range(STAGES):
        mbarrier.init(key_full.index(place), count=1)
        mbarrier.init(key_free.index(place), count=2)
        mbarrier.init(value_full.index(place), count=1)
        mbarrier.init(value_free.index(place), count=2)
    fence_async_shared()
    barrier()
    # a product's operand of DIM elements lies in parts of 64, each with all tokens: pages of a part follow each other
    if LATER_NAMES:
        key_tiles = key_pages.reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
        value_tiles = value_pages.reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    else:
        key_tiles = key_pages._reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
        value_tiles = value_pages._reinterpret(DTYPE, [STAGES, BLOCK_N, DIM], SHARED)
    ring = (key_tiles, value_tiles)
    bars = (key_full, key_free, value_full, value_free)
    step = (tables, lanes, starts, first_rows, counts, tiles)
    gl.warp_specialize(
        [
            (_multiply, (
                query, out, sinks, queries.index(0), ones, ring, bars, value_pages, step, programs, scale, reach_size,
                query_row, query_head, table_row, out_row, out_head,
                KV_HEADS, GROUP, PIECES, TILE, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, SINKS, REACH, ROWS, OVERLAP, PART,
                gl.constexpr(0),
            )),
            (_multiply, (
                query, out, sinks, queries.index(1), ones, ring, bars, value_pages, step, programs, scale, reach_size,
                query_row, query_head, table_row, out_row, out_head,
                KV_HEADS, GROUP, PIECES, TILE, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, SINKS, REACH, ROWS, OVERLAP, PART,
                gl.constexpr(1),
            )),
            (_load, (
                keys, values, key_pages, value_pages, bars, step, programs, table_row, reach_size,
                key_block, key_share, value_block, value_share,
                KV_HEADS, GROUP, PIECES, TILE, 2 * ROWS, BLOCK_TOKENS, BLOCK_N, DIM, STAGES, REACH, PER_SHARE,
            )),
        ],
        [4, 1],
        # of a thread of the second group and of the loading warp; the first group has as many as the second
        [232, 40],
    )  # fmt: skip


def fits_hopper(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, grain: Grain | None = None
) -> bool:
    """Whether this module's kernel can attend such heads in such a pool, with `grain` in the fixed order: by shapes and
    strides, on any device."""
    if grain is not None and grain.keys not in (64, 128):
        return False
    if values is None or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    dim = query.shape[2]
    if dim not in _TILES or values.shape[-1] != dim:
        return False
    here, there = page_rows(keys), page_rows(values)
    return here is not None and there is not None and here.per_share == there.per_share


def _fits(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    *_tensors: torch.Tensor,
    launch: Launch | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
    **_options: Any,
) -> bool:
    return launch is None and fits_hopper(query, keys, values, _grain(query, fixed, grain))


def _grain(query: torch.Tensor, fixed: bool, grain: Grain | None) -> Grain | None:
    return (grain or grain_of(query.shape[2], query.dtype)) if fixed else None


def _attend(
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
    scale: float,
    reach_kind: ReachKind,
    reach_size: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    value_dim: int | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
    **_options: Any,
) -> None:
    """`attend_prefill`, for heads and pools that `fits_hopper` names; `_options` have the values that fit."""
    check_views(query, keys, values, value_dim)
    heads, dim = query.shape[1:]
    here, there = page_rows(keys), page_rows(values)
    if here is None or there is None or here.per_share != there.per_share:
        raise BadInput("keys", "the copy engine cannot load from this pool")
    if not len(tiles):
        return
    kv_heads = keys.shape[2:-1].numel()
    group = heads // kv_heads
    pieces = triton.cdiv(PREFILL_TILE * group, 2 * ROWS)
    programs = len(tiles) * pieces * kv_heads
    grain = _grain(query, fixed, grain)
    keys_at_once, stages = _TILES[dim] if grain is None else (grain.keys, 256 // grain.keys)
    _prefill_hopper[(min(programs, processors_of(query.device)),)](
        page_descriptor(keys, here), page_descriptor(values, there), query,
        tables, lanes, starts, first_rows, counts, tiles, sinks, out,
        programs, scale * LOG2E, reach_size, here.block, here.share, there.block, there.share,
        query.stride(0), query.stride(1), tables.stride(0), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=group, PIECES=pieces, TILE=PREFILL_TILE, BLOCK_TOKENS=keys.shape[1], DIM=dim,
        PER_SHARE=here.per_share, SINKS=sinks is not None, REACH=REACH_CODES[reach_kind], BLOCK_N=keys_at_once,
        STAGES=stages, ROWS=ROWS, OVERLAP=True, PART=0 if grain is None else grain.part, num_warps=4,
        maxnreg=REGISTERS,
    )  # fmt: skip


KERNELS = {"attend_prefill": Kernel(_fits, _attend, interpreted=False)}
