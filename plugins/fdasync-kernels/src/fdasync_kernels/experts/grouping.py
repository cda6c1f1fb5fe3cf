"""Groups pairs (token, slot) by expert, stably, and cuts the groups into tiles: the first step of `chain.py`.

Few pairs take one launch, in which every expert's program reads all ids. Many take three: counts of strips of pairs,
their sums over the strips before, and then every strip's program ranks its own pairs. Both give the same order and the
same tiles. Nothing is added atomically. Knows no rows and no weights. Called by `chain.py`.
Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fdasync_kernels.overlap import overlap, wait_for_inputs

if TYPE_CHECKING:
    from fdasync_kernels.experts.tiles import Tiles

# pairs of a program where there are three launches: it compares each of them with each
_STRIP = 128


def group(
    ids: torch.Tensor, live: torch.Tensor | None, num_experts: int, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Group the pairs of `ids` [T, k], contiguous; rows whose entry in `live` [T] is negative have no pairs.

    Returns:
        int32 [T * k]: the pairs by expert, in each expert in their own order; past the last, anything. int32 [4 *
        capacity]: of each tile its expert, its first place in the former, its rows, and anything (of the first tile:
        the number of tiles); the expert of entries past the last tile is -1. And that capacity. Both tensors are new,
        and the caller's.
    """
    pairs = ids.numel()
    capacity = min(pairs, num_experts) + pairs // tiles.rows
    # the table first: so both begin at multiples of 16 bytes, whatever T is, and nothing is compiled anew
    memory = torch.empty(4 * capacity + pairs, dtype=torch.int32, device=ids.device)
    table, order = memory[: 4 * capacity], memory[4 * capacity :]
    padded = triton.next_power_of_2(num_experts)
    # without a mask any pointer does: the kernels have no instruction for it
    alive = ids if live is None else live
    shared: dict[str, Any] = {
        "TOPK": ids.shape[1], "E": num_experts, "EP": padded, "MASKED": live is not None, **overlap(ids.device),
    }  # fmt: skip
    if not tiles.apart:
        experts_group[(num_experts,)](
            ids, alive, order, table, pairs, capacity,
            BM=tiles.rows, CHUNK=tiles.chunk, num_warps=4 if tiles.chunk <= 1024 else 8, **shared,
        )  # fmt: skip
        return order, table, capacity
    strips = triton.cdiv(pairs, _STRIP)
    counts = torch.empty((strips + 1, padded), dtype=torch.int32, device=ids.device)
    experts_group_count[(strips,)](ids, alive, counts, pairs, STRIP=_STRIP, **shared)
    experts_group_sum[(padded,)](counts, strips, EP=padded, CHUNK=512, **overlap(ids.device))
    experts_group_place[(max(strips, num_experts),)](
        ids, alive, counts, order, table, pairs, capacity, strips, BM=tiles.rows, STRIP=_STRIP, STEP=32, **shared
    )
    return order, table, capacity


@triton.jit
def _found(ids, live, pair, pairs, TOPK: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr):
    """The experts of pairs; -1: none."""
    inside = pair < pairs
    found = tl.load(ids + pair, mask=inside, other=-1)
    # compared in its own width: the low half of a wide id may be an expert
    real = (found >= 0) & (found < E)
    if MASKED:
        real = real & (tl.load(live + pair // TOPK, mask=inside, other=-1) >= 0)
    return tl.where(real, found, -1).to(tl.int32)


@triton.jit
def _list_tiles(tiles, counts, e, capacity, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """List the tiles of expert e, and its share of the entries past the last tile; its first place in the order."""
    expert = tl.arange(0, EP)
    before = tl.sum(tl.where(expert < e, counts, 0))
    mine = tl.sum(tl.where(expert == e, counts, 0))
    needed = (counts + BM - 1) // BM
    first = tl.sum(tl.where(expert < e, needed, 0))
    if e == 0:
        tl.store(tiles + 3, tl.sum(needed))
    number = tl.arange(0, 32)
    for start in range(0, (mine + BM - 1) // BM, 32):
        at = start + number
        real = at * BM < mine
        place = tiles + (first + at) * 4
        tl.store(place, e + at * 0, mask=real)
        tl.store(place + 1, before + at * BM, mask=real)
        tl.store(place + 2, tl.minimum(BM, mine - at * BM), mask=real)
    for at in range(tl.sum(needed) + e, capacity, E):
        tl.store(tiles + at * 4, -1)
    return before


@triton.jit(do_not_specialize=["pairs", "capacity"], do_not_specialize_on_alignment=["live"])
def experts_group(
    ids, live, order, tiles, pairs, capacity,
    TOPK: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes one expert: counts all pairs, then ranks its own."""
    wait_for_inputs(OVERLAP)
    e = tl.program_id(0)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, pairs, CHUNK):
        found = _found(ids, live, start + tl.arange(0, CHUNK), pairs, TOPK, E, MASKED)
        counts += tl.histogram(tl.where(found >= 0, found, 0), EP, mask=found >= 0)
    rank = _list_tiles(tiles, counts, e, capacity, E, EP, BM)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = _found(ids, live, pair, pairs, TOPK, E, MASKED) == e
        ones = hit.to(tl.int32)
        tl.store(order + rank + tl.cumsum(ones, 0) - ones, pair, mask=hit)
        rank += tl.sum(ones)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["live"])
def experts_group_count(
    ids, live, counts, pairs,
    TOPK: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    STRIP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program counts the experts of one strip of pairs: a row of `counts` [strips + 1, EP]."""
    wait_for_inputs(OVERLAP)
    strip = tl.program_id(0)
    found = _found(ids, live, strip * STRIP + tl.arange(0, STRIP), pairs, TOPK, E, MASKED)
    mine = tl.histogram(tl.where(found >= 0, found, 0), EP, mask=found >= 0)
    tl.store(counts + strip * EP + tl.arange(0, EP), mine)


@triton.jit(do_not_specialize=["strips"])
def experts_group_sum(counts, strips, EP: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """A program takes one expert: its counts become sums over the strips before, and the last row gets the whole."""
    wait_for_inputs(OVERLAP)
    e = tl.program_id(0)
    total = 0
    for start in range(0, strips, CHUNK):
        strip = start + tl.arange(0, CHUNK)
        mine = tl.load(counts + strip * EP + e, mask=strip < strips, other=0)
        tl.store(counts + strip * EP + e, total + tl.cumsum(mine, 0) - mine, mask=strip < strips)
        total += tl.sum(mine)
    tl.store(counts + strips * EP + e, total)


@triton.jit(do_not_specialize=["pairs", "capacity", "strips"], do_not_specialize_on_alignment=["live"])
def experts_group_place(
    ids, live, counts, order, tiles, pairs, capacity, strips,
    TOPK: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program ranks the pairs of one strip, and lists the tiles of one expert."""
    wait_for_inputs(OVERLAP)
    number = tl.program_id(0)
    totals = tl.load(counts + strips * EP + tl.arange(0, EP))
    if number < E:
        _list_tiles(tiles, totals, number, capacity, E, EP, BM)
    if number < strips:
        index = tl.arange(0, STRIP)
        pair = number * STRIP + index
        found = _found(ids, live, pair, pairs, TOPK, E, MASKED)
        rank = tl.zeros((STRIP,), tl.int32)
        for start in tl.static_range(0, STRIP, STEP):
            # the ids again, along the other side: pairs of the same expert before a pair
            other = start + tl.arange(0, STEP)
            others = _found(ids, live, number * STRIP + other, pairs, TOPK, E, MASKED)
            like = (found[:, None] == others[None, :]) & (other[None, :] < index[:, None])
            rank += tl.sum(like.to(tl.int32), 1)
        good = found >= 0
        known = tl.where(good, found, 0)
        first = tl.gather(tl.cumsum(totals, 0) - totals, known, 0)
        first += tl.load(counts + number * EP + known, mask=good, other=0)
        tl.store(order + first + rank, pair, mask=good)
