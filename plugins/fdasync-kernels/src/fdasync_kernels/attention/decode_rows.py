"""Decode of several rows of a sequence at once (its last token and drafts): keys and values are read once for them.

Rows that stand side by side with one lane and rising positions are a tile, found on the device (`row_tiles`), so a
graph for n rows serves any sequences. A program takes the rows of a tile times heads of one kv head; a row that begins
no tile has a program that ends at once. A mask by position makes each row see what it sees alone. In the fixed order
(`fixed.py`) a row has the bits that `attend_decode` gives it: parts stand at absolute positions, and a part that a row
does not see changes nothing. Partials are joined by a second kernel. Latents are decoded row by row (`latent.py`).
Knows views, tables and positions; knows no drafts. Called by the attention of the plugins' GPU runners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.attention.decode import MAX_SPLITS, PARTS_AT_ONCE, PROGRAMS_PER_PROCESSOR, count_splits
from fdasync_kernels.attention.fixed import Grain, finish, grain_of, join, most_parts
from fdasync_kernels.attention.join import join_parts, join_rows, span_of
from fdasync_kernels.attention.tile import (
    LOG2E,
    REACH_CODES,
    Launch,
    ReachKind,
    check_views,
    first_visible,
    fold_keys,
    is_short,
    load_rows,
    split_dims,
)
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.pages import head_offset
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from fdasync_kernels.attention.decode import Workspace

MOST_ROWS = 16
#: widest keys that tiles of rows attend to
WIDEST_KEY = 256
_JOINED_AT_ONCE = 16


def tile_rows(most_run: int) -> int:
    """Rows of a tile, for runs of up to so many rows: a power of two; longer runs are cut."""
    return min(MOST_ROWS, int(triton.next_power_of_2(most_run)))


@triton.jit(do_not_specialize=["lanes", "positions", "count"])
def _tiles_kernel(lanes, positions, out, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    own = tl.program_id(0)
    row = tl.arange(0, WIDTH)
    here = row < count
    behind = here & (row > 0)
    place = tl.load(positions + row, mask=here, other=-1)
    lane = tl.where(place < 0, -1, tl.load(lanes + row, mask=here, other=-1))
    place_before = tl.load(positions + row - 1, mask=behind, other=-1)
    lane_before = tl.where(place_before < 0, -1, tl.load(lanes + row - 1, mask=behind, other=-1))
    # padding is cut into tiles too, whatever its positions
    begins = (row == 0) | (lane != lane_before) | ((lane >= 0) & (place != place_before + 1))
    begin = tl.max(tl.where(begins & (row <= own), row, 0), axis=0)
    end = tl.min(tl.where(begins & (row > own), row, count), axis=0)
    first = begin + (own - begin) // ROWS * ROWS
    tl.store(out + 2 * own, first)
    tl.store(out + 2 * own + 1, tl.minimum(end - first, ROWS))


def row_tiles(lanes: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """The tiles of decodes: int32 [R, 2], the first row of each row's tile and how many rows it has; one launch.

    `lanes` int32 [R] and `positions` int64 [R], contiguous, negative ones are padding; `rows` is of `tile_rows`. What
    they are when the kernel runs counts, so a graph can capture it.
    """
    count = len(lanes)
    out = torch.empty((count, 2), dtype=torch.int32, device=lanes.device)
    if count:
        grid: Any = (count,)
        _tiles_kernel[grid](lanes, positions, out, count, ROWS=rows, WIDTH=triton.next_power_of_2(count), num_warps=4)
    return out


def rows_launch(rows: int, group: int, key_dim: int, dtype: torch.dtype) -> Launch:
    """The launch for tiles of so many rows, and `group` query heads per kv head."""
    if dtype == torch.float32:
        # exact dots have no tensor cores: small tiles, or the unrolled code does not fit the registers
        return Launch(16, 16 if key_dim > 64 else 32, 4, 2)
    height = int(max(16, min(64, triton.next_power_of_2(rows * group))))
    return Launch(height, 64 if key_dim <= 128 else 32, 8 if height > 32 else 4, 3 if key_dim <= 128 else 2)


@triton.jit(do_not_specialize=["lanes", "positions", "tiles", "reach_size", "splits", "most"])
def _decode_rows(
    query, keys, values, tables, lanes, positions, tiles, sinks, out, partials, stats,
    scale, reach_size, splits, most, capacity, width,
    query_row, query_head, keys_block, keys_token, keys_head, values_block, values_token, values_head,
    table_row, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    WIDEN: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr, PER_SHARE: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    # a program does the tile that begins at its row, some heads of one kv head's group, one split of the keys
    begin_row = tl.program_id(0)
    if tl.load(tiles + 2 * begin_row) != begin_row:
        return
    count = tl.load(tiles + 2 * begin_row + 1)
    kv_head = tl.program_id(1) // PIECES
    number = tl.arange(0, BLOCK_M) % ROWS
    in_group = tl.program_id(1) % PIECES * (BLOCK_M // ROWS) + tl.arange(0, BLOCK_M) // ROWS
    inside = (in_group < GROUP) & (number < count)
    head = (kv_head * GROUP + in_group).to(tl.int64)
    row = (begin_row + number).to(tl.int64)
    split = tl.program_id(2)
    lane = tl.load(lanes + begin_row)
    lowest = tl.load(positions + begin_row).to(tl.int32)
    value_dims = tl.arange(0, DV)
    out_rows = out + (row * out_row + head * out_head)[:, None] + value_dims[None, :]
    out_inside = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
    if (lane < 0) | (lowest < 0):
        if split == 0:
            tl.store(out_rows, tl.zeros([BLOCK_M, DV], out.dtype.element_ty), mask=out_inside)
        return
    highest = lowest + count - 1
    # rows past the tile see what its last row sees: a softmax over nothing would be 0 / 0
    position = tl.minimum(lowest + number, highest)
    first = first_visible(position, REACH, reach_size)
    begin = first_visible(lowest, REACH, reach_size)
    if PART:
        first_part = begin // PART
        span = tl.cdiv(highest // PART - first_part + 1, splits)
        low = tl.maximum(begin, (first_part + split * span) * PART)
        high = tl.minimum((first_part + split * span + span) * PART, highest + 1)
    else:
        span = span_of(highest + 1 - begin, splits, BLOCK_N)
        low = begin + split * span
        high = tl.minimum(low + span, highest + 1)
    if low >= high:
        return
    query_rows = query + row * query_row + head * query_head
    queries = load_rows(query_rows, inside, KEY_DIM, 0, D1, True)
    queries_rest = queries
    if D2 > 0:
        queries_rest = load_rows(query_rows, inside, KEY_DIM, D1, D2, True)
    keys += head_offset(kv_head, keys_head, KEY_DIM, PER_SHARE)
    values += head_offset(kv_head, values_head, VALUE_DIM, PER_SHARE)
    table = tables + lane.to(tl.int64) * table_row
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DV], tl.float32)
    if PART:
        peak = best
        totals = tl.zeros([BLOCK_M, 16], tl.float32)
        part_sums = sums
        for start in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
            # a part starts from nothing: by -inf earlier sums shrink to 0
            peak = tl.where(start % PART == 0, float("-inf"), peak)
            peak, totals, part_sums = fold_keys(
                queries, queries_rest, peak, totals, part_sums, keys, values, table, start, high, first, position,
                scale, keys_block, keys_token, values_block, values_token,
                BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, False, WIDEN, BLOCK_N, True, True, low,
            )  # fmt: skip
            if ((start + BLOCK_N) % PART == 0) | (start + BLOCK_N >= high):
                # all columns are the same sum
                weight = tl.max(totals, 1)
                if SPLIT:
                    # a row has room for the parts that it sees, and they alone are joined
                    own = start // PART - first // PART
                    seen = inside & (own >= 0) & (start // PART <= position // PART)
                    partial = (row * most + own) * HEADS + head
                    where = partials + partial[:, None] * width + value_dims[None, :]
                    tl.store(where, part_sums, mask=out_inside & seen[:, None])
                    tl.store(stats + partial, peak, mask=seen)
                    tl.store(stats + capacity + partial, weight, mask=seen)
                else:
                    best, total, sums = join(best, total, sums, peak, weight, part_sums)
        if not SPLIT:
            result = finish(best, total, sums, sinks, head, inside, SINKS)
            tl.store(out_rows, result.to(out.dtype.element_ty), mask=out_inside)
    else:
        if SINKS:  # noqa: SIM102 - one is known when this is compiled, the other is not
            if split == 0:
                best = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
                total += 1.0
        for start in range(low, high, BLOCK_N):
            best, total, sums = fold_keys(
                queries, queries_rest, best, total, sums,
                keys, values, table, start, high, first, position, scale,
                keys_block, keys_token, values_block, values_token,
                BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, False, WIDEN, BLOCK_N, True,
            )  # fmt: skip
        if SPLIT:
            partial = (row * splits + split) * HEADS + head
            tl.store(partials + partial[:, None] * width + value_dims[None, :], sums, mask=out_inside)
            tl.store(stats + partial, best, mask=inside)
            tl.store(stats + capacity + partial, total, mask=inside)
        else:
            tl.store(out_rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=out_inside)


@operation
def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    tiles: torch.Tensor,
    *,
    rows: int,
    scale: float,
    reach_kind: ReachKind,
    reach_size: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
    splits: int | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
) -> None:
    """As `attend_decode` of R rows, whose tiles (`row_tiles` of `lanes`, `positions` and `rows`) read their keys once.

    Keys are up to `WIDEST_KEY` wide. `fixed`: the bits of `attend_decode`; else its numbers, in sums of another order.
    One or two launches on the current stream, no synchronisation, nothing allocated. The workspace has room for as
    many sequences as there are rows, or the keys are not split. Raises BadInput as `attend_decode` does.
    """
    count, heads, key_dim = query.shape
    if not count:
        return
    if not len(lanes) == len(positions) == len(out) == len(tiles) == count:
        raise BadInput("lanes", f"{len(lanes)}, with {len(positions)} positions and {len(tiles)} tiles of {count} rows")
    if key_dim > WIDEST_KEY:
        raise BadInput("keys", f"of {key_dim} dimensions", limit=WIDEST_KEY)
    here, there, width = check_views(query, keys, values, None)
    kv_heads = here.heads
    group = heads // kv_heads
    launch = rows_launch(rows, group, key_dim, query.dtype)
    pieces = triton.cdiv(group, launch.rows // rows)
    capacity = workspace.partials.shape[0] if workspace.partials.shape[1] >= width else 0
    room = capacity // (count * heads)
    max_context = tables.shape[1] * here.block_tokens
    sequences = triton.cdiv(count, rows)
    most = 1
    if fixed:
        grain = grain or grain_of(key_dim, query.dtype)
        launch = replace(launch, keys=grain.keys)
        most = most_parts(max_context, reach_size if is_short(reach_kind) else None, grain)
        wanted = PROGRAMS_PER_PROCESSOR * workspace.processors // (sequences * kv_heads * pieces)
        need = most
        choice = min(wanted, most, MAX_SPLITS) if most <= room else 1
    else:
        if is_short(reach_kind):
            max_context = min(max_context, reach_size + rows)
        need = splits or 1
        wanted = count_splits(
            sequences, heads, kv_heads * pieces, max_context, launch, capacity, workspace.processors
        )  # fmt: skip
        choice = min(wanted, room)
    if splits is None:
        splits = max(1, choice)
    elif splits > 1 and need > room:
        raise BadInput("splits", "are more than the workspace has room for", limit=room)
    d1, d2 = split_dims(key_dim)
    dv = max(16, triton.next_power_of_2(width))
    code = REACH_CODES[reach_kind]
    partials, stats = workspace.partials, workspace.stats
    _decode_rows[(count, kv_heads * pieces, splits)](
        query, keys, values, tables, lanes, positions, tiles, sinks, out, partials, stats,
        scale * LOG2E, reach_size, splits, most, stats.stride(0), partials.stride(0),
        query.stride(0), query.stride(1), here.block, here.token, here.head, there.block, there.token, there.head,
        tables.stride(0), out.stride(0), out.stride(1),
        HEADS=heads, GROUP=group, PIECES=pieces, ROWS=rows, BLOCK_TOKENS=here.block_tokens,
        KEY_DIM=key_dim, D1=d1, D2=d2, VALUE_DIM=width, DV=dv,
        WIDEN=query.device.type == "cpu", SINKS=sinks is not None, REACH=code, SPLIT=splits > 1,
        BLOCK_M=launch.rows, BLOCK_N=launch.keys, PART=grain.part if fixed and grain else 0, PER_SHARE=here.per_share,
        num_warps=launch.warps, num_stages=launch.stages, **overlap(query.device),
    )  # fmt: skip
    if splits > 1 and fixed and grain:
        join_parts[(count, heads)](
            partials, stats, lanes, positions, sinks, out, reach_size, most, stats.stride(0), partials.stride(0),
            out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=width, DV=dv, REACH=code, SINKS=sinks is not None, PART=grain.part,
            AT_ONCE=PARTS_AT_ONCE, num_warps=4, **overlap(query.device),
        )  # fmt: skip
    elif splits > 1:
        join_rows[(count, heads)](
            partials, stats, lanes, positions, tiles, out, reach_size, splits, stats.stride(0), partials.stride(0),
            out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=width, DV=dv, REACH=code, BLOCK_N=launch.keys, AT_ONCE=_JOINED_AT_ONCE,
            num_warps=4, **overlap(query.device),
        )  # fmt: skip
