"""The norm behind a recurrence: each head's RMSNorm, times a weight, times the SiLU of a gate.

One launch for what a library does in nine. Values are rounded to their dtype where the library rounds. Knows no models.
Called by the plugins' GPU runners. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

_ELEMENTS = 1024


@triton.jit(do_not_specialize=["heads_in_all"])
def _norm_kernel(
    x, gate, weight, out, heads_in_all, eps, gate_row, gate_group,
    heads: tl.constexpr, group: tl.constexpr, values: tl.constexpr, rows: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    number = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    row, head = number // heads, number % heads
    cell = tl.arange(0, cells)[None, :]
    here = (number < heads_in_all) & (cell < values)
    one = tl.load(x + number * values + cell, mask=here, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(one * one, axis=1, keep_dims=True), values + 0.0)
    one = rounded(one * tl.rsqrt(mean + eps), DTYPE)
    one = rounded(one * tl.load(weight + cell, mask=cell < values, other=0.0).to(tl.float32), DTYPE)
    at = row * gate_row + head // group * gate_group + head % group * values + cell
    z = tl.load(gate + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + number * values + cell, rounded(one * (z / (1.0 + tl.exp(-z))), DTYPE).to(DTYPE), mask=here)


@operation
def norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`silu(gate.float()) * (weight * rms_norm(x))`, head by head; one launch, capturable.

    Args:
        x: [T, H, V], contiguous.
        gate: [T, G, H / G * V] of x's dtype, side by side in the last dimension.
        weight: [V], contiguous, of x's dtype.
        eps: added to the mean of the squares.

    Returns:
        [T, H * V].

    Raises:
        BadInput: another shape or dtype.
    """
    if x.dim() != 3 or not x.is_contiguous():
        raise BadInput("x", f"{tuple(x.shape)} where contiguous heads were expected")
    rows, heads, values = x.shape
    groups = gate.shape[1] if gate.dim() == 3 else 0
    if not groups or heads % groups or tuple(gate.shape) != (rows, groups, heads // groups * values):
        raise BadInput("gate", f"{tuple(gate.shape)} for {tuple(x.shape)}")
    if gate.stride(2) != 1 or gate.dtype is not x.dtype:
        raise BadInput("gate", f"{gate.dtype} of strides {gate.stride()} for {x.dtype}")
    if tuple(weight.shape) != (values,) or weight.dtype is not x.dtype or not weight.is_contiguous():
        raise BadInput("weight", f"{weight.dtype} {tuple(weight.shape)} for {x.dtype} heads of {values}")
    out = torch.empty((rows, heads * values), dtype=x.dtype, device=x.device)
    if rows:
        cells = triton.next_power_of_2(values)
        each = max(1, _ELEMENTS // cells)
        grid: Any = (triton.cdiv(rows * heads, each),)
        _norm_kernel[grid](
            x, gate, weight, out, rows * heads, eps, gate.stride(0), gate.stride(1),
            heads=heads, group=heads // groups, values=values, rows=each, cells=cells, num_warps=4,
        )  # fmt: skip
    return out
