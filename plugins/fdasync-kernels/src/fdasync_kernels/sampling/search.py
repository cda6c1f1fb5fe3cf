"""Kernels that find which ids top-k and top-p keep, without sorting a vocabulary.

The ids of a row have one order: by logit, the larger first, then by id, the lower first. Top-k and top-p keep the first
ids of that order, so the kernels only look for the last of them, the *cut*. `narrow.py` bounds its place,
`masses_kernel` makes exact sums above the bounds and marks what stands between them. `cut_kernel` lists what is marked,
bisects the logits of the list by whole numbers, and counts ids where the cut is one of several equal logits. So the cut
is exact, whatever the bounds are. A row whose list overflows (thousands of equal logits at the cut, or a very large k)
is searched by one program that reads it again and again. Knows no requests. Called by `sample.py`; runs on CUDA, or on
the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.sampling.tile import (
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
def _middle(low, high):
    """Rounded down; the sum of two orders may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def target_of(top_p, total):
    """An id is kept while the masses before it are less: at least the first one is."""
    wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, total), 1)


@triton.jit
def _key_of(order, spare):
    """int32 in the order of the logits, without `spare` bits that no two logits differ in alone."""
    return (order >> 32).to(tl.int32) >> spare


@triton.jit
def _bits_in(word):
    """int32: how many bits of an int32 are set."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _listed(words, count, listed, most: tl.constexpr, block: tl.constexpr):
    """Write the ids whose bits are set, in order, at most `most` of them; returns how many there are."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, count, block):
        number = start + tl.arange(0, block)
        word = tl.load(words + number, mask=number < count, other=0)
        bits = _bits_in(word)
        place = found + tl.cumsum(bits, axis=0) - bits
        found += tl.sum(bits, axis=0)
        while tl.max(bits, axis=0) > 0:
            lowest = word & -word
            # a power of two as a float shows which
            exponent = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
            ids = number * 32 + exponent - 127
            tl.store(listed + place, ids.to(tl.int64), mask=(bits > 0) & (place < most))
            word = word ^ lowest
            bits -= 1
            place += 1
    return found


@triton.jit
def _from(listed, masses, count, spare, key, by_mass: tl.constexpr, block: tl.constexpr):
    """How many ids of a list have this key or a larger one, or their mass."""
    whole = tl.full((), 0, tl.int64)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        order = tl.load(listed + place, mask=place < count, other=NOTHING)
        here = (place < count) & (_key_of(order, spare) >= key)
        if by_mass:
            mass = tl.load(masses + place, mask=place < count, other=0)
            whole += tl.sum(tl.where(here, mass, 0), axis=0)
        else:
            whole += tl.sum(here.to(tl.int32), axis=0)
    return whole


@triton.jit
def _order_at(listed, count, spare, key, number, block: tl.constexpr):
    """The order of the id with this key that is `number` by its id, from 1; a list is in the order of ids."""
    before = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int64)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        order = tl.load(listed + place, mask=place < count, other=NOTHING)
        equal = ((place < count) & (_key_of(order, spare) == key)).to(tl.int32)
        here = (equal > 0) & (before + tl.cumsum(equal, axis=0) == number)
        found += tl.sum(tl.where(here, order, 0), axis=0)
        before += tl.sum(equal, axis=0)
    return found


@triton.jit
def _sum_of(table, job, tiles, padded: tl.constexpr):
    number = tl.arange(0, padded)
    return tl.sum(tl.load(table + job * tiles + number, mask=number < tiles, other=0), axis=0)


@triton.jit(do_not_specialize=["mask_columns"], do_not_specialize_on_alignment=["slow"])
def cut_kernel(
    logits, stride, width, spare, shift, ints, floats, tile_best, words, listed, masses,
    total, above, kept, cuts, slow,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, most: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The cut of a job from the marked ids, and the masses that they add to each tile. `slow` is set where they do not
    hold the cut, or are more than `most`. `listed` and `masses` are room for so many numbers."""
    job = tl.program_id(0).to(tl.int64)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    if (job_int(ints, job, MASS) == 0) | ((top_p >= 1.0) & (k <= 0)):
        tl.store(cuts + job, NOTHING)
        return
    listed += job * most
    masses += job * most
    count = _listed(words + job * tiles * (tile // 32), tiles * (tile // 32), listed, most, block)
    if count > most:
        tl.store(slow + job, 1)
        return
    # other threads wrote what is read now
    tl.debug_barrier()
    best = best_of(tile_best, job, tiles, padded)
    scale = job_float(floats, job, SCALE)
    reach = reach_of(best, scale)
    low = tl.full((), 0x7FFFFFFF, tl.int32)
    highest = tl.full((), -0x80000000, tl.int32)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        here = place < count
        ids = tl.load(listed + place, mask=here, other=0x7FFFFFFF).to(tl.int32)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        order = order_of(x, ids, width)
        tl.store(listed + place, order, mask=here)
        tl.store(masses + place, mass_of(x, scaled(x, best, scale), reach, shift), mask=here)
        key = _key_of(order, spare)
        low = tl.minimum(low, tl.min(tl.where(here, key, 0x7FFFFFFF), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(here, key, -0x80000000), axis=0))
    tl.debug_barrier()
    cut = tl.full((), NOTHING, tl.int64)
    if k > 0:
        high = highest
        while low < high:
            middle = _middle(low, high) + ((low ^ high) & 1)
            if _from(listed, masses, count, spare, middle, False, block) >= k:
                low = middle
            else:
                high = middle - 1
        number = k - _from(listed, masses, count, spare, low + 1, False, block)
        cut = _order_at(listed, count, spare, low, number, block)
        # those behind it have no part in a top-p
        for start in range(0, count, block):
            place = start + tl.arange(0, block)
            behind = (place < count) & (tl.load(listed + place, mask=place < count, other=0) < cut)
            tl.store(masses + place, tl.zeros((block,), tl.int64), mask=behind)
        tl.debug_barrier()
    if top_p < 1.0:
        inside = _from(listed, masses, count, spare, low, True, block)
        over = _sum_of(above, job, tiles, padded)
        whole = inside
        if k <= 0:
            whole = _sum_of(total, job, tiles, padded)
        target = target_of(top_p, whole)
        # the bounds were made of rounded sums
        if (whole > 0) & ((over >= target) | (over + inside < target)):
            tl.store(slow + job, 1)
            return
        if whole > 0:
            high = highest
            while low < high:
                middle = _middle(low, high)
                if over + _from(listed, masses, count, spare, middle + 1, True, block) < target:
                    high = middle
                else:
                    low = middle + 1
            before = over + _from(listed, masses, count, spare, low + 1, True, block)
            # equal logits have equal masses
            x = value_of(_order_at(listed, count, spare, low, 1, block))
            each = tl.maximum(mass_of(x, scaled(x, best, scale), reach, shift), 1)
            cut = _order_at(listed, count, spare, low, (target - before + each - 1) // each, block)
    tl.store(cuts + job, cut)
    floor = job_float(floats, job, FLOOR)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        order = tl.load(listed + place, mask=place < count, other=NOTHING)
        here = (place < count) & (order >= cut)
        mass = tl.load(masses + place, mask=here, other=0)
        passed = (mass > 0) & (scaled(value_of(order), best, scale) >= floor)
        tl.atomic_add(kept + job * tiles + id_of(order) // tile, mass, mask=passed)


@triton.jit
def _before(
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


@triton.jit(do_not_specialize=["mask_columns"], do_not_specialize_on_alignment=["slow"])
def slow_cut_kernel(
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
