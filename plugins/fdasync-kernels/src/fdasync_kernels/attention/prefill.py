"""Attention of many queries per sequence over paged KV (prefill, and chunks of it after a cached prefix).

A step's sequences are cut into tiles of queries on the host; rows of a program's tile are (query, head of the group),
so that a few kv heads fill the tensor cores as well as many do. A query's bits do not depend on the queries beside it:
tiles of keys are as large for every query of a layer and stand at multiples of their size, sums go through them in
order, and a tile changes nothing for a row that sees none of it. Knows views, tables and positions; knows no scheduling
and no model. Called by the attention of the plugins' GPU runners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from fdasync_kernels.attention.fixed import Grain, finish, grain_of, join, weigh
from fdasync_kernels.attention.tile import (
    LOG2E,
    REACH_CODES,
    Launch,
    ReachKind,
    add_weights,
    check_views,
    first_visible,
    load_rows,
    multiply,
    split_dims,
)
from fdasync_kernels.pages import head_offset
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PREFILL_TILE = 128


def prefill_tiles(counts: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """The tiles of a step, (sequence, tile of PREFILL_TILE queries in it) int32 [n, 2], from queries per sequence.

    Later tiles come first: they see the most keys, and a long program should not start last.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    tiles = -(-sizes // PREFILL_TILE)
    sequence = np.repeat(np.arange(len(sizes)), tiles)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    order = np.argsort(-number, kind="stable")
    return np.stack((sequence, number), axis=1)[order].astype(np.int32)


def prefill_launch(key_dim: int, dtype: torch.dtype) -> Launch:
    """The tile for heads of this size, however many share a kv head."""
    if dtype == torch.float32:
        # exact dots have no tensor cores: small tiles, or the unrolled code does not fit the registers
        return Launch(16, 16, 4, 2) if key_dim > 64 else Launch(32, 32, 4, 2)
    if key_dim > 256:
        # latent heads: 64 x 512 sums fill the registers of 8 warps; queries 74 KB, two stages of 32 keys 74 KB
        return Launch(64, 32, 8, 2)
    if key_dim > 192:
        # queries and two stages of keys and values of 128 rows would be 128 KB
        return Launch(64, 32, 4, 2)
    # two groups of four warps with 64 rows each, the least that Hopper's products take; 96 KB at 128 dimensions, and
    # registers for two programs on a processor: one multiplies while the other takes exponents
    return Launch(128, 64, 8, 2, registers=128) if key_dim <= 128 else Launch(128, 32, 8, 2)


@triton.jit
def softmax_step(logits, best, total, scale, REACH: tl.constexpr):
    """A running softmax (base 2) takes one more tile of raw logits.

    Returns the largest scaled logit and the sum of weights so far, the tile's weights, and what earlier sums shrink by.
    Every multiplication that an addition follows is a fused one by name: whether a compiler fuses it by itself could
    differ between kernels, and a query's bits with it.
    """
    above = tl.maximum(best, tl.max(logits, 1) * scale)
    base = above
    if REACH != 0:
        # a row that has seen nothing yet: -inf less -inf would be NaN
        base = tl.where(above == float("-inf"), 0.0, above)
    weights = tl.math.exp2(tl.fma(logits, scale, -base[:, None]))
    shrink = tl.math.exp2(best - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    return above, total, weights, shrink


@triton.jit
def _walk(
    begin, low, high, open_from, open_to, best, total, sums, queries, queries_rest, position, first,
    keys, values, table, scale, keys_block, keys_token, values_block, values_token,
    BLOCK_TOKENS: tl.constexpr, KEY_DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, SHARED: tl.constexpr, WIDEN: tl.constexpr, REACH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """A running softmax of all tiles of keys from `begin`, a multiple of BLOCK_N, up to `high`; none before `low` is
    read. Tiles between `open_from` and `open_to` need no mask."""
    # tiles of keys lie where they lie for every query: multiples of BLOCK_N
    offsets = tl.arange(0, BLOCK_N)
    numbers = begin + offsets
    real = numbers < high
    if REACH != 0:
        real = real & (numbers >= low)
    blocks = tl.load(table + numbers // BLOCK_TOKENS, mask=real, other=0)
    for start in range(begin, high, BLOCK_N):
        numbers = start + offsets
        real = numbers < high
        if REACH != 0:
            real = real & (numbers >= low)
        # numbers begin at a multiple of BLOCK_N: the first choice does not change from tile to tile
        tokens = offsets % BLOCK_TOKENS if BLOCK_N % BLOCK_TOKENS == 0 else numbers % BLOCK_TOKENS
        here = blocks.to(tl.int64)
        # the next tile's entries: by the time that their keys are wanted they are here
        ahead = numbers + BLOCK_N
        blocks = tl.load(table + ahead // BLOCK_TOKENS, mask=ahead < high, other=0)
        rows = keys + here * keys_block + tokens * keys_token
        key = load_rows(rows, real, KEY_DIM, 0, D1, True)
        logits = multiply(queries, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN)
        if D2 > 0:
            key_rest = load_rows(rows, real, KEY_DIM, D1, D2, True)
            logits = multiply(queries_rest, tl.trans(key_rest), logits, WIDEN)
        if (start > open_to) | (start < open_from):
            seen = numbers[None, :] <= position[:, None]
            if REACH != 0:
                seen = seen & (numbers[None, :] >= first[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        if FIXED:
            best, weights, shrink = weigh(logits, best, scale)
            total = add_weights(weights.to(values.dtype.element_ty), total, shrink, BLOCK_N, WIDEN)
        else:
            best, total, weights, shrink = softmax_step(logits, best, total, scale, REACH)
        sums = sums * shrink[:, None]
        if SHARED:
            value = key
        else:
            value_rows = values + here * values_block + tokens * values_token
            value = load_rows(value_rows, real, VALUE_DIM, 0, DV, True)
        sums = multiply(weights.to(value.dtype), value, sums, WIDEN)
    return best, total, sums


@triton.jit(do_not_specialize=["lanes", "starts", "first_rows", "counts", "tiles", "reach_size"])
def _prefill(
    query, keys, values, tables, lanes, starts, first_rows, counts, tiles, sinks, out,
    scale, reach_size,
    query_row, query_head, keys_block, keys_token, keys_head, values_block, values_token, values_head,
    table_row, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    SHARED: tl.constexpr, WIDEN: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, PER_SHARE: tl.constexpr,
):  # fmt: skip
    # a program does BLOCK_M rows (query, head in group) of one tile and one kv head; the later rows first.
    # PART: in the fixed order
    kv_head = tl.program_id(0) % KV_HEADS
    piece = tl.program_id(0) // KV_HEADS
    tile = piece // PIECES
    piece = PIECES - 1 - piece % PIECES
    sequence = tl.load(tiles + 2 * tile)
    begin = tl.load(tiles + 2 * tile + 1) * TILE
    # all that is known of the sequence in one go, before anything depends on it
    count = tl.load(counts + sequence).to(tl.int32)
    start_position = tl.load(starts + sequence).to(tl.int32)
    first_row = tl.load(first_rows + sequence).to(tl.int64)
    table = tables + tl.load(lanes + sequence).to(tl.int64) * table_row
    if begin + piece * BLOCK_M // GROUP >= count:
        return
    row = piece * BLOCK_M + tl.arange(0, BLOCK_M)
    number = begin + row // GROUP
    inside = (row < TILE * GROUP) & (number < count)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    lowest = start_position + begin + piece * BLOCK_M // GROUP
    highest = start_position + tl.minimum(begin + (piece * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    # rows that are padding see what the last query sees: a softmax over nothing would be 0 / 0
    position = tl.minimum(start_position + number, highest)
    first = first_visible(position, REACH, reach_size)
    low = first_visible(lowest, REACH, reach_size)
    high = highest + 1
    # keys that every query sees need no mask
    open_from = first_visible(highest, REACH, reach_size)
    open_to = lowest + 1 - BLOCK_N
    token = first_row + number
    query_rows = query + token * query_row + head * query_head
    queries = load_rows(query_rows, inside, KEY_DIM, 0, D1, True)
    queries_rest = queries
    if D2 > 0:
        queries_rest = load_rows(query_rows, inside, KEY_DIM, D1, D2, True)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and not PART:
        best = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    sums = tl.zeros([BLOCK_M, DV], tl.float32)
    keys += head_offset(kv_head, keys_head, KEY_DIM, PER_SHARE)
    values += head_offset(kv_head, values_head, VALUE_DIM, PER_SHARE)
    if PART:
        for part in range(low // PART, (high + PART - 1) // PART):
            peak, totals, partial = _walk(
                tl.maximum(low // BLOCK_N * BLOCK_N, part * PART), low, tl.minimum(high, part * PART + PART),
                open_from, open_to, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M, 16], tl.float32),
                tl.zeros([BLOCK_M, DV], tl.float32), queries, queries_rest, position, first,
                keys, values, table, scale, keys_block, keys_token, values_block, values_token,
                BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, SHARED, WIDEN, REACH, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
            # all columns are the same sum
            best, total, sums = join(best, total, sums, peak, tl.max(totals, 1), partial)
        result = finish(best, total, sums, sinks, head, inside, SINKS)
    else:
        best, total, sums = _walk(
            low // BLOCK_N * BLOCK_N, low, high, open_from, open_to, best, total, sums, queries, queries_rest,
            position, first, keys, values, table, scale, keys_block, keys_token, values_block, values_token,
            BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, SHARED, WIDEN, REACH, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        result = sums / total[:, None]
    value_dims = tl.arange(0, DV)
    out_rows = out + (token * out_row + head * out_head)[:, None] + value_dims[None, :]
    out_inside = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out_rows, result.to(out.dtype.element_ty), mask=out_inside)


@operation
def attend_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
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
    launch: Launch | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
) -> None:
    """Attend ragged queries to their sequences' keys in the pool, where all are stored already; writes `out`.

    `query` [T, H, Dk], strided but in its last dimension: sequence s has `counts`[s] queries in rows `first_rows`[s]..,
    the first at absolute position `starts`[s] (integers [S], on the device); its keys 0 .. position come from its row
    `lanes`[s] (int32 [S], not negative) of `tables`. `tiles` int32 [n, 2] is `prefill_tiles(counts)` on the device:
    sequences that have no tile are left out, and their rows of `out` [T, H, Dv] are not written. Everything else
    is as in `attend_decode`: views of the pool, reach, sinks, latent layers, errors, the stream, and how long tensors
    must live. Nothing is allocated, but the host sets the number of tiles, so a graph serves one number of tiles; a
    tile of a sequence without queries is padding. `scale` is positive. `fixed`, `grain` and
    `launch` are as in `attend_decode`.
    """
    _, heads, key_dim = query.shape
    here, there, width = check_views(query, keys, values, value_dim)
    if not len(tiles):
        return
    grain = (grain or grain_of(key_dim, query.dtype)) if fixed else None
    kv_heads = here.heads
    group = heads // kv_heads
    launch = launch or prefill_launch(key_dim, query.dtype)
    if grain is not None:
        launch = replace(launch, keys=grain.keys)
    pieces = triton.cdiv(PREFILL_TILE * group, launch.rows)
    d1, d2 = split_dims(key_dim)
    shared = values is None and width == d1
    values = keys if values is None else values
    _prefill[(len(tiles) * pieces * kv_heads,)](
        query, keys, values, tables, lanes, starts, first_rows, counts, tiles, sinks, out,
        scale * LOG2E, reach_size,
        query.stride(0), query.stride(1), here.block, here.token, here.head, there.block, there.token, there.head,
        tables.stride(0), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=group, PIECES=pieces, TILE=PREFILL_TILE, BLOCK_TOKENS=here.block_tokens,
        KEY_DIM=key_dim, D1=d1, D2=d2, VALUE_DIM=width, DV=max(16, triton.next_power_of_2(width)),
        SHARED=shared, WIDEN=query.device.type == "cpu", SINKS=sinks is not None, REACH=REACH_CODES[reach_kind],
        BLOCK_M=launch.rows, BLOCK_N=launch.keys, PART=0 if grain is None else grain.part,
        PER_SHARE=here.per_share, num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
    )  # fmt: skip
