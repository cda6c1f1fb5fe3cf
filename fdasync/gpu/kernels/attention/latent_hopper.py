"""The decode of `latent.py` for Hopper and many heads: 64 heads a program, rank 512, rotary part 64.

Two groups of four warps share a tile's logits by positions and its sums by dimensions. The next tile of latents is on
its way before the logits of this one are multiplied, which a pipelined loop of Triton's does not do with two tiles, and
more do not fit beside the queries. Written in Gluon, Triton's language with explicit layouts, which has no interpreter:
`latent.py` is what runs everywhere else, and says what is right. Called by `latent.py`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# their names in Triton 3.9 and in 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


# what a program takes
HEADS_TILE, POSITIONS_TILE = 64, 64
_RANK, _ROTARY = 512, 64


def fits_hopper(query: torch.Tensor, rotary: torch.Tensor, latents: torch.Tensor) -> bool:
    """Whether `latents_hopper` takes these tensors of `attend_latents` on their device, and is worth it."""
    _, heads, rank = query.shape
    if not query.is_cuda or (rank, rotary.shape[2]) != (_RANK, _ROTARY) or heads <= HEADS_TILE // 2:
        return False
    if query.dtype not in (torch.bfloat16, torch.float16):
        return False
    # rows are copied 16 bytes at a time
    strides = (*query.stride()[:2], *rotary.stride()[:2], *latents.stride()[:2])
    if any(stride % 16 for stride in strides) or any(one.data_ptr() % 16 for one in (query, rotary, latents)):
        return False
    return torch.cuda.get_device_capability(query.device)[0] == 9


@gluon.jit  # type: ignore[untyped-decorator]
def _row_pointers(  # type: ignore[no-untyped-def]
    latents, table, numbers, high, latents_block, latents_token, BLOCK_TOKENS: gl.constexpr
):  # fmt: skip
    """Of each position's latent; positions past the end are their last one: their weights are zeros."""
    numbers = gl.minimum(numbers, high - 1)
    blocks = gl.load(table + numbers // BLOCK_TOKENS).to(gl.int64)
    return latents + blocks * latents_block + numbers % BLOCK_TOKENS * latents_token


@gluon.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def latents_hopper(  # type: ignore[no-untyped-def]
    query, rotary, latents, tables, lanes, positions, out, partials, stats,
    scale, splits, capacity, width,
    query_row, query_head, rotary_row, rotary_head, latents_block, latents_token, table_row, out_row, out_head,
    HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = 64
    RANK: gl.constexpr = 512
    ROTARY: gl.constexpr = 64
    DTYPE: gl.constexpr = latents.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    TOTALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ONES_SHARED: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    ONES: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [8, 1], [1, 0])

    first_head = gl.program_id(0) * BLOCK_M
    sequence = gl.program_id(1).to(gl.int64)
    split = gl.program_id(2)
    lane = gl.load(lanes + sequence)
    position = gl.load(positions + sequence).to(gl.int32)
    head = first_head + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, RANK, gl.SliceLayout(0, SUMS))
    inside = head < HEADS
    if (lane < 0) | (position < 0):
        if not SPLIT:
            blank = gl.zeros([BLOCK_M, RANK], gl.float32, SUMS).to(out.dtype.element_ty)
            gl.store(out + sequence * out_row + head[:, None] * out_head + dims[None, :], blank, mask=inside[:, None])
        return
    span = gl.cdiv(gl.cdiv(position + 1, splits), BLOCK_N) * BLOCK_N
    low = split * span
    high = gl.minimum(low + span, position + 1)
    if low >= high:
        return
    table = tables + lane.to(gl.int64) * table_row
    wide_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    wide_dims = gl.arange(0, RANK, gl.SliceLayout(0, WIDE))
    narrow_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, NARROW))
    narrow_dims = gl.arange(0, ROTARY, gl.SliceLayout(0, NARROW))
    keys = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, RANK], WIDE_SHARED)
    turned = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, ROTARY], WIDE_SHARED)

    # the first tile
    wide = _row_pointers(latents, table, low + wide_rows, high, latents_block, latents_token, BLOCK_TOKENS)
    narrow = _row_pointers(latents, table, low + narrow_rows, high, latents_block, latents_token, BLOCK_TOKENS)
    _copy(keys.index(0), wide[:, None] + wide_dims[None, :])
    _copy(turned.index(0), narrow[:, None] + (RANK + narrow_dims)[None, :])
    async_copy.commit_group()

    query_heads = first_head + wide_rows
    queries = gl.allocate_shared_memory(
        DTYPE, [BLOCK_M, RANK], WIDE_SHARED,
        gl.load(
            query + sequence * query_row + query_heads[:, None] * query_head + wide_dims[None, :],
            mask=(query_heads < HEADS)[:, None] & (wide_dims >= 0)[None, :], other=0.0,
        ),
    )  # fmt: skip
    rotary_heads = first_head + narrow_rows
    rotaries = gl.allocate_shared_memory(
        DTYPE, [BLOCK_M, ROTARY], WIDE_SHARED,
        gl.load(
            rotary + sequence * rotary_row + rotary_heads[:, None] * rotary_head + narrow_dims[None, :],
            mask=(rotary_heads < HEADS)[:, None] & (narrow_dims >= 0)[None, :], other=0.0,
        ),
    )  # fmt: skip
    ones = gl.allocate_shared_memory(
        DTYPE, [BLOCK_N, 16], ONES_SHARED, gl.full([BLOCK_N, 16], 1.0, gl.float32, ONES).to(DTYPE)
    )
    best = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    sums = warpgroup_mma_init(gl.zeros([BLOCK_M, RANK], gl.float32, SUMS))
    totals = warpgroup_mma_init(gl.zeros([BLOCK_M, 16], gl.float32, TOTALS))
    # pointers of the next tile are looked up a tile earlier
    wide = _row_pointers(latents, table, low + BLOCK_N + wide_rows, high, latents_block, latents_token, BLOCK_TOKENS)
    narrow = _row_pointers(
        latents, table, low + BLOCK_N + narrow_rows, high, latents_block, latents_token, BLOCK_TOKENS
    )
    place = 0
    for start in range(low, high, BLOCK_N):
        key = keys.index(place)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
        logits = warpgroup_mma(queries, key.permute((1, 0)), logits, use_acc=False, is_async=True)
        logits = warpgroup_mma(rotaries, turned.index(place).permute((1, 0)), logits, is_async=True)
        # the sums of the tile before are done, in every warp: its place is free
        sums, totals = warpgroup_mma_wait(2, deps=(sums, totals))
        _barrier()
        place = 1 - place
        if start + BLOCK_N < high:
            _copy(keys.index(place), wide[:, None] + wide_dims[None, :])
            _copy(turned.index(place), narrow[:, None] + (RANK + narrow_dims)[None, :])
        async_copy.commit_group()
        later = start + 2 * BLOCK_N
        wide = _row_pointers(latents, table, later + wide_rows, high, latents_block, latents_token, BLOCK_TOKENS)
        narrow = _row_pointers(latents, table, later + narrow_rows, high, latents_block, latents_token, BLOCK_TOKENS)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        numbers = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))
        logits = gl.where((numbers < high)[None, :], logits * scale, float("-inf"))
        above = gl.maximum(best, gl.max(logits, 1))
        weights = gl.convert_layout(gl.exp2(logits - above[:, None]).to(DTYPE), WEIGHTS)
        shrink = gl.exp2(best - above)
        best = above
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        totals = totals * gl.convert_layout(shrink, gl.SliceLayout(1, TOTALS))[:, None]
        sums = warpgroup_mma(weights, key, sums, is_async=True)
        totals = warpgroup_mma(weights, ones, totals, is_async=True)
    sums, totals = warpgroup_mma_wait(0, deps=(sums, totals))
    total = gl.convert_layout(gl.max(totals, 1), gl.SliceLayout(1, SUMS))
    if SPLIT:
        partial = (sequence * splits + split) * HEADS + head
        gl.store(partials + partial[:, None] * width + dims[None, :], sums, mask=inside[:, None])
        gl.store(stats + partial, gl.convert_layout(best, gl.SliceLayout(1, SUMS)), mask=inside)
        gl.store(stats + capacity + partial, total, mask=inside)
    else:
        rows = out + sequence * out_row + head[:, None] * out_head + dims[None, :]
        gl.store(rows, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
