"""Attention of one query per sequence over paged latents (decode of MLA layers, with absorbed projections).

All query heads share one latent per position, [rank | rotary part]: it is the key, and its first `rank` elements are
the value. So a program loads each tile of latents once and multiplies it twice; heads are the rows of its tile. A
sequence's positions are split among programs and joined as in `decode.py`. Knows views, tables and positions; knows no
scheduling and no model. Called by the attention of the plugins' GPU runners.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.attention.decode import MAX_SPLITS, PARTS_AT_ONCE
from fdasync_kernels.attention.fixed import Grain, finish, grain_of, join, most_parts, weigh
from fdasync_kernels.attention.join import join_parts, span_of
from fdasync_kernels.attention.tile import LOG2E, add_weights, load_rows, multiply
from fdasync_kernels.chip import chip_of
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.pages import Pages, pages_of
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from fdasync_kernels.attention.decode import Workspace

# what one more split costs beside a program's walk over a few thousand positions: its start, its partial, the join
SPLIT_COST = 0.02


@dataclass(frozen=True)
class LatentLaunch:
    """How the kernel is cut.

    Attributes:
        heads, positions: of a tile.
        warps: of a program.
        stages: of a program's pipeline of loads.
        resident: programs that a processor holds at once.
    """

    heads: int
    positions: int
    warps: int
    stages: int
    resident: int


def latent_launch(heads: int, dtype: torch.dtype, *, large: bool = True) -> LatentLaunch:
    """The tile for layers with so many query heads, of any rank up to 512.
    `large`: the device has Hopper's shared memory; others have 99 KB at least."""
    if dtype == torch.float32:
        # exact dots have no tensor cores: small tiles, or the unrolled code does not fit the registers
        return LatentLaunch(16, 16, 4, 2, 2)
    if heads <= 16:
        # bound by memory: two tiles of 36 KB in flight in each of two programs
        return LatentLaunch(16, 32, 4, 3, 2)
    if not large:
        return LatentLaunch(16, 32, 4, 2, 1)
    if heads <= 32:
        return LatentLaunch(32, 32, 4, 3, 2)
    # bound by products: 64 heads x 512 sums are half of the registers of 8 warps; queries 72 KB, three tiles 108 KB
    return LatentLaunch(64, 32, 8, 3, 1)


def latent_splits(
    sequences: int, heads: int, max_context: int, launch: LatentLaunch, capacity: int, processors: int
) -> int:
    """Programs among which a sequence's positions are split, at least 1: from numbers that the host knows.

    The fewest rounds of programs over the device for a sequence's share of positions, where a split costs something.
    `capacity` is the workspace's.
    """
    programs = sequences * triton.cdiv(heads, launch.heads)
    slots = processors * launch.resident
    most = min(MAX_SPLITS, triton.cdiv(max_context, launch.positions), capacity // (sequences * heads))

    def cost(splits: int) -> float:
        return float(triton.cdiv(programs * splits, slots) * (1 / splits + SPLIT_COST))

    return int(min(range(1, max(1, most) + 1), key=cost))


@triton.jit
def _walk(
    begin, high, queries, rotaries, latents, table, scale, latents_block, latents_token,
    BLOCK_TOKENS: tl.constexpr, RANK: tl.constexpr, D1: tl.constexpr, ROTARY: tl.constexpr, D2: tl.constexpr,
    WIDEN: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """A running softmax of positions begin .. high: largest logit, sum of weights, weighted values."""
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, D1], tl.float32)
    totals = tl.zeros([BLOCK_M, 16], tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    blocks = tl.load(table + (begin + offsets) // BLOCK_TOKENS, mask=begin + offsets < high, other=0)
    for start in range(begin, high, BLOCK_N):
        numbers = start + offsets
        real = numbers < high
        rows = latents + blocks.to(tl.int64) * latents_block + numbers % BLOCK_TOKENS * latents_token
        # the next tile's blocks are looked up a tile earlier: a load that waits for another would halve the pipeline
        later = numbers + BLOCK_N
        blocks = tl.load(table + later // BLOCK_TOKENS, mask=later < high, other=0)
        latent = load_rows(rows, real, RANK, 0, D1, True)
        turned = load_rows(rows + RANK, real, ROTARY, 0, D2, True)
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if APART:
            # always true, which the compiler does not know: a product that it does not see next to the last one below
            # is shared among all warps by columns, where each group of warps would else do all of it
            if start < high:
                logits = multiply(queries, tl.trans(latent), logits, WIDEN)
        else:
            logits = multiply(queries, tl.trans(latent), logits, WIDEN)
        logits = multiply(rotaries, tl.trans(turned), logits, WIDEN)
        if not FIXED:
            logits = logits * scale
        # a tile has at least one real position, so `above` is finite
        logits = tl.where(real[None, :], logits, float("-inf"))
        if FIXED:
            above, raw, shrink = weigh(logits, best, scale)
            weights = raw.to(latent.dtype)
        else:
            above = tl.maximum(best, tl.max(logits, 1))
            weights = tl.math.exp2(logits - above[:, None]).to(latent.dtype)
            shrink = tl.math.exp2(best - above)
        # sums of weights as a product with ones: in the order of the other sums, whatever the tile
        totals = add_weights(weights, totals, shrink, BLOCK_N, WIDEN)
        sums = multiply(weights, latent, sums * shrink[:, None], WIDEN)
        best = above
    # all columns are the same sum
    return best, tl.max(totals, 1), sums


@triton.jit(do_not_specialize=["lanes", "positions", "splits", "most"])
def _latents(
    query, rotary, latents, tables, lanes, positions, out, partials, stats,
    scale, splits, capacity, width,
    query_row, query_head, rotary_row, rotary_head, most, latents_block, latents_token, table_row, out_row, out_head,
    HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    RANK: tl.constexpr, D1: tl.constexpr, ROTARY: tl.constexpr, D2: tl.constexpr,
    WIDEN: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    # a program does BLOCK_M heads of one sequence, one split of its positions; heads of a sequence run side by side,
    # so that they find its latents in the L2 cache. PART: in the fixed order
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = head < HEADS
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + sequence).to(tl.int32)
    dims = tl.arange(0, D1)
    out_rows = out + sequence * out_row + head[:, None] * out_head + dims[None, :]
    out_inside = inside[:, None] & (dims < RANK)[None, :]
    if (lane < 0) | (position < 0):
        # the join of parts leaves padding alone
        if (not SPLIT) or (PART and split == 0):
            tl.store(out_rows, tl.zeros([BLOCK_M, D1], out.dtype.element_ty), mask=out_inside)
        return
    span = tl.cdiv(position // PART + 1, splits) * PART if PART else span_of(position + 1, splits, BLOCK_N)
    low = split * span
    high = tl.minimum(low + span, position + 1)
    if low >= high:
        return
    queries = load_rows(query + sequence * query_row + head * query_head, inside, RANK, 0, D1, True)
    rotaries = load_rows(rotary + sequence * rotary_row + head * rotary_head, inside, ROTARY, 0, D2, True)
    table = tables + lane.to(tl.int64) * table_row
    if PART:
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, D1], tl.float32)
        for part in range(low // PART, (high + PART - 1) // PART):
            peak, weight, partial_sums = _walk(
                part * PART, tl.minimum(high, part * PART + PART), queries, rotaries, latents, table, scale,
                latents_block, latents_token,
                BLOCK_TOKENS, RANK, D1, ROTARY, D2, WIDEN, APART, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
            if SPLIT:
                partial = (sequence * most + part) * HEADS + head
                tl.store(partials + partial[:, None] * width + dims[None, :], partial_sums, mask=out_inside)
                tl.store(stats + partial, peak, mask=inside)
                tl.store(stats + capacity + partial, weight, mask=inside)
            else:
                best, total, sums = join(best, total, sums, peak, weight, partial_sums)
        if not SPLIT:
            result = finish(best, total, sums, None, head, inside, False)
            tl.store(out_rows, result.to(out.dtype.element_ty), mask=out_inside)
    else:
        best, total, sums = _walk(
            low, high, queries, rotaries, latents, table, scale, latents_block, latents_token,
            BLOCK_TOKENS, RANK, D1, ROTARY, D2, WIDEN, APART, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        if SPLIT:
            partial = (sequence * splits + split) * HEADS + head
            tl.store(partials + partial[:, None] * width + dims[None, :], sums, mask=out_inside)
            tl.store(stats + partial, best, mask=inside)
            tl.store(stats + capacity + partial, total, mask=inside)
        else:
            tl.store(out_rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=out_inside)


@triton.jit(do_not_specialize=["lanes", "positions", "splits"])
def _join_latents(
    partials, stats, lanes, positions, out, splits, capacity, width, out_row, out_head,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    # a program does WIDTH elements of one head of one sequence, all splits at once
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = dims < RANK
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + sequence).to(tl.int32)
    out_rows = out + sequence * out_row + head * out_head + dims
    if (lane < 0) | (position < 0):
        tl.store(out_rows, tl.zeros([WIDTH], out.dtype.element_ty), mask=inside)
        return
    used = tl.cdiv(position + 1, span_of(position + 1, splits, BLOCK_N))
    numbers = tl.arange(0, SPLITS)
    live = numbers < used
    rows = (sequence * splits + numbers) * HEADS + head
    peaks = tl.load(stats + rows, mask=live, other=float("-inf"))
    totals = tl.load(stats + capacity + rows, mask=live, other=0.0)
    parts = tl.load(
        partials + rows[:, None] * width + dims[None, :], mask=live[:, None] & inside[None, :], other=0.0
    )  # fmt: skip
    # a used split saw a position, so its peak is finite
    grow = tl.math.exp2(peaks - tl.max(peaks, 0))
    sums = tl.sum(parts * grow[:, None], 0) / tl.sum(totals * grow, 0)
    tl.store(out_rows, sums.to(out.dtype.element_ty), mask=inside)


def check_latents(
    query: torch.Tensor,
    rotary: torch.Tensor,
    latents: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> Pages:
    """Where the latents are. Raises BadInput as `attend_latents` says."""
    sequences, heads, rank = query.shape
    dims = rotary.shape[2]
    if not len(rotary) == len(lanes) == len(positions) == len(out) == sequences:
        raise BadInput("lanes", f"{len(lanes)}, with {len(positions)} positions for {sequences} queries")
    if query.stride(2) != 1 or rotary.stride(2) != 1 or out.stride(2) != 1:
        raise BadInput("query", "the last dimension of queries and output must be contiguous")
    here = pages_of(latents)
    if (
        not dims
        or (here.heads, here.dim) != (1, rank + dims)
        or rotary.shape[1] != heads
        or out.shape[1:] != (heads, rank)
    ):
        raise BadInput("query", f"{tuple(query.shape)} and {tuple(rotary.shape)} do not fit {tuple(latents.shape)}")
    if not query.dtype == rotary.dtype == latents.dtype:
        raise BadInput("query", f"is {query.dtype} and {rotary.dtype}, and the pool {latents.dtype}")
    return here


def room_of(workspace: Workspace, rank: int) -> int:
    """How many partial results of `rank` sums a workspace holds."""
    return workspace.partials.shape[0] if workspace.partials.shape[1] >= rank else 0


def choose_splits(
    splits: int | None,
    sequences: int,
    heads: int,
    max_context: int,
    launch: LatentLaunch,
    workspace: Workspace,
    rank: int,
) -> int:
    """The caller's splits, or `latent_splits`' choice. Raises BadInput where the workspace has no room for them."""
    capacity = room_of(workspace, rank)
    if splits is None:
        return latent_splits(sequences, heads, max_context, launch, capacity, workspace.processors)
    if splits > 1 and splits * sequences * heads > capacity:
        raise BadInput("splits", "are more than the workspace has room for", limit=capacity // (sequences * heads))
    return splits


def join_latents(
    workspace: Workspace, lanes: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, splits: int, keys: int
) -> None:
    """Queue the join of the partials that `splits` programs, with tiles of `keys` positions, left in the workspace."""
    partials, stats = workspace.partials, workspace.stats
    sequences, heads, rank = out.shape
    at_once = triton.next_power_of_2(splits)
    # few splits: wide programs, or there are thousands; many: narrow ones, whose loads are all in flight at once
    wide = max(16, min(triton.next_power_of_2(rank), max(64, 4096 // at_once)))
    _join_latents[(sequences, heads, triton.cdiv(rank, wide))](
        partials, stats, lanes, positions, out, splits, stats.stride(0), partials.stride(0),
        out.stride(0), out.stride(1),
        HEADS=heads, RANK=rank, BLOCK_N=keys, SPLITS=at_once, WIDTH=wide,
        num_warps=4, **overlap(out.device),
    )  # fmt: skip


@operation
def attend_latents(
    query: torch.Tensor,
    rotary: torch.Tensor,
    latents: torch.Tensor,
    tables: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    workspace: Workspace,
    launch: LatentLaunch | None = None,
    splits: int | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
) -> None:
    """Attend one query per sequence to its latents in the pool, its own among them; writes `out`.

    `query` [S, H, rank] (absorbed) and `rotary` [S, H, dims] are strided but in their last dimension and of one dtype;
    `latents`, of one head of rank + dims, is a view of the pool as `pages_of` takes it, whose row is the latent and
    then the rotary part of the key. Tables, lanes, absolute positions, padding rows, the stream, the workspace and how
    long tensors must live are as in `attend_decode`; a query at p sees positions 0 .. p. `out` [S, H, rank] is written
    in full: the weighted latents, whose values the caller projects. One or two launches, no synchronisation, nothing
    allocated. `fixed`: in the order of `fixed.py`, for ranks of whole 16s; `attend_prefill` with `fixed` gives the same
    bits for queries [rank | rotary part]. `launch`, `splits` and `grain` replace the table's choice, for measurements
    and tests. Raises BadInput for shapes, dtypes or strides that do not fit each other.
    """
    sequences, heads, rank = query.shape
    dims = rotary.shape[2]
    if not sequences:
        return
    here = check_latents(query, rotary, latents, lanes, positions, out)
    if fixed and rank % 16:
        # a product takes 16 dimensions at once, and the queries of a prefill have no gap between their parts
        raise BadInput("query", f"of rank {rank} has no fixed order: it must be a multiple of 16")
    launch = launch or latent_launch(heads, query.dtype, large=chip_of(query.device).large)
    partials, stats = workspace.partials, workspace.stats
    max_context = tables.shape[1] * here.block_tokens
    most = 1
    if fixed:
        capacity = room_of(workspace, rank)
        grain = grain or grain_of(rank + dims, query.dtype)
        launch = replace(launch, positions=grain.keys)
        most = most_parts(max_context, None, grain)
        if splits is None:
            splits = 1
            if most <= capacity // (sequences * heads):
                splits = min(most, latent_splits(sequences, heads, max_context, launch, capacity, workspace.processors))
        elif splits > 1 and most * sequences * heads > capacity:
            raise BadInput("splits", "are more than the workspace has room for", limit=capacity // (sequences * heads))
    else:
        splits = choose_splits(splits, sequences, heads, max_context, launch, workspace, rank)
    _latents[(triton.cdiv(heads, launch.heads), sequences, splits)](
        query, rotary, latents, tables, lanes, positions, out, partials, stats,
        scale * LOG2E, splits, stats.stride(0), partials.stride(0),
        query.stride(0), query.stride(1), rotary.stride(0), rotary.stride(1), most, here.block, here.token,
        tables.stride(0), out.stride(0), out.stride(1),
        HEADS=heads, BLOCK_TOKENS=here.block_tokens, RANK=rank, D1=max(16, triton.next_power_of_2(rank)),
        ROTARY=dims, D2=max(16, triton.next_power_of_2(dims)), WIDEN=query.device.type == "cpu", SPLIT=splits > 1,
        APART=launch.heads >= 64, BLOCK_M=launch.heads, BLOCK_N=launch.positions,
        PART=grain.part if fixed and grain else 0,
        num_warps=launch.warps, num_stages=launch.stages, **overlap(query.device),
    )  # fmt: skip
    if splits > 1 and fixed and grain:
        join_parts[(sequences, heads)](
            partials, stats, lanes, positions, None, out, 0, most, stats.stride(0), partials.stride(0),
            out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=rank, DV=max(16, triton.next_power_of_2(rank)), REACH=0, SINKS=False,
            PART=grain.part, AT_ONCE=PARTS_AT_ONCE, num_warps=4, **overlap(query.device),
        )  # fmt: skip
    elif splits > 1:
        join_latents(workspace, lanes, positions, out, splits, launch.positions)
