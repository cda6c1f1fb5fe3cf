"""Kernels that find which ids top-k and top-p keep, without sorting a vocabulary.

The ids of a row have one order: by logit, the larger first, then by id, the lower first. What top-k and top-p keep are
the first ids of that order, so all that is looked for is the last of them, the *cut*. Two passes over all rows narrow
the place of a top-p to logits between two bounds, by float32 sums that err to the safe side; the largest logits of
chunks bound a top-k. `sample.py` then makes exact sums above the bounds and lists what stands between them, and
`cut_kernel` bisects the list by whole numbers. So the cut is exact, whatever the bounds are. A row whose list
overflows (thousands of equal logits at the cut, or a very large k) is searched by one program that reads it again and
again. Knows no requests. Called by `sample.py`; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync.gpu.kernels.sampling.tile import (
    FLOOR,
    MASS,
    NOTHING,
    SCALE,
    TOP_K,
    TOP_P,
    best_of,
    id_of,
    job_float,
    job_int,
    mass_of,
    order_of,
    read_tile,
    scaled,
    value_of,
)

#: sums of a narrowing pass: of all, and of those below 15 pivots
PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
# of the sums: what float32 errs at most, generously
_SAFE = tl.constexpr(1e-4)
# a probability below e^-37 of the largest has no mass (2^-52, halved)
_REACH = tl.constexpr(37.0)


@triton.jit
def top_k_of(ints, job, width):  # type: ignore[no-untyped-def]
    """0 where top-k keeps all."""
    k = job_int(ints, job, TOP_K)
    return tl.where(k >= width, 0, k)


@triton.jit  # type: ignore[untyped-decorator]
def _pivots(low, high, squared: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rising from number 1 to 15, between the bounds; squared: closer to `high`, where most of the mass is."""
    part = 1.0 - tl.arange(0, _PIVOTS).to(tl.float32) / _PIVOTS
    if squared:
        part = part * part
    return high - (high - low) * part


@triton.jit
def _first_low(best, floats, job, width):  # type: ignore[no-untyped-def]
    """All that is below has no part in the nucleus: together less than 1 - p of the largest alone."""
    rest = tl.maximum(1.0 - job_float(floats, job, TOP_P), 1e-17)
    reach = tl.minimum(tl.log(width.to(tl.float64) / rest) + 1e-3, _REACH)
    return tl.maximum(best - (reach / job_float(floats, job, SCALE)).to(tl.float32), -3.0e38)


@triton.jit  # type: ignore[untyped-decorator]
def closer(  # type: ignore[no-untyped-def]
    sums, job, low, high, best, top_p, spans, padded: tl.constexpr, squared: tl.constexpr
):
    """Closer bounds: at or above `low` stands enough mass for sure, at or above `high` too little."""
    span = tl.arange(0, padded)[:, None]
    number = tl.arange(0, _PIVOTS)
    part = tl.load(sums + (job * spans + span) * _PIVOTS + number[None, :], mask=span < spans, other=0.0)
    below = tl.sum(part.to(tl.float64), axis=0)
    rest = tl.sum(tl.where(number == 0, below, 0.0), axis=0) * (1.0 - top_p)
    pivot = _pivots(low, tl.minimum(high, best), squared)
    enough = (number > 0) & (below < rest * (1.0 - _SAFE))
    too_little = (number > 0) & (below > rest * (1.0 + _SAFE))
    new_low = tl.max(tl.where(enough, pivot, float("-inf")), axis=0)
    new_high = tl.min(tl.where(too_little, pivot, float("inf")), axis=0)
    return tl.maximum(low, new_low), tl.minimum(high, new_high)


@triton.jit(do_not_specialize=["stride", "mask_columns"])  # type: ignore[untyped-decorator]
def narrow_kernel(  # type: ignore[no-untyped-def]
    logits, stride, width, ints, floats, tile_best, before, bounds, sums,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, spans, padded_spans: tl.constexpr, first: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """float32 sums of the probabilities below 15 pivots, of the ids of a span. The second pass begins with the bounds
    of the first, whose sums are `before`, and keeps them in `bounds`."""
    job = tl.program_id(1).to(tl.int64)
    top_p = job_float(floats, job, TOP_P)
    if (job_int(ints, job, MASS) == 0) | (top_p >= 1.0) | (top_k_of(ints, job, width) > 0):
        return
    number = tl.program_id(0)
    ids = number * span + tl.arange(0, span)
    _, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    best = value_of(best_of(tile_best, job, tiles, padded))
    low = _first_low(best, floats, job, width)
    high = float("inf")
    if not first:
        low, high = closer(before, job, low, high, best, top_p, spans, padded_spans, True)
        if number == 0:
            tl.store(bounds + job * 2, low)
            tl.store(bounds + job * 2 + 1, high)
    pivots = _pivots(low, tl.minimum(high, best), first)
    scale = tl.minimum(job_float(floats, job, SCALE), 3.0e38).to(tl.float32)
    part = tl.where(x == best, 1.0, tl.exp((x - best) * scale))
    column = tl.arange(0, _PIVOTS)
    found = tl.where(column == 0, tl.sum(part, axis=0), 0.0)
    for pivot in tl.static_range(1, _PIVOTS):
        bound = tl.sum(tl.where(column == pivot, pivots, 0.0), axis=0)
        found = tl.where(column == pivot, tl.sum(tl.where(x < bound, part, 0.0), axis=0), found)
    tl.store(sums + (job * spans + number) * _PIVOTS + column, found)


@triton.jit(do_not_specialize=["stride", "mask_columns"])  # type: ignore[untyped-decorator]
def list_kernel(  # type: ignore[no-untyped-def]
    logits, stride, width, ints, floats, tile_best, floors, bounds, sums, listed, counts, above, kept,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, spans, padded_spans: tl.constexpr, most: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """List the ids between the bounds of a cut, in any order, and keep the closest bounds."""
    job = tl.program_id(1).to(tl.int64)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    if (job_int(ints, job, MASS) == 0) | ((top_p >= 1.0) & (k <= 0)):
        return
    number = tl.program_id(0)
    ids = number * tile + tl.arange(0, tile)
    _, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    floor = tl.full((), 0, tl.int64)
    if k > 0:
        floor = tl.load(floors + job)
        between = order_of(x, ids, width) >= floor
        tl.store(above + job * tiles + number, floor * 0)
        tl.store(kept + job * tiles + number, floor * 0)
    else:
        best = value_of(best_of(tile_best, job, tiles, padded))
        low = tl.load(bounds + job * 2)
        high = tl.load(bounds + job * 2 + 1)
        low, high = closer(sums, job, low, high, best, top_p, spans, padded_spans, False)
        between = (x >= low) & (x < high)
        if number == 0:
            tl.store(bounds + (tl.num_programs(1) + job) * 2, low)
            tl.store(bounds + (tl.num_programs(1) + job) * 2 + 1, high)
    found = tl.sum(between.to(tl.int32), axis=0)
    if found > most // 8:
        # too many to be worth a list: the row takes the slow way
        tl.atomic_add(counts + job, most + 1)
    elif found > 0:
        place = tl.atomic_add(counts + job + ids * 0, 1, mask=between)
        tl.store(listed + job * most + place, order_of(x, ids, width), mask=between & (place < most))


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
def _cut_of(  # type: ignore[no-untyped-def]
    id_bits, unit, floats, tile_best, listed, total, above, kept, cuts, slow, job, count, top_p, k,
    tiles, padded: tl.constexpr, most: tl.constexpr, tile: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, size)
    here = place < count
    order = tl.load(listed + job * most + place, mask=here, other=NOTHING)
    best = value_of(best_of(tile_best, job, tiles, padded))
    logs = scaled(tl.where(here, value_of(order), best), best, job_float(floats, job, SCALE))
    mass = tl.where(here, mass_of(logs, unit), 0)
    packed = tl.where(here, _packed(order, id_bits), NOTHING)
    highest = tl.max(packed, axis=0)
    cut = tl.minimum(tl.min(tl.where(here, packed, 0x7FFFFFFFFFFFFFFF), axis=0), highest)
    number = tl.arange(0, padded)
    whole = tl.sum(tl.load(total + job * tiles + number, mask=number < tiles, other=0), axis=0)
    over = tl.sum(tl.load(above + job * tiles + number, mask=number < tiles, other=0), axis=0)
    if k > 0:
        high = highest
        while cut < high:
            middle = _middle(cut, high) + ((cut ^ high) & 1)
            if tl.sum((packed >= middle).to(tl.int32), axis=0) >= k:
                cut = middle
            else:
                high = middle - 1
        mass = tl.where(packed >= cut, mass, 0)
        whole = tl.sum(mass, axis=0)
    target = target_of(top_p, whole)
    narrowed = (top_p < 1.0) & (whole > 0)
    # whether the list holds the cut: the bounds were made of rounded sums
    sound = (over < target) & (over + tl.sum(mass, axis=0) >= target)
    if narrowed & sound:
        high = highest
        while cut < high:
            middle = _middle(cut, high)
            if over + tl.sum(tl.where(packed > middle, mass, 0), axis=0) < target:
                high = middle
            else:
                cut = middle + 1
    if narrowed & (sound == 0):
        tl.store(slow + job, 1)
    else:
        tl.store(cuts + job, tl.where(count > 0, _unpacked(cut, id_bits), NOTHING))
        keep = here & (packed >= cut) & (logs >= job_float(floats, job, FLOOR)) & (mass > 0)
        tl.atomic_add(kept + job * tiles + id_of(order) // tile, mass, mask=keep)


@triton.jit(do_not_specialize_on_alignment=["slow"])  # type: ignore[untyped-decorator]
def cut_kernel(  # type: ignore[no-untyped-def]
    width, id_bits, unit, ints, floats, tile_best, listed, counts, total, above, kept, cuts, slow,
    tiles, padded: tl.constexpr, most: tl.constexpr, tile: tl.constexpr, few: tl.constexpr,
):  # fmt: skip
    """The cut of a job from its list, and the masses of what the list adds to each tile. `slow` is set where the list
    does not hold the cut."""
    job = tl.program_id(0).to(tl.int64)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    if (job_int(ints, job, MASS) == 0) | ((top_p >= 1.0) & (k <= 0)):
        tl.store(cuts + job, NOTHING)
        return
    count = tl.load(counts + job)
    if count > most:
        tl.store(slow + job, 1)
    elif count > few:
        _cut_of(
            id_bits, unit, floats, tile_best, listed, total, above, kept, cuts, slow, job, count, top_p, k,
            tiles, padded, most, tile, most,
        )  # fmt: skip
    else:
        _cut_of(
            id_bits, unit, floats, tile_best, listed, total, above, kept, cuts, slow, job, count, top_p, k,
            tiles, padded, most, tile, few,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _before(  # type: ignore[no-untyped-def]
    logits, stride, width, unit, ints, job, best, scale, order,
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
            whole += tl.sum(tl.where(here, mass_of(scaled(x, best, scale), unit), 0), axis=0)
        else:
            whole += tl.sum(here.to(tl.int64), axis=0)
    return whole


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["stride", "mask_columns"], do_not_specialize_on_alignment=["slow"]
)
def slow_cut_kernel(  # type: ignore[no-untyped-def]
    logits, stride, width, unit, ints, floats, tile_best, kept, cuts, slow,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """What `cut_kernel` could not do: the same cut, by as many readings of the row as an order has bits."""
    job = tl.program_id(0).to(tl.int64)
    if tl.load(slow + job) == 0:
        return
    highest = best_of(tile_best, job, tiles, padded)
    best = value_of(highest)
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
                logits, stride, width, unit, ints, job, best, scale, middle - 1,
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
            logits, stride, width, unit, ints, job, best, scale, floor,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, True,
        )  # fmt: skip
        target = target_of(top_p, whole)
        high = highest
        while cut < high:
            middle = _middle(cut, high)
            mass = _before(
                logits, stride, width, unit, ints, job, best, scale, middle,
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
        tl.store(kept + job * tiles + number, tl.sum(tl.where(keep, mass_of(logs, unit), 0), axis=0))
