"""The cut of a row that has too many ids between its bounds for a list: thousands of equal logits, or a very large k.

One program reads the row again and again, as many times as a logit has bits and a few more; it finds what `cut_kernel`
of `search.py` finds, in the same way. Knows no requests. Launched by `sample.py`; runs on CUDA, or on the CPU under
Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync.gpu.kernels.sampling.search import key_of, middle_of, target_of
from fdasync.gpu.kernels.sampling.tile import (
    FLOOR,
    NOTHING,
    SCALE,
    TOP_P,
    best_of,
    job_float,
    mass_of,
    order_of,
    reach_of,
    read_tile,
    scaled,
    top_k_of,
    value_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def _row_from(  # type: ignore[no-untyped-def]
    logits, stride, width, spare, shift, ints, job, best, scale, key, floor,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, tile: tl.constexpr, by_mass: tl.constexpr,
):  # fmt: skip
    """How many ids of a row have this key or a larger one, or the mass of those of them that stand at `floor` or before
    it."""
    reach = reach_of(best, scale)
    whole = tl.full((), 0, tl.int64)
    for number in range(tiles):
        ids = number * tile + tl.arange(0, tile)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        order = order_of(x, ids, width)
        here = (ids < width) & (key_of(order, spare) >= key)
        if by_mass:
            mass = mass_of(x, scaled(x, best, scale), reach, shift)
            whole += tl.sum(tl.where(here & (order >= floor), mass, 0), axis=0)
        else:
            whole += tl.sum(here.to(tl.int32), axis=0)
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def _row_order_at(  # type: ignore[no-untyped-def]
    logits, stride, width, spare, ints, job, key, wanted,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, tile: tl.constexpr,
):  # fmt: skip
    """The order of the id of a row with this key that is `wanted` by its id, from 1."""
    before = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int64)
    for number in range(tiles):
        ids = number * tile + tl.arange(0, tile)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        order = order_of(x, ids, width)
        equal = ((ids < width) & (key_of(order, spare) == key)).to(tl.int32)
        here = (equal > 0) & (before + tl.cumsum(equal, axis=0) == wanted)
        found += tl.sum(tl.where(here, order, 0), axis=0)
        before += tl.sum(equal, axis=0)
    return found


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["mask_columns"], do_not_specialize_on_alignment=["slow"]
)
def slow_cut_kernel(  # type: ignore[no-untyped-def]
    logits, stride, width, spare, shift, ints, floats, tile_best, kept, cuts, slow,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """What `cut_kernel` could not do: the same cut, by as many readings of the row as a logit has bits."""
    job = tl.program_id(0).to(tl.int64)
    if tl.load(slow + job) == 0:
        return
    best = best_of(tile_best, job, tiles, padded)
    scale = job_float(floats, job, SCALE)
    reach = reach_of(best, scale)
    top_p = job_float(floats, job, TOP_P)
    k = top_k_of(ints, job, width)
    highest = key_of(order_of(best, tl.full((), 0, tl.int32), width), spare)
    low = key_of(order_of(tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32), width), spare)
    cut = tl.full((), NOTHING, tl.int64)
    if k > 0:
        high = highest
        while low < high:
            middle = middle_of(low, high) + ((low ^ high) & 1)
            count = _row_from(
                logits, stride, width, spare, shift, ints, job, best, scale, middle, cut,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, False,
            )  # fmt: skip
            if count >= k:
                low = middle
            else:
                high = middle - 1
        before = _row_from(
            logits, stride, width, spare, shift, ints, job, best, scale, low + 1, cut,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
            tiles, tile, False,
        )  # fmt: skip
        cut = _row_order_at(
            logits, stride, width, spare, ints, job, low, k - before,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
            tiles, tile,
        )  # fmt: skip
    if top_p < 1.0:
        floor = cut
        whole = _row_from(
            logits, stride, width, spare, shift, ints, job, best, scale, low, floor,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
            tiles, tile, True,
        )  # fmt: skip
        if whole > 0:
            target = target_of(top_p, whole)
            high = highest
            while low < high:
                middle = middle_of(low, high)
                mass = _row_from(
                    logits, stride, width, spare, shift, ints, job, best, scale, middle + 1, floor,
                    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                    tiles, tile, True,
                )  # fmt: skip
                if mass < target:
                    high = middle
                else:
                    low = middle + 1
            before = _row_from(
                logits, stride, width, spare, shift, ints, job, best, scale, low + 1, floor,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile, True,
            )  # fmt: skip
            first = _row_order_at(
                logits, stride, width, spare, ints, job, low, 1,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile,
            )  # fmt: skip
            x = value_of(first)
            each = tl.maximum(mass_of(x, scaled(x, best, scale), reach, shift), 1)
            cut = _row_order_at(
                logits, stride, width, spare, ints, job, low, (target - before + each - 1) // each,
                edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
                tiles, tile,
            )  # fmt: skip
    tl.store(cuts + job, cut)
    for number in range(tiles):
        ids = number * tile + tl.arange(0, tile)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        logs = scaled(x, best, scale)
        keep = (order_of(x, ids, width) >= cut) & (logs >= job_float(floats, job, FLOOR))
        mass = mass_of(x, logs, reach, shift)
        tl.store(kept + job * tiles + number, tl.sum(tl.where(keep, mass, 0), axis=0))
