"""The passes of the sampler: peaks of chunks, masses of tiles, the draw, and the ids of single chunks.

Each reads the logits of a job in tiles; `tile.py` says how, and what a mass and an order are. Knows no requests.
Launched by `sample.py`; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.sampling.tile import (
    DRAWN,
    FLOOR,
    MASS,
    NOISE,
    NOTHING,
    RAW,
    ROW,
    SCALE,
    best_of,
    id_of,
    job_float,
    job_int,
    log_of_mass,
    mass_of,
    order_of,
    reach_of,
    read_tile,
    scaled,
    top_k_of,
)


@triton.jit(do_not_specialize=["mask_columns"])
def peaks_kernel(
    logits, stride, width, ints, chunk_best, tile_best, tile_given,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, chunks: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The largest logits of a tile and, with their places, of its chunks; and the largest as given, +inf for NaN.

    A chunk's largest has the place of the chunk's first id: so equal ones are in the order of their ids too.
    """
    job = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0)
    line = tl.arange(0, chunks)
    ids = number * (chunks * chunk) + line[:, None] * chunk + tl.arange(0, chunk)[None, :]
    raw, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    best = tl.max(x, axis=1)
    order = order_of(best, number * (chunks * chunk) + line * chunk, width)
    tl.store(chunk_best + (job * tiles + number) * chunks + line, order)
    tl.store(tile_best + job * tiles + number, tl.max(best, axis=0))
    # over all at once: each thread begins with its own
    tl.store(tile_given + job * tiles + number, tl.max(tl.where(raw != raw, float("inf"), raw)))


@triton.jit(do_not_specialize=["mask_columns"])
def masses_kernel(
    logits, stride, width, shift, ints, floats, tile_best, bounds, total, above, kept, marks,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, filtered: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Masses of a tile: all; above the bounds of a cut; above the bounds and kept by min-p. And marks: a bit for each
    id between the bounds."""
    job = tl.program_id(1).to(tl.int64)
    if job_int(ints, job, MASS) == 0:
        return
    number = tl.program_id(0)
    best = best_of(tile_best, job, tiles, padded)
    scale = job_float(floats, job, SCALE)
    floor = job_float(floats, job, FLOOR)
    reach = reach_of(best, scale)
    summed = True
    low, high = float("inf"), float("-inf")
    if filtered:
        # a top-k's masses are its list's
        summed = (top_k_of(ints, job, width) == 0) | (job_int(ints, job, RAW) == job)
        low = tl.load(bounds + job * 2)
        high = tl.load(bounds + job * 2 + 1)
    whole = tl.full((), 0, tl.int64)
    over = tl.full((), 0, tl.int64)
    some = tl.full((), 0, tl.int64)
    for start in range(0, tile, block):
        ids = number * tile + start + tl.arange(0, block)
        _, x = read_tile(
            logits, stride, width, ints, job, ids,
            edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
        )  # fmt: skip
        if summed:
            logs = scaled(x, best, scale)
            mass = mass_of(x, logs, reach, shift)
            whole += tl.sum(mass, axis=0)
            if filtered:
                mass = tl.where(x >= high, mass, 0)
                over += tl.sum(mass, axis=0)
            if floor > float("-inf"):
                some += tl.sum(tl.where(logs >= floor, mass, 0), axis=0)
        if filtered:
            between = (x >= low) & (x < high)
            bits = tl.reshape(between.to(tl.int32), (block // 8, 8)) << tl.arange(0, 8)[None, :]
            byte = (job * tiles + number) * (tile // 8) + start // 8 + tl.arange(0, block // 8)
            tl.store(marks + byte, tl.sum(bits, axis=1).to(tl.uint8))
    at = job * tiles + number
    tl.store(total + at, whole)
    if filtered:
        tl.store(above + at, over)
        whole = over
    if floor > float("-inf"):
        whole = some
    tl.store(kept + at, whole)


@triton.jit(do_not_specialize=["mask_columns"])
def draw_kernel(
    logits, stride, width, shift, ints, floats, tile_best, tile_given, total, kept, cuts,
    tokens, finite, raws, processed,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    tiles, padded: tl.constexpr, filtered: tl.constexpr, chunks: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The token of a row: inverse CDF over ascending ids, by whole numbers; and its log-probs."""
    job = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded)
    given = tl.load(tile_given + job * tiles + number, mask=number < tiles, other=float("-inf"))
    largest = tl.max(given, axis=0)
    tl.store(finite + job, (largest > float("-inf")) & (largest < float("inf")))
    peaks = tl.load(tile_best + job * tiles + number, mask=number < tiles, other=float("-inf"))
    best = tl.max(peaks, axis=0)
    scale = job_float(floats, job, SCALE)
    mass = tl.load(kept + job * tiles + number, mask=number < tiles, other=0)
    whole = tl.sum(mass, axis=0)
    drawn = (job_int(ints, job, DRAWN) > 0) & (whole > 0)
    # below the sum, whatever the product rounds to
    left = tl.minimum((job_float(floats, job, NOISE) * whole.to(tl.float64)).to(tl.int64), whole - 1)
    at = tl.sum((tl.cumsum(mass, axis=0) <= left).to(tl.int32), axis=0)
    left -= tl.sum(tl.where(number < at, mass, 0), axis=0)
    if drawn == 0:
        # the first of the largest
        at = tl.min(tl.where((peaks == best) & (number < tiles), number, tiles - 1), axis=0)
    line = tl.arange(0, chunks)
    column = tl.arange(0, chunk)
    ids = at * (chunks * chunk) + line[:, None] * chunk + column[None, :]
    _, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    if drawn:
        logs = scaled(x, best, scale)
        keep = logs >= job_float(floats, job, FLOOR)
        if filtered:
            keep = keep & (order_of(x, ids, width) >= tl.load(cuts + job))
        cell = tl.where(keep, mass_of(x, logs, reach_of(best, scale), shift), 0)
        lines = tl.sum(cell, axis=1)
        in_line = tl.sum((tl.cumsum(lines, axis=0) <= left).to(tl.int32), axis=0)
        left -= tl.sum(tl.where(line < in_line, lines, 0), axis=0)
        own = tl.sum(tl.where(line[:, None] == in_line, cell, 0), axis=0)
        in_column = tl.sum((tl.cumsum(own, axis=0) <= left).to(tl.int32), axis=0)
        token = at * (chunks * chunk) + in_line * chunk + in_column
        value = tl.sum(tl.sum(tl.where(ids == token, x, 0.0), axis=1), axis=0)
        log = scaled(value, best, scale)
    else:
        token = tl.min(tl.min(tl.where(x == best, ids, width - 1), axis=1), axis=0)
        log = tl.full((), 0.0, tl.float64)
    # of a row that is not finite it may be anything
    token = tl.maximum(tl.minimum(token, width - 1), 0)
    tl.store(tokens + job, token.to(tl.int64))
    tl.store(processed + job, log - log_of_mass(whole, shift))
    raw_job = job_int(ints, job, RAW)
    if raw_job >= 0:
        first = best_of(tile_best, raw_job, tiles, padded).to(tl.float64)
        mass = tl.load(total + raw_job * tiles + number, mask=number < tiles, other=0)
        own = tl.load(logits + job_int(ints, job, ROW) * stride + token).to(tl.float64)
        scored = own - first - log_of_mass(tl.sum(mass, axis=0), shift)
        tl.store(raws + job, scored.to(tl.float32))


@triton.jit(do_not_specialize=["mask_columns", "columns"])
def chunk_kernel(
    logits, stride, width, ints, jobs, picked, into,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
    columns, chunk: tl.constexpr,
):  # fmt: skip
    """The orders of all ids of a chunk, named by the order of its largest."""
    asked = tl.program_id(0).to(tl.int64)
    job = tl.load(jobs + asked)
    best = tl.load(picked + asked * columns + tl.program_id(1))
    column = tl.arange(0, chunk)
    ids = id_of(best) // chunk * chunk + column
    _, x = read_tile(
        logits, stride, width, ints, job, ids,
        edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain,
    )  # fmt: skip
    # a chunk without ids has no place of its own
    order = tl.where(best == NOTHING, NOTHING, order_of(x, ids, width))
    tl.store(into + (asked * columns + tl.program_id(1)) * chunk + column, order)
