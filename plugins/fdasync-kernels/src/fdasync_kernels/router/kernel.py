"""The kernel of `route.py`: one program routes one token, from its logits to ids, weights and the captured row.

A `RouterRule` is compiled into it. All reductions stay within a warp, whose number of registers is fixed by the number
of experts, so a token's bits do not depend on how many run beside it. Knows no shapes to check. Called by `route.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.overlap import wait_for_inputs
from fdasync_kernels.router.select import (
    GONE,
    largest,
    nearest,
    open_groups,
    ordered,
    packed,
    rounded,
    row_max,
    row_sum,
)


@triton.jit
def score(values, top, total, like, SCORE: tl.constexpr, ROUNDED: tl.constexpr):
    """Scores of logits, each by itself; `top` and `total`: of the softmax of the row."""
    if SCORE == 0:
        return rounded(tl.div_rn(tl.exp(values - top), total), like, ROUNDED)
    elif SCORE == 1:
        # the exponential stays finite: a score is never 0, and a sum of scores neither
        power = tl.exp(tl.where(values < -88.0, 88.0, -values))
        return rounded(tl.div_rn(1.0, 1.0 + power), like, ROUNDED)
    else:
        power = tl.exp(tl.minimum(values, 20.0))
        more = 1.0 + power
        # log(1 + x) that is exact where 1 + x rounds
        log = tl.where(more == 1.0, power, tl.log(more) * tl.div_rn(power, tl.where(more == 1.0, 1.0, more - 1.0)))
        soft = rounded(tl.where(values > 20.0, values, log), like, ROUNDED)
        return rounded(tl.sqrt_rn(tl.where(values != values, values, soft)), like, ROUNDED)


# a model's strides never change; the alignment of a layer's place in the buffer differs from layer to layer
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["capture"])
def route_kernel(
    logits,
    bias,
    expert_scale,
    weights,
    ids,
    capture,
    num_tokens,
    logits_stride,
    capture_stride,
    NUM_GROUPS: tl.constexpr,
    NUM_EACH: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    OPEN: tl.constexpr,
    TWO: tl.constexpr,
    CLOSED_ARE_ZERO: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROUNDED_CHOICE: tl.constexpr,
    PACKED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    CLAMP_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    RECORDED: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program routes ROWS rows (tokens) by one warp. A place is an expert, or padding of its group."""
    wait_for_inputs(OVERLAP)
    WIDTH: tl.constexpr = GROUPS * EACH
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place = tl.arange(0, WIDTH)[None, :]
    expert = place // EACH * NUM_EACH + place % EACH
    real = (place % EACH < NUM_EACH) & (place // EACH < NUM_GROUPS)
    here = (row < num_tokens)[:, None]
    raw = tl.load(logits + row[:, None] * logits_stride + expert, mask=here & real, other=0.0).to(tl.float32)
    raw = tl.where(real, raw, float("-inf"))
    top = 0.0
    total = 1.0
    if SCORE == 0:
        top = row_max(raw, ROWS)
        total = row_sum(tl.where(real, tl.exp(raw - top), 0.0), ROWS)

    choice = raw if BY_LOGITS else score(raw, top, total, logits, SCORE, ROUNDED)
    if BIASED:
        more = tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
        choice = rounded(choice + more, logits, ROUNDED_CHOICE)
    able = real
    if OPEN < NUM_GROUPS:
        opened = open_groups(choice, real, logits, ROWS, GROUPS, EACH, NUM_GROUPS, OPEN, TWO, ROUNDED_CHOICE)
        if CLOSED_ARE_ZERO:
            choice = tl.where(opened, choice, 0.0)
        else:
            able = real & opened
    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((ROWS, SLOTS), dtype=tl.int32)
    key = tl.where(able, packed(choice, logits, WIDTH) if PACKED else ordered(choice), GONE)
    for number in tl.static_range(TOP_K):
        best = WIDTH - 1 - (row_max(key, ROWS) & 0xFFFF) if PACKED else largest(key, ROWS, WIDTH)
        chosen = tl.where(slot == number, best, chosen)
        key = tl.where(place == best, GONE, key)

    chosen = chosen // EACH * NUM_EACH + chosen % EACH
    mask = here & (slot < TOP_K)
    picked = tl.load(logits + row[:, None] * logits_stride + chosen, mask=mask, other=0.0).to(tl.float32)
    if SCORE == 3:
        top = row_max(tl.where(slot < TOP_K, picked, float("-inf")), ROWS)
        share = tl.where(slot < TOP_K, tl.exp(picked - top), 0.0)
        share = rounded(tl.div_rn(share, row_sum(share, ROWS)), logits, ROUNDED)
    else:
        share = tl.where(slot < TOP_K, score(picked, top, total, logits, SCORE, ROUNDED), 0.0)
    if RENORMALISE:
        sums = rounded(row_sum(share, ROWS), logits, ROUNDED)
        if CLAMP_SUM:
            sums = tl.maximum(sums, LEAST_SUM, propagate_nan=tl.PropagateNan.ALL)
        else:
            sums = rounded(sums + LEAST_SUM, logits, ROUNDED)
        share = rounded(tl.div_rn(share, sums), logits, ROUNDED)
    share = rounded(share * SCALE, logits, ROUNDED)
    if SCALED:
        share *= tl.load(expert_scale + chosen, mask=mask, other=0.0).to(tl.float32)
    at = row[:, None] * TOP_K + slot
    tl.store(weights + at, nearest(share, weights), mask=mask)
    tl.store(ids + at, chosen.to(ids.dtype.element_ty), mask=mask)
    if RECORDED:
        tl.store(capture + row[:, None] * capture_stride + slot, chosen.to(capture.dtype.element_ty), mask=mask)
