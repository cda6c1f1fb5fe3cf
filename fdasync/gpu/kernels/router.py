"""The router kernel: softmax, top-k, renormalisation and the capture of the ids, in one launch.

A library routes by half a dozen small kernels a layer; this is one kernel. It writes the chosen ids into the capture
buffer while it has them in registers, so the cost of capturing cannot be measured. `write_ids` copies the ids of other
routers. Knows no models, steps or sequences. Called by `fdasync.gpu.capture`, by the plugins' fused routers and by
benchmarks. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_MOST_EXPERTS = 1024
_NARROW = (torch.bfloat16, torch.float16)
_CAPTURED = (torch.uint8, torch.int16)
_COPY_TOKENS = 64
_INTERPRETED_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _row_max(values, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, 1], or a scalar for a single row: a scalar has no layout, so no change of layout follows."""
    return tl.max(values) if rows == 1 else tl.max(values, axis=1, keep_dims=True)


@triton.jit  # type: ignore[untyped-decorator]
def _row_sum(values, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(values) if rows == 1 else tl.sum(values, axis=1, keep_dims=True)


# a model's strides never change; the alignment of a layer's place in the buffer differs from layer to layer
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["capture"])  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    logits,
    weights,
    ids,
    capture,
    num_tokens,
    logits_stride,
    capture_stride,
    num_experts: tl.constexpr,
    padded: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    renormalise: tl.constexpr,
    narrow: tl.constexpr,
    recorded: tl.constexpr,
    rows: tl.constexpr,
):
    """A program routes `rows` rows (tokens) by one warp."""
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    expert = tl.arange(0, padded)
    real = (expert < num_experts)[None, :]
    here = (row < num_tokens)[:, None]
    raw = tl.load(logits + row[:, None] * logits_stride + expert[None, :], mask=here & real, other=0.0)
    score = tl.where(real, raw.to(tl.float32), float("-inf"))
    top = _row_max(score, rows)
    total = _row_sum(tl.where(real, tl.exp(score - top), 0.0), rows)

    # A key orders by score, then by the lower id, so that a round is one integer maximum. Keys are made of the
    # logits: the softmax keeps their order, and rounds some that differ to the same. The key of a NaN is below every
    # number's, and the keys of chosen experts and of padding are below NaN's. So ids exist and do not repeat, whatever
    # the logits are.
    equal = tl.where(score == 0.0, 0.0, score)  # -0.0 ties with 0.0
    last = padded - 1 - expert[None, :]
    if narrow:
        # 16 bits of logit and 16 of id: one 32-bit maximum, for which the device has an instruction
        half = equal.to(raw.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        half = tl.where(half < 0, half ^ 0x7FFF, half)
        half = tl.where(score != score, -0x7FFF, half)
        key = half * 65536 + last
        gone = -0x80000000
        low = 0xFFFF
    else:
        whole = equal.to(tl.int32, bitcast=True)
        whole = tl.where(whole < 0, whole ^ 0x7FFFFFFF, whole)
        whole = tl.where(score != score, -0x7FFFFFFF, whole)
        key = whole.to(tl.int64) * 4294967296 + last.to(tl.int64)
        gone = -0x8000000000000000
        low = 0xFFFFFFFF
    key = tl.where(real, key, gone)
    slot = tl.arange(0, slots)[None, :]
    chosen = tl.zeros((rows, slots), dtype=tl.int32)
    for number in tl.static_range(top_k):
        best = padded - 1 - (_row_max(key, rows) & low).to(tl.int32)
        chosen = tl.where(slot == number, best, chosen)
        key = tl.where(expert[None, :] == best, gone, key)

    mask = here & (slot < top_k)
    picked = tl.load(logits + row[:, None] * logits_stride + chosen, mask=mask, other=0.0).to(tl.float32)
    picked = tl.where(mask, picked, top)
    share = tl.where(slot < top_k, tl.div_rn(tl.exp(picked - top), total), 0.0)
    if renormalise:
        share = tl.div_rn(share, _row_sum(share, rows))
    at = row[:, None] * top_k + slot
    tl.store(weights + at, share.to(weights.dtype.element_ty), mask=mask)
    tl.store(ids + at, chosen.to(ids.dtype.element_ty), mask=mask)
    if recorded:
        place = capture + row[:, None] * capture_stride + slot
        tl.store(place, chosen.to(capture.dtype.element_ty), mask=mask)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "token_stride", "slot_stride", "capture_stride"],
    do_not_specialize_on_alignment=["ids", "capture"],
)
def _write_ids_kernel(  # type: ignore[no-untyped-def]
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


def runs_on(device: torch.device) -> bool:
    """Whether these kernels run on tensors of a device: on CUDA, and anywhere under Triton's interpreter."""
    return device.type == "cuda" or not isinstance(_route_kernel, triton.runtime.JITFunction)


def route(
    logits: torch.Tensor,
    k: int,
    *,
    renormalise: bool,
    weights_dtype: torch.dtype,
    ids_dtype: torch.dtype = torch.int64,
    capture: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts of each token: softmax in float32, the k largest, renormalised if asked.

    Order: descending scores, the lowest id first among equal logits. A row with a NaN, or without a finite or with
    an infinite largest logit, gets NaN weights; its ids are still in range and unrepeated. No gradient. One launch
    on the current stream, without synchronising; may be captured in a CUDA graph. T compiles nothing anew.

    Args:
        logits: [T, E] float32, bfloat16 or float16, E at most 1024; rows may be strided, a row may not. Read.
        k: experts per token, 1 to E.
        renormalise: divide the weights by their sum, in float32.
        weights_dtype: of the weights returned; rounded once, at the end.
        ids_dtype: int64 or int32.
        capture: [T, at least k] uint8 or int16 (the bits of uint16), a view whose rows may be strided and whose
            columns may not: gets the ids too, columns from k on are left alone. None: no capture. Written when the
            stream reaches the launch; the caller's to keep until then.

    Returns:
        weights [T, k] and ids [T, k], new tensors on the logits' device.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= _MOST_EXPERTS:
        raise BadInput(
            "logits", f"shape {tuple(logits.shape)} where [tokens, experts] was expected", limit=_MOST_EXPERTS
        )
    tokens, experts = logits.shape
    if logits.dtype is not torch.float32 and logits.dtype not in _NARROW:
        raise BadInput("logits", f"{logits.dtype} is no dtype of logits")
    if experts > 1 and logits.stride(1) != 1:
        raise BadInput("logits", "the experts of a token do not lie beside each other")
    if not 1 <= k <= experts:
        raise BadInput("k", f"{k} experts per token", limit=experts)
    if ids_dtype not in (torch.int64, torch.int32):
        raise BadInput("ids_dtype", f"{ids_dtype} is neither int64 nor int32")
    if capture is not None:
        check_capture(capture, tokens, k)
    weights = torch.empty((tokens, k), dtype=weights_dtype, device=logits.device)
    ids = torch.empty((tokens, k), dtype=ids_dtype, device=logits.device)
    if not tokens:
        return weights, ids
    # on a device a warp takes one token: reductions stay in its registers, shared memory is not used, and one kernel
    # serves every T. In the interpreter the number of programs is the cost.
    rows = 1 if tokens == 1 or isinstance(_route_kernel, triton.runtime.JITFunction) else _INTERPRETED_ROWS
    grid: Any = (triton.cdiv(tokens, rows),)
    _route_kernel[grid](
        logits,
        weights,
        ids,
        # without capture any pointer does: that kernel has no instruction for it
        ids if capture is None else capture,
        tokens,
        # the stride of a single row may be anything in torch
        logits.stride(0) if tokens > 1 else experts,
        0 if capture is None else capture.stride(0),
        num_experts=experts,
        padded=triton.next_power_of_2(experts),
        top_k=k,
        slots=triton.next_power_of_2(k),
        renormalise=renormalise,
        narrow=logits.dtype in _NARROW,
        recorded=capture is not None,
        rows=rows,
        num_warps=1,
    )
    return weights, ids


def write_ids(ids: torch.Tensor, capture: torch.Tensor) -> None:
    """Copy ids that another router chose into a capture view: one launch, no synchronising; a graph can capture it.

    Args:
        ids: [T, k] int64 or int32, any strides. Read.
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


def check_capture(capture: torch.Tensor, tokens: int, k: int) -> None:
    """Raise BadInput unless `capture` can take the ids [tokens, k]."""
    if capture.dim() != 2 or capture.shape[0] != tokens or capture.shape[1] < k:
        raise BadInput("capture", f"shape {tuple(capture.shape)} where [{tokens}, at least {k}] was expected")
    if capture.dtype not in _CAPTURED:
        raise BadInput("capture", f"{capture.dtype} is neither uint8 nor int16")
    if capture.shape[1] > 1 and capture.stride(1) != 1:
        raise BadInput("capture", "the slots of a token do not lie beside each other")
