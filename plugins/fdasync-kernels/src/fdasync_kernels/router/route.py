"""Routing in one launch: scores, selection, weights and the capture of the ids.

A library routes by half a dozen small kernels a layer; this is one kernel. It writes the chosen ids into the capture
buffer while it has them in registers, so the cost of capturing cannot be measured. A `RouterRule` says what is computed
and is compiled into the kernel. `write_ids` copies the ids of other routers. Knows no models, steps or sequences.
Called by `fdasync.gpu.capture`, by the plugins' fused routers and by benchmarks. Runs on CUDA, or on the CPU under
Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.limits import FLOATS, MOST_EXPERTS, NARROW
from fdasync_kernels.overlap import overlap
from fdasync_kernels.registry import operation
from fdasync_kernels.router.kernel import route_kernel
from fdasync_kernels.router.rule import SCORE_CODES, RouterRule

_CAPTURED = (torch.uint8, torch.int16)
_COPY_TOKENS = 64
_INTERPRETED_ROWS = 256
SOFTMAX = RouterRule()


@triton.jit(
    do_not_specialize=["num_tokens", "token_stride", "slot_stride", "capture_stride"],
    do_not_specialize_on_alignment=["ids", "capture"],
)
def _write_ids_kernel(
    ids,
    capture,
    num_tokens,
    token_stride,
    slot_stride,
    capture_stride,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    tokens: tl.constexpr,
):
    token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)[:, None]
    slot = tl.arange(0, slots)[None, :]
    mask = (token < num_tokens) & (slot < top_k)
    found = tl.load(ids + token * token_stride + slot * slot_stride, mask=mask, other=0)
    tl.store(capture + token * capture_stride + slot, found.to(capture.dtype.element_ty), mask=mask)


@operation
def route(
    logits: torch.Tensor,
    k: int,
    rule: RouterRule = SOFTMAX,
    *,
    weights_dtype: torch.dtype,
    ids_dtype: torch.dtype = torch.int64,
    bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    capture: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts of each token and weigh them.

    Order: descending by what the selection compares, the lowest id first among equals; groups alike. A row whose
    logits or bias hold a NaN, or whose weights have no finite sum, may get NaN weights; its ids are still in range and
    unrepeated. No gradient. One launch on the current stream, without synchronising; may be captured in a CUDA graph.
    T compiles nothing anew; a row's bits do not depend on T.

    Args:
        logits: [T, E] float32, bfloat16 or float16, E at most 1024; rows may be strided, a row may not. Read.
        k: experts per token, 1 to E.
        rule: how ids and weights follow from logits.
        weights_dtype: of the weights returned; rounded once, at the end.
        ids_dtype: int64 or int32.
        bias: E values, contiguous, of any float dtype: added for the selection alone. None: none. Read.
        expert_scale: E values alike, the last factor of the weights of each expert. None: none. Read.
        capture: [T, at least k] uint8 or int16 (the bits of uint16), a view whose rows may be strided and whose
            columns may not: gets the ids too, columns from k on are left alone. None: no capture. Written when the
            stream reaches the launch; the caller's to keep until then.

    Returns:
        weights [T, k] and ids [T, k], new tensors on the logits' device.

    Raises:
        BadInput: shapes, strides, dtypes or a rule that the kernel does not take.
    """
    check_logits(logits, k)
    tokens, experts = logits.shape
    rule.check(experts, k)
    if ids_dtype not in (torch.int64, torch.int32):
        raise BadInput("ids_dtype", f"{ids_dtype} is neither int64 nor int32")
    for name, each in (("bias", bias), ("expert_scale", expert_scale)):
        if each is not None and (each.numel() != experts or not each.is_contiguous()):
            raise BadInput(name, f"shape {tuple(each.shape)} where one value for each of {experts} was expected")
    if capture is not None:
        check_capture(capture, tokens, k, experts)
    weights = torch.empty((tokens, k), dtype=weights_dtype, device=logits.device)
    ids = torch.empty((tokens, k), dtype=ids_dtype, device=logits.device)
    if not tokens:
        return weights, ids
    groups = rule.groups if rule.grouped else 1
    narrow = logits.dtype in NARROW
    rows = rows_of_program(tokens)
    grid: Any = (triton.cdiv(tokens, rows),)
    route_kernel[grid](
        logits,
        # where there is none any pointer does: that kernel has no instruction for it
        ids if bias is None else bias,
        ids if expert_scale is None else expert_scale,
        weights,
        ids,
        ids if capture is None else capture,
        tokens,
        # the stride of a single row may be anything in torch
        logits.stride(0) if tokens > 1 else experts,
        0 if capture is None else capture.stride(0),
        NUM_GROUPS=groups,
        NUM_EACH=experts // groups,
        GROUPS=triton.next_power_of_2(groups),
        EACH=triton.next_power_of_2(experts // groups),
        OPEN=rule.open_groups if rule.grouped else 1,
        TWO=rule.group_score == "two_largest",
        CLOSED_ARE_ZERO=rule.closed == "zero",
        TOP_K=k,
        SLOTS=triton.next_power_of_2(k),
        SCORE=SCORE_CODES[rule.score],
        BY_LOGITS=rule.by_logits,
        BIASED=bias is not None,
        ROUNDED=rule.rounded and narrow,
        ROUNDED_CHOICE=rule.rounded and narrow and (bias is None or bias.dtype == logits.dtype),
        PACKED=rule.by_logits and bias is None and narrow,
        RENORMALISE=rule.renormalise,
        LEAST_SUM=rule.least_sum,
        CLAMP_SUM=rule.clamp_sum,
        SCALE=rule.scale,
        SCALED=expert_scale is not None,
        RECORDED=capture is not None,
        ROWS=rows,
        num_warps=1,
        **overlap(logits.device),
    )
    return weights, ids


def rows_of_program(tokens: int) -> int:
    """Rows of one program: on a device a warp takes one token, so reductions stay in its registers and one kernel
    serves every T; in the interpreter the number of programs is the cost."""
    if isinstance(route_kernel, triton.runtime.JITFunction):
        return 1
    return int(min(triton.next_power_of_2(tokens), _INTERPRETED_ROWS))


def check_logits(logits: torch.Tensor, k: int) -> None:
    """Raise BadInput unless k experts can be chosen by these logits."""
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise BadInput(
            "logits", f"shape {tuple(logits.shape)} where [tokens, experts] was expected", limit=MOST_EXPERTS
        )
    if logits.dtype not in FLOATS:
        raise BadInput("logits", f"{logits.dtype} is no dtype of logits")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise BadInput("logits", "the experts of a token do not lie beside each other")
    if not 1 <= k <= logits.shape[1]:
        raise BadInput("k", f"{k} experts per token", limit=logits.shape[1])


def write_ids(ids: torch.Tensor, capture: torch.Tensor) -> None:
    """Copy ids that another router chose into a capture view: one launch, no synchronising; a graph can capture it.

    Args:
        ids: [T, k] int64 or int32, any strides; of wide ones the low bits are kept, so they must fit. Read.
        capture: [T, at least k], as in `route`. Columns from k on are left alone.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.shape[1]:
        raise BadInput("ids", f"{ids.dtype} {tuple(ids.shape)} where int64 or int32 [tokens, k] was expected")
    tokens, k = ids.shape
    check_capture(capture, tokens, k)
    if not tokens:
        return
    grid: Any = (triton.cdiv(tokens, _COPY_TOKENS),)
    _write_ids_kernel[grid](
        ids,
        capture,
        tokens,
        ids.stride(0),
        ids.stride(1),
        capture.stride(0),
        top_k=k,
        slots=triton.next_power_of_2(k),
        tokens=_COPY_TOKENS,
        num_warps=2,
    )


def check_capture(capture: torch.Tensor, tokens: int, k: int, experts: int = 0) -> None:
    """Raise BadInput unless `capture` can take the ids [tokens, k] of so many experts (0: the caller knows)."""
    if capture.dim() != 2 or capture.shape[0] != tokens or capture.shape[1] < k:
        raise BadInput("capture", f"shape {tuple(capture.shape)} where [{tokens}, at least {k}] was expected")
    if capture.dtype not in _CAPTURED:
        raise BadInput("capture", f"{capture.dtype} is neither uint8 nor int16")
    if experts > 1 << 8 * capture.element_size():
        raise BadInput("capture", f"ids of {experts} experts do not fit {capture.dtype}")
    if capture.shape[1] > 1 and capture.stride(1) != 1:
        raise BadInput("capture", "the slots of a token do not lie beside each other")
