"""A router whose slots are chosen one after the other, each with a softmax of its own (PhiMoE's sparse mixer).

A slot takes the expert of the largest logit that no slot before it took. Its weight is a softmax over the experts that
are left and whose logits are near the largest. Knows no models. Called by the plugins' fused routers. Runs on CUDA, or
on the CPU under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync_kernels.registry import operation
from fdasync_kernels.router.route import check_capture, check_logits, rows_of_program
from fdasync_kernels.router.select import GONE, largest, nearest, ordered, rounded, row_max, row_sum


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["capture"])
def _in_turn_kernel(
    logits,
    weights,
    ids,
    capture,
    num_tokens,
    logits_stride,
    capture_stride,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NEAR: tl.constexpr,
    RECORDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program routes ROWS rows (tokens) by one warp."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.arange(0, WIDTH)[None, :]
    here = row < num_tokens
    raw = tl.load(logits + row * logits_stride + expert, mask=here & (expert < NUM_EXPERTS), other=1.0)
    raw = tl.where(expert < NUM_EXPERTS, raw.to(tl.float32), float("-inf"))
    key = tl.where(expert < NUM_EXPERTS, ordered(raw), GONE)
    for slot in tl.static_range(TOP_K):
        best = largest(key, ROWS, WIDTH)
        left = key != GONE
        top = row_max(tl.where(left, raw, float("-inf")), ROWS)
        # each operation rounds as the library's does
        gap = rounded(tl.where(left, top - raw, 0.0), logits, True)
        # no gap is near, without a division of 0 by 0
        span = tl.where(gap == 0.0, 1.0, tl.maximum(tl.abs(raw), top))
        far = rounded(tl.div_rn(gap, span), logits, True) > NEAR
        power = tl.where(left & (far == 0), tl.exp(raw - top), 0.0)
        weight = tl.div_rn(row_max(tl.where(expert == best, power, 0.0), ROWS), row_sum(power, ROWS))
        key = tl.where(expert == best, GONE, key)
        at = row * TOP_K + slot
        # [ROWS, 1] of a scalar too
        chosen = tl.zeros((ROWS, 1), dtype=tl.int32) + best
        tl.store(weights + at, nearest(tl.zeros((ROWS, 1), dtype=tl.float32) + weight, weights), mask=here)
        tl.store(ids + at, chosen.to(ids.dtype.element_ty), mask=here)
        if RECORDED:
            tl.store(capture + row * capture_stride + slot, chosen.to(capture.dtype.element_ty), mask=here)


@operation
def route_in_turn(
    logits: torch.Tensor, k: int, near: float, capture: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts of each token, one slot after the other.

    A logit counts in the softmax of a slot where (largest - logit) / max(|logit|, largest) is at most `near`. Weights
    are not renormalised. A row with a NaN or an infinite logit may get NaN weights; its ids are in range and
    unrepeated. No gradient; one launch, without synchronising; a graph can capture it; bits do not depend on T.

    Args:
        logits: [T, E], as in `route`. Read.
        k: experts per token, 1 to E.
        near: see above; compared after it was rounded to the dtype of the logits.
        capture: as in `route`.

    Returns:
        weights [T, k] of the dtype of the logits and ids [T, k] int64, new tensors.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    check_logits(logits, k)
    tokens, experts = logits.shape
    if capture is not None:
        check_capture(capture, tokens, k, experts)
    weights = torch.empty((tokens, k), dtype=logits.dtype, device=logits.device)
    ids = torch.empty((tokens, k), dtype=torch.int64, device=logits.device)
    if tokens:
        rows = rows_of_program(tokens)
        grid: Any = (triton.cdiv(tokens, rows),)
        _in_turn_kernel[grid](
            logits,
            weights,
            ids,
            ids if capture is None else capture,
            tokens,
            logits.stride(0) if tokens > 1 else experts,
            0 if capture is None else capture.stride(0),
            NUM_EXPERTS=experts,
            WIDTH=triton.next_power_of_2(experts),
            TOP_K=k,
            # of a tensor on the host: it waits for no device
            NEAR=torch.tensor(near, dtype=logits.dtype).item(),
            RECORDED=capture is not None,
            ROWS=rows,
            num_warps=1,
        )
    return weights, ids
