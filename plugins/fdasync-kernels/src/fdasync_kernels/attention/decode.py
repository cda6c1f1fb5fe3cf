"""Attention of one query per sequence over paged KV (decode).

The query heads that share a kv head are the rows of one program's tile, so KV is read once per tile. A sequence's keys
are split among programs, in float32 partials that are joined in the order of the splits (`join.py`): a few by the
program that ends last, many by a second kernel, whose programs share that work. The number of splits depends on what
the host knows (sequences, heads, width of the tables) and never on lengths, which the device reads: so a CUDA graph can
capture all of it. In the fixed order (`fixed.py`) programs share whole parts, which are what is joined: so their
number changes no bit. Knows views, tables and positions; knows no scheduling and no model. Called by the attention of
the plugins' GPU runners.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.attention.fixed import Grain, finish, grain_of, join, most_parts
from fdasync_kernels.attention.join import (
    join_at_once,
    join_in_order,
    join_parts,
    join_splits,
    parts_of,
    span_of,
)
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
from fdasync_kernels.chip import chip_of
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.pages import head_offset
from fdasync_kernels.registry import operation

MAX_SPLITS = 64
# programs per processor that a launch aims at: as many as run at once there
PROGRAMS_PER_PROCESSOR = 4
# of launches with so many keys in a tile
_WIDE_KEYS, _WIDE_PROGRAMS_PER_PROCESSOR = 128, 2
# query heads of a kv head, as many as its programs have rows
_FEW_HEADS = 16
# splits whose partials are read together, by the program that ends last and by a second kernel
_AT_ONCE = 4
_JOINED_AT_ONCE = 16
PARTS_AT_ONCE = 8
# most splits that the program which ends last joins: one kernel less, but one program reads all partials
_MOST_JOINED = 4


@dataclass(frozen=True)
class Workspace:
    """Float32 partials of decode's splits; one serves all layers of a stream, since each call is done before the next.

    Attributes:
        partials: [capacity, value_dim], sums of weighted values.
        stats: [2, capacity], the largest logit (base 2) and the sum of weights of each.
        arrivals: int32 [capacity], of a tile's splits; 0 between calls.
        processors: of the device; more programs than it can hold are not worth a split.
    """

    partials: torch.Tensor
    stats: torch.Tensor
    arrivals: torch.Tensor
    processors: int


def decode_workspace(
    max_sequences: int, heads: int, value_dim: int, device: torch.device, *, fixed: bool = False
) -> Workspace:
    """Room for up to this many sequences of `heads` query heads with values up to `value_dim` wide.

    Calls with more are not split. Allocates 4 * heads * max(256, max_sequences) * (value_dim + 3) bytes, once (where
    heads are few, more: as much as programs that fill the device leave): the caller keeps it for as long as calls or
    graphs that use it may run. `fixed`: 128 MiB and a little at least, since
    there each part of a sequence is a partial, however few programs share them; with less room they share fewer.
    """
    # the same room for few sequences with many splits as for many with one or two
    processors = 8
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    # of few heads, as a rank has them, many sequences are split too
    capacity = max(heads * max(256, max_sequences), min(heads, _FEW_HEADS) * PROGRAMS_PER_PROCESSOR * processors)
    if fixed:
        capacity = max(capacity, (128 << 20) // (4 * value_dim))
    return Workspace(
        torch.empty(capacity, value_dim, dtype=torch.float32, device=device),
        torch.empty(2, capacity, dtype=torch.float32, device=device),
        torch.zeros(capacity, dtype=torch.int32, device=device),
        processors,
    )


def decode_launch(
    group: int, key_dim: int, dtype: torch.dtype, *, fixed: bool = False, lonely: bool = False, few: bool = False
) -> Launch:
    """The launch for `group` query heads per kv head. `fixed`: in the fixed order; `lonely`: kv heads of all sequences
    are at most half as many as processors; `few`: twice as many, of a device with much shared memory."""
    rows = max(16, min(64, triton.next_power_of_2(group)))
    if dtype == torch.float32:
        # exact dots have no tensor cores: small tiles, or the unrolled code does not fit the registers
        return Launch(16, 16 if key_dim > 64 else 32, 4, 2)
    if key_dim > 256:
        if fixed:
            # the sums of a part and of all parts, 512 wide: where both change their layout, shared memory has no room
            # for 64 rows of them
            return Launch(16, 32, 4, 2)
        # latent heads: 64 rows x 512 sums fill the registers of 8 warps; two stages of 32 keys are 74 KB
        return Launch(min(rows, 64), 32, 8 if rows > 16 else 4, 2)
    if fixed and lonely and key_dim <= 128:
        # a part is one program's, however few there are: the more of it are loaded and multiplied at once
        return Launch(rows, 64, 8, 2)
    if few and not fixed and key_dim <= 128 and rows == 16:
        # half as many programs with twice as much in flight: fewer partials to join, and fewer trips to memory one
        # after the other
        return Launch(rows, _WIDE_KEYS, 4, 2)
    # bound by memory: 38 KB and 128 registers a thread at 128 dimensions let four programs a processor load at once
    return Launch(rows, 64 if key_dim <= 128 else 32, 4, 3)


def count_splits(
    sequences: int, heads: int, tiles: int, max_context: int, launch: Launch, capacity: int, processors: int
) -> int:
    """Programs among which a sequence's keys are split, for `tiles` tiles of heads per sequence: at least 1."""
    each = _WIDE_PROGRAMS_PER_PROCESSOR if launch.keys == _WIDE_KEYS else PROGRAMS_PER_PROCESSOR
    wanted = each * processors // (sequences * tiles)
    worth = triton.cdiv(max_context, launch.keys)
    return int(max(1, min(wanted, worth, MAX_SPLITS, capacity // (sequences * heads))))


def share_parts(
    splits: int | None, sequences: int, heads: int, tiles: int, most: int, workspace: Workspace, capacity: int
) -> int:
    """How many programs share a sequence's parts, which are up to `most`; each part is a partial of its own."""
    room = capacity // (sequences * heads)
    if splits is None:
        wanted = PROGRAMS_PER_PROCESSOR * workspace.processors // (sequences * tiles)
        return max(1, min(wanted, most, MAX_SPLITS)) if most <= room else 1
    if splits > 1 and most > room:
        raise BadInput("splits", f"of {most} parts are more than the workspace has room for", limit=room)
    return splits


@triton.jit(do_not_specialize=["lanes", "positions", "reach_size", "splits", "most"])
def _decode(
    query, keys, values, tables, lanes, positions, sinks, out, partials, stats, arrivals,
    scale, reach_size, splits, most, capacity, width,
    query_row, query_head, keys_block, keys_token, keys_head, values_block, values_token, values_head,
    table_row, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    SHARED: tl.constexpr, WIDEN: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
    JOINED: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr, PER_SHARE: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    # a program does one sequence, BLOCK_M heads of one kv head's group, one split of the keys. PART: in the fixed order
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // TILES
    in_group = tl.program_id(1) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = in_group < GROUP
    head = (kv_head * GROUP + in_group).to(tl.int64)
    split = tl.program_id(2)
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + sequence).to(tl.int32)
    value_dims = tl.arange(0, DV)
    out_rows = out + sequence * out_row + head[:, None] * out_head + value_dims[None, :]
    out_inside = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
    if (lane < 0) | (position < 0):
        if split == 0:
            tl.store(out_rows, tl.zeros([BLOCK_M, DV], out.dtype.element_ty), mask=out_inside)
        return
    begin = first_visible(position, REACH, reach_size)
    if PART:
        first_part, used = parts_of(position, begin, PART)
        span = tl.cdiv(used, splits)
        low = tl.maximum(begin, (first_part + split * span) * PART)
        high = tl.minimum((first_part + split * span + span) * PART, position + 1)
    else:
        span = span_of(position + 1 - begin, splits, BLOCK_N)
        low = begin + split * span
        high = tl.minimum(low + span, position + 1)
    if low >= high:
        return
    query_rows = query + sequence * query_row + head * query_head
    queries = load_rows(query_rows, inside, KEY_DIM, 0, D1, True)
    queries_rest = queries
    if D2 > 0:
        queries_rest = load_rows(query_rows, inside, KEY_DIM, D1, D2, True)
    keys += head_offset(kv_head, keys_head, KEY_DIM, PER_SHARE)
    values += head_offset(kv_head, values_head, VALUE_DIM, PER_SHARE)
    table = tables + lane.to(tl.int64) * table_row
    first = tl.zeros([BLOCK_M], tl.int32) + low
    last = tl.zeros([BLOCK_M], tl.int32) + high - 1
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DV], tl.float32)
    if PART:
        peak = best
        totals = tl.zeros([BLOCK_M, 16], tl.float32)
        part_sums = sums
        # one loop over the tiles of all parts: a loop for each part would wait for its first tiles anew
        for start in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
            # a part starts from nothing: by -inf earlier sums shrink to 0
            peak = tl.where(start % PART == 0, float("-inf"), peak)
            peak, totals, part_sums = fold_keys(
                queries, queries_rest, peak, totals, part_sums, keys, values, table, start, high, first, last,
                scale, keys_block, keys_token, values_block, values_token,
                BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, SHARED, WIDEN, BLOCK_N, True, True, low,
            )  # fmt: skip
            if ((start + BLOCK_N) % PART == 0) | (start + BLOCK_N >= high):
                # all columns are the same sum
                weight = tl.max(totals, 1)
                if SPLIT:
                    partial = (sequence * most + start // PART - first_part) * HEADS + head
                    tl.store(partials + partial[:, None] * width + value_dims[None, :], part_sums, mask=out_inside)
                    tl.store(stats + partial, peak, mask=inside)
                    tl.store(stats + capacity + partial, weight, mask=inside)
                else:
                    best, total, sums = join(best, total, sums, peak, weight, part_sums)
        if SPLIT:
            if JOINED:
                # all of this program's stores come before its arrival, and all other programs' before the last arrival
                tl.debug_barrier()
                arrival = arrivals + sequence * tl.num_programs(1) + tl.program_id(1)
                if tl.atomic_add(arrival, 1) == tl.cdiv(used, span) - 1:
                    tl.debug_barrier()
                    tl.store(arrival, 0)
                    result = join_in_order(
                        partials, stats, sinks, sequence * most, head, inside, value_dims, out_inside, used, capacity,
                        width, HEADS, SINKS, AT_ONCE,
                    )  # fmt: skip
                    tl.store(out_rows, result.to(out.dtype.element_ty), mask=out_inside)
        else:
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
                keys, values, table, start, high, first, last, scale,
                keys_block, keys_token, values_block, values_token,
                BLOCK_TOKENS, KEY_DIM, D1, D2, VALUE_DIM, DV, SHARED, WIDEN, BLOCK_N, True,
            )  # fmt: skip
        if SPLIT:
            partial = (sequence * splits + split) * HEADS + head
            tl.store(partials + partial[:, None] * width + value_dims[None, :], sums, mask=out_inside)
            tl.store(stats + partial, best, mask=inside)
            tl.store(stats + capacity + partial, total, mask=inside)
            if JOINED:
                # all of this program's stores come before its arrival, and all other programs' before the last arrival
                tl.debug_barrier()
                arrival = arrivals + sequence * tl.num_programs(1) + tl.program_id(1)
                used = tl.cdiv(position + 1 - begin, span)
                if tl.atomic_add(arrival, 1) == used - 1:
                    tl.debug_barrier()
                    tl.store(arrival, 0)
                    sums, total = join_at_once(
                        partials, stats, sequence * splits, head, inside, out_inside, used, capacity, width,
                        HEADS, DV, BLOCK_M, MOST, AT_ONCE,
                    )  # fmt: skip
                    tl.store(out_rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=out_inside)
        else:
            tl.store(out_rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=out_inside)


@operation
def attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    tables: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    reach_kind: ReachKind,
    reach_size: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
    value_dim: int | None = None,
    launch: Launch | None = None,
    splits: int | None = None,
    fixed: bool = False,
    grain: Grain | None = None,
) -> None:
    """Attend one query per sequence to its keys in the pool, its own among them; writes `out`.

    `query` [S, H, Dk], strided but in its last dimension, at absolute `positions` int64 [S]; `keys` of KH heads of Dk
    and `values` of as many of Dv are views of the pool as `pages_of` takes them, block tables int32 [lanes, max_blocks]
    are contiguous in their last dimension, and sequence s reads row `lanes`[s] (int32 [S]). `values` None: latent
    layers, whose value is the first `value_dim` elements of the key. A query at p sees keys up to p: all ("full"),
    key > p - reach_size ("window"), of its own chunk of `reach_size` ("chunk"), or from `reach_size` on ("from"; before
    that a query sees itself alone). `sinks` [H] or None: one more logit per head (not scaled), whose weight is dropped.
    `out` [S, H, Dv] is written in full; rows whose lane or position is negative are padding and become zeros, whatever
    their query holds.

    One or two launches on the current stream (the device of the tensors must be current), no synchronisation, nothing
    allocated, so a graph can capture it. All tensors must live until it ran; the next call on the stream may use
    `workspace`. `fixed`: in the order of `fixed.py`, whose bits `attend_prefill` with `fixed` gives too. `launch`,
    `splits` and `grain` replace the table's choice, for measurements and tests. Raises BadInput for shapes or
    strides that do not fit each other.
    """
    sequences, heads, key_dim = query.shape
    if not sequences:
        return
    if not len(lanes) == len(positions) == len(out) == sequences:
        raise BadInput("lanes", f"{len(lanes)}, with {len(positions)} positions for {sequences} queries")
    here, there, width = check_views(query, keys, values, value_dim)
    kv_heads = here.heads
    group = heads // kv_heads
    if launch is None:
        programs = sequences * kv_heads
        lonely = 2 * programs <= workspace.processors
        few = programs <= 2 * workspace.processors and chip_of(query.device).large
        launch = decode_launch(group, key_dim, query.dtype, fixed=fixed, lonely=lonely, few=few)
    tiles = triton.cdiv(group, launch.rows)
    capacity = workspace.partials.shape[0]
    if workspace.partials.shape[1] < width:
        capacity = 0
    max_context = tables.shape[1] * here.block_tokens
    most = 1
    if fixed:
        grain = grain or grain_of(key_dim, query.dtype)
        # sums of a part and of all parts: at most what lets four programs a processor load at once there too
        limit = 128 if key_dim <= 128 and query.dtype != torch.float32 else None
        launch = replace(launch, keys=grain.keys, registers=launch.registers or limit)
        most = most_parts(max_context, reach_size if is_short(reach_kind) else None, grain)
        splits = share_parts(splits, sequences, heads, kv_heads * tiles, most, workspace, capacity)
    elif splits is None:
        if is_short(reach_kind):
            max_context = min(max_context, reach_size)
        splits = count_splits(sequences, heads, kv_heads * tiles, max_context, launch, capacity, workspace.processors)
    elif splits > 1 and splits * sequences * heads > capacity:
        raise BadInput("splits", "are more than the workspace has room for", limit=capacity // (sequences * heads))
    d1, d2 = split_dims(key_dim)
    dv = max(16, triton.next_power_of_2(width))
    shared = values is None and width == d1
    values = keys if values is None else values
    code = REACH_CODES[reach_kind]
    partials, stats = workspace.partials, workspace.stats
    joined = splits <= _MOST_JOINED
    _decode[(sequences, kv_heads * tiles, splits)](
        query, keys, values, tables, lanes, positions, sinks, out, partials, stats, workspace.arrivals,
        scale * LOG2E, reach_size, splits, most, stats.stride(0), partials.stride(0),
        query.stride(0), query.stride(1), here.block, here.token, here.head, there.block, there.token, there.head,
        tables.stride(0), out.stride(0), out.stride(1),
        HEADS=heads, GROUP=group, TILES=tiles, BLOCK_TOKENS=here.block_tokens,
        KEY_DIM=key_dim, D1=d1, D2=d2, VALUE_DIM=width, DV=dv,
        SHARED=shared, WIDEN=query.device.type == "cpu", SINKS=sinks is not None, REACH=code, SPLIT=splits > 1,
        BLOCK_M=launch.rows, BLOCK_N=launch.keys, MOST=_MOST_JOINED, AT_ONCE=_AT_ONCE, JOINED=joined,
        PART=grain.part if fixed and grain else 0, PER_SHARE=here.per_share,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, **overlap(query.device),
    )  # fmt: skip
    if splits > 1 and not joined and fixed and grain:
        join_parts[(sequences, heads)](
            partials, stats, lanes, positions, sinks, out, reach_size, most, stats.stride(0), partials.stride(0),
            out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=width, DV=dv, REACH=code, SINKS=sinks is not None, PART=grain.part,
            AT_ONCE=PARTS_AT_ONCE, num_warps=4, **overlap(query.device),
        )  # fmt: skip
    elif splits > 1 and not joined:
        join_splits[(sequences, heads)](
            partials, stats, lanes, positions, out, reach_size, splits, stats.stride(0), partials.stride(0),
            out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=width, DV=dv, REACH=code, BLOCK_N=launch.keys, AT_ONCE=_JOINED_AT_ONCE,
            num_warps=4, **overlap(query.device),
        )  # fmt: skip
