"""Kernels that find which ids top-k and top-p keep, without sorting a vocabulary.

The ids of a row have one order: by logit, the larger first, then by id, the lower first. What top-k and top-p keep are
the first ids of that order, so all that is looked for is the last of them, the *cut*. `narrow.py` bounds its place,
`masses_kernel` makes exact sums above the bounds and lists what stands between them, and `cut_kernel` bisects the list
by whole numbers. So the cut is exact, whatever the bounds are. A row whose list overflows (thousands of equal logits at
the cut, or a very large k) is searched by one program that reads it again and again. Knows no requests. Called by
`sample.py`; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync.gpu.kernels.sampling.tile import (
    FLOOR,
    MASS,
    NOTHING,
    SCALE,
    TOP_P,
    best_of,
    id_of,
    job_float,
    job_int,
    mass_of,
    order_of,
    reach_of,
    read_tile,
    scaled,
    top_k_of,
    value_of,
)


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """Rounded down; the sum of two orders may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def target_of(top_p, total):  # type: ignore[no-untyped-def]
    """An id is kept while the masses before it are less: at least the first one is."""
    wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, total), 1)


@triton.jit
def _packed(order, id_bits):  # type: ignore[no-untyped-def]
    """An order without the bits that no id has, so that fewer steps bisect it."""
    return ((order >> 32) << id_bits) + ((order & 0xFFFFFFFF) - 0x7FFFFFFF + (tl.full((), 1, tl.int64) << id_bits) - 1)


@triton.jit
def _unpacked(packed, id_bits):  # type: ignore[no-untyped-def]
    ids = tl.full((), 1, tl.int64) << id_bits
    return ((packed >> id_bits) << 32) + (packed & (ids - 1)) + 0x7FFFFFFF - ids + 1


@triton.jit  # type: ignore[untyped-decorator]
def _behind(packed, masses, count, bound, by_mass: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many ids of a list stand at `bound` or before it, or their mass."""
    whole = tl.full((), 0, tl.int64)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        here = tl.load(packed + place, mask=place < count, other=NOTHING) >= bound
        if by_mass:
            whole += tl.sum(tl.load(masses + place, mask=here, other=0), axis=0)
        else:
            whole += tl.sum(here.to(tl.int32), axis=0)
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of(table, job, tiles, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.arange(0, padded)
    return tl.sum(tl.load(table + job * tiles + number, mask=number < tiles, other=0), axis=0)


@triton.jit(do_not_specialize_on_alignment=["slow"])  # type: ignore[untyped-decorator]
def cut_kernel(  # type: ignore[no-untyped-def]
    width, id_bits, shift, ints, floats, tile_best, listed, masses, counts, total, above, kept, cuts, slow,
    tiles, padded: tl.constexpr, most: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The cut of a job from its list, and the masses of what the list adds to each tile. `slow` is set where the list
    does not hold the cut. Overwrites the list; `masses` is room for as many numbers."""
    job = tl.program_id(0).to(tl.int64)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    if (job_int(ints, job, MASS) == 0) | ((top_p >= 1.0) & (k <= 0)):
        tl.store(cuts + job, NOTHING)
        return
    count = tl.load(counts + job)
    if count > most:
        tl.store(slow + job, 1)
        return
    listed += job * most
    masses += job * most
    best = best_of(tile_best, job, tiles, padded)
    scale = job_float(floats, job, SCALE)
    cut = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    highest = tl.full((), NOTHING, tl.int64)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        here = place < count
        order = tl.load(listed + place, mask=here, other=0)
        x = value_of(order)
        packed = _packed(order, id_bits)
        tl.store(listed + place, packed, mask=here)
        tl.store(masses + place, mass_of(x, scaled(x, best, scale), reach_of(best, scale), shift), mask=here)
        cut = tl.minimum(cut, tl.min(tl.where(here, packed, 0x7FFFFFFFFFFFFFFF), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(here, packed, NOTHING), axis=0))
    # other threads wrote what is read now
    tl.debug_barrier()
    whole = tl.full((), 0, tl.int64)
    if k > 0:
        high = highest
        while cut < high:
            middle = _middle(cut, high) + ((cut ^ high) & 1)
            if _behind(listed, masses, count, middle, False, block) >= k:
                cut = middle
            else:
                high = middle - 1
    if top_p < 1.0:
        inside = _behind(listed, masses, count, cut, True, block)
        over = _sum_of(above, job, tiles, padded)
        whole = inside
        if k <= 0:
            whole = _sum_of(total, job, tiles, padded)
        target = target_of(top_p, whole)
        # the bounds were made of rounded sums
        if (whole > 0) & ((over >= target) | (over + inside < target)):
            tl.store(slow + job, 1)
            return
        high = highest
        while (cut < high) & (whole > 0):
            middle = _middle(cut, high)
            if over + _behind(listed, masses, count, middle + 1, True, block) < target:
                high = middle
            else:
                cut = middle + 1
    tl.store(cuts + job, tl.where(count > 0, _unpacked(cut, id_bits), NOTHING))
    floor = job_float(floats, job, FLOOR)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        packed = tl.load(listed + place, mask=place < count, other=NOTHING)
        mass = tl.load(masses + place, mask=(place < count) & (packed >= cut), other=0)
        order = _unpacked(packed, id_bits)
        passed = (mass > 0) & (scaled(value_of(order), best, scale) >= floor)
        tl.atomic_add(kept + job * tiles + id_of(order) // tile, mass, mask=passed)


@triton.jit  # type: ignore[untyped-decorator]
def _before(  # type: ignore[no-untyped-def]
    logits, stride, width, shift, ints, job, best, scale, order,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, tile: tl.constexpr, by_mass: tl.constexpr,
):  # fmt: skip
    """How many ids of a row stand before `order`, or their mass."""
    whole = order * 0
    for number in range(tiles):
        ids = number * tile + tl.arange(0, tile)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        here = order_of(x, ids, width) > order
        if by_mass:
            mass = mass_of(x, scaled(x, best, scale), reach_of(best, scale), shift)
            whole += tl.sum(tl.where(here, mass, 0), axis=0)
        else:
            whole += tl.sum(here.to(tl.int64), axis=0)
    return whole


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["mask_columns"], do_not_specialize_on_alignment=["slow"]
)
def slow_cut_kernel(  # type: ignore[no-untyped-def]
    logits, stride, width, shift, ints, floats, tile_best, kept, cuts, slow,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """What `cut_kernel` could not do: the same cut, by as many readings of the row as an order has bits."""
    job = tl.program_id(0).to(tl.int64)
    if tl.load(slow + job) == 0:
        return
    best = best_of(tile_best, job, tiles, padded)
    highest = order_of(best, tl.full((), 0, tl.int32), width)
    scale = job_float(floats, job, SCALE)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    cut = highest * 0 + NOTHING
    if k > 0:
        high = highest
        while cut < high:
            middle = _middle(cut, high) + ((cut ^ high) & 1)
            # those at `middle` or before it
            count = _before(
                logits, stride, width, shift, ints, job, best, scale, middle - 1,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, False,
            )  # fmt: skip
            if count >= k:
                cut = middle
            else:
                high = middle - 1
    if top_p < 1.0:
        floor = tl.where(cut > NOTHING, cut - 1, NOTHING)
        whole = _before(
            logits, stride, width, shift, ints, job, best, scale, floor,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, True,
        )  # fmt: skip
        target = target_of(top_p, whole)
        high = highest
        while cut < high:
            middle = _middle(cut, high)
            mass = _before(
                logits, stride, width, shift, ints, job, best, scale, middle,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, True,
            )  # fmt: skip
            if mass < target:
                high = middle
            else:
                cut = middle + 1
    tl.store(cuts + job, cut)
    for number in range(tiles):
        ids = number * tile + tl.arange(0, tile)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        logs = scaled(x, best, scale)
        keep = (order_of(x, ids, width) >= cut) & (logs >= job_float(floats, job, FLOOR))
        mass = mass_of(x, logs, reach_of(best, scale), shift)
        tl.store(kept + job * tiles + number, tl.sum(tl.where(keep, mass, 0), axis=0))
