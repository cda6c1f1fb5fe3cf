"""The decode of `latent.py` for Hopper and many heads: 64 heads a program, rank 512, rotary part 64.

Two groups of four warps take tiles of 64 positions in turns: one multiplies a tile's logits while the other takes the
exponents of the tile before. Both weigh the values of every tile in the tiles' order, half of the dimensions each
(`latent_groups.py`). Two more warps ask the copy engine for pages, half a tile at a time, as soon as nothing reads what
lay there. Written in Gluon, Triton's language with explicit layouts, which has no interpreter: `latent.py` runs
everywhere else, and defines the right result; it alone has the fixed order (`fixed.py`). `registry.py` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fdasync.errors import BadInput
from fdasync_kernels.attention.hopper_pages import page_descriptor, page_rows
from fdasync_kernels.attention.hopper_tile import LATER_NAMES, barrier, copy_in
from fdasync_kernels.attention.latent import LatentLaunch, check_latents, choose_splits, join_latents
from fdasync_kernels.attention.latent_groups import attend_half
from fdasync_kernels.attention.tile import LOG2E
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import Kernel

if TYPE_CHECKING:
    from fdasync_kernels.attention.decode import Workspace

# what a program takes
HEADS_TILE, POSITIONS_TILE = 64, 64
# the kernel starts eight more warps itself and has two tiles in memory
LAUNCH = LatentLaunch(HEADS_TILE, POSITIONS_TILE, 4, 2, 1)
# of a thread when it starts, with 12 warps; `latents_hopper` shares them out again
REGISTERS = 168
_RANK, _ROTARY = 512, 64


def fits_hopper(query: torch.Tensor, rotary: torch.Tensor, latents: torch.Tensor) -> bool:
    """Whether this module's kernel can attend such heads in such a pool, and is worth it: by shapes and strides, on any
    device."""
    _, heads, rank = query.shape
    if (rank, rotary.shape[2]) != (_RANK, _ROTARY) or heads <= HEADS_TILE // 2:
        return False
    return query.dtype in (torch.bfloat16, torch.float16) and page_rows(latents) is not None


@gluon.jit
def _load(
    latents, table, key_pages, turned_pages, full, free, low, high, block_rows,
    BLOCK_TOKENS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """What a loading warp does: keep the first halves of both places full, or the second halves and rotary parts.

    The first half of a place is the half that its own group weighs.
    """
    COUNT: gl.constexpr = 64 // BLOCK_TOKENS
    NBYTES: gl.constexpr = 64 * (320 if SECOND else 256) * 2
    for tile in range((high - low + 63) // 64):
        place = tile % 2
        # all entries before any of them is used: they arrive together
        rows = ()
        for page in gl.static_range(COUNT):
            number = low + tile * 64 + page * BLOCK_TOKENS
            block = gl.load(table + number // BLOCK_TOKENS, mask=number < high, other=-1)
            # a row past the end: the copy engine writes zeros
            # a tuple that grows
            rows = rows + (gl.where(block < 0, 1 << 30, block * block_rows),)  # type: ignore[assignment]  # noqa: RUF005
        half = place
        if SECOND:
            half = 1 - place
        mbarrier.wait(free.index(place), (tile // 2 & 1) ^ 1)
        mbarrier.expect(full.index(place), NBYTES)
        for part in gl.static_range(4):
            for page in gl.static_range(COUNT):
                target = key_pages.index(((2 * place + SECOND) * 4 + part) * COUNT + page)
                copy_in(latents, [rows[page], half * 256 + part * 64], full.index(place), target)
        if SECOND:
            for page in gl.static_range(COUNT):
                copy_in(latents, [rows[page], 512], full.index(place), turned_pages.index(place * COUNT + page))


@gluon.jit(do_not_specialize=["splits", "block_rows", "table_row"])
def latents_hopper(
    query, rotary, latents, tables, lanes, positions, out, partials, stats,
    scale, splits, capacity, width,
    query_row, query_head, rotary_row, rotary_head, block_rows, table_row, out_row, out_head,
    HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    DTYPE: gl.constexpr = query.dtype.element_ty
    PAGE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    COUNT: gl.constexpr = 64 // BLOCK_TOKENS
    first_head = gl.program_id(0) * 64
    sequence = gl.program_id(1).to(gl.int64)
    split = gl.program_id(2)
    lane = gl.load(lanes + sequence)
    position = gl.load(positions + sequence).to(gl.int32)
    span = gl.cdiv(gl.cdiv(position + 1, splits), 64) * 64
    low = split * span
    # a row that is padding has no positions
    high = gl.where((lane < 0) | (position < 0), low, gl.minimum(low + span, position + 1))
    table = tables + lane.to(gl.int64) * table_row

    queries = gl.allocate_shared_memory(DTYPE, [2, 64, 256], PAGE)
    rotaries = gl.allocate_shared_memory(DTYPE, [64, 64], PAGE)
    # two places of two halves; a half lies in four parts of 64 elements, each with all tokens: what a product takes
    key_pages = gl.allocate_shared_memory(DTYPE, [16 * COUNT, BLOCK_TOKENS, 64], PAGE)
    turned_pages = gl.allocate_shared_memory(DTYPE, [2 * COUNT, BLOCK_TOKENS, 64], PAGE)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    peaks = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    first_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    second_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    first_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    second_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    both = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for place in gl.static_range(2):
        mbarrier.init(first_full.index(place), count=1)
        mbarrier.init(second_full.index(place), count=1)
        mbarrier.init(first_free.index(place), count=1)
        mbarrier.init(second_free.index(place), count=1)
        mbarrier.init(ready.index(place), count=1)
    mbarrier.init(both, count=2)
    fence_async_shared()
    barrier()
    if LATER_NAMES:
        keys = key_pages.reinterpret(DTYPE, [4, 64, 256], PAGE)
        turned = turned_pages.reinterpret(DTYPE, [2, 64, 64], PAGE)
    else:
        keys = key_pages._reinterpret(DTYPE, [4, 64, 256], PAGE)
        turned = turned_pages._reinterpret(DTYPE, [2, 64, 64], PAGE)
    memory = (queries, rotaries, keys, turned, key_pages, shrinks, peaks, totals)
    bars = (first_full, second_full, first_free, second_free, ready, both)
    rows = (query, rotary, query_row, query_head, rotary_row, rotary_head)
    results = (out, partials, stats, splits, capacity, width, out_row, out_head)
    whose = (sequence, first_head, split, low, high)
    gl.warp_specialize(
        [
            (attend_half, (rows, results, whose, memory, bars, scale, HEADS, BLOCK_TOKENS, SPLIT, gl.constexpr(0))),
            (attend_half, (rows, results, whose, memory, bars, scale, HEADS, BLOCK_TOKENS, SPLIT, gl.constexpr(1))),
            (_load, (
                latents, table, key_pages, turned_pages, first_full, first_free, low, high, block_rows,
                BLOCK_TOKENS, gl.constexpr(0),
            )),
            (_load, (
                latents, table, key_pages, turned_pages, second_full, second_free, low, high, block_rows,
                BLOCK_TOKENS, gl.constexpr(1),
            )),
        ],
        [4, 1, 1],
        # of a thread of the second group and of the loading warps; the first group has as many as the second
        [232, 40, 40],
    )  # fmt: skip


def _fits(
    query: torch.Tensor,
    rotary: torch.Tensor,
    latents: torch.Tensor,
    *_tensors: torch.Tensor,
    launch: LatentLaunch | None = None,
    fixed: bool = False,
    **_options: Any,
) -> bool:
    return not fixed and launch is None and fits_hopper(query, rotary, latents)


def _attend(
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
    splits: int | None = None,
    **_options: Any,
) -> None:
    """`attend_latents`, for heads and pools that `fits_hopper` names; `_options` have the values that fit."""
    sequences, heads, rank = query.shape
    if not sequences:
        return
    here = check_latents(query, rotary, latents, lanes, positions, out)
    places = page_rows(latents)
    if places is None:
        raise BadInput("latents", "the copy engine cannot load from this pool")
    max_context = tables.shape[1] * here.block_tokens
    splits = choose_splits(splits, sequences, heads, max_context, LAUNCH, workspace, rank)
    partials, stats = workspace.partials, workspace.stats
    latents_hopper[(triton.cdiv(heads, LAUNCH.heads), sequences, splits)](
        query, rotary, page_descriptor(latents, places), tables, lanes, positions, out, partials, stats,
        scale * LOG2E, splits, stats.stride(0), partials.stride(0),
        query.stride(0), query.stride(1), rotary.stride(0), rotary.stride(1), places.block,
        tables.stride(0), out.stride(0), out.stride(1),
        HEADS=heads, BLOCK_TOKENS=here.block_tokens, SPLIT=splits > 1, num_warps=LAUNCH.warps, maxnreg=REGISTERS,
        **overlap(query.device),
    )  # fmt: skip
    if splits > 1:
        join_latents(workspace, lanes, positions, out, splits, LAUNCH.positions)


KERNELS = {"attend_latents": Kernel(_fits, _attend, interpreted=False)}
