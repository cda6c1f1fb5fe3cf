"""Dense products whose inner dimension is cut into slices: each rounded as a product of its own, joined in one tree.

So a sum that the ranks of a group share has the same bits at any number of ranks: what several ranks would compute,
one computes slice by slice. Knows no ranks. Called by the plugins' sums in slices. Runs on CUDA, or on the CPU under
Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.linear.product import batched
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import operation

_BLOCK = 1024


@operation
def linear_slices(x: torch.Tensor, weight: torch.Tensor, slices: int) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T, K cut into slices that each have the bits of `linear`; their sum, float32 [T, N].

    The slices are added in float32 as a tree of neighbours, (0 + 1) + (2 + 3), and the sum is not rounded. Two launches
    on the current stream, without synchronising; may be captured in a CUDA graph. No gradient.

    Args:
        x: bfloat16, float16 or float32; rows may be strided, a row may not. Read.
        weight: of the same dtype; its rows are contiguous. Read.
        slices: 2 or 4; they divide K.

    Returns:
        float32 [T, N], new, the caller's.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise BadInput("weight", f"{tuple(weight.shape)} beside rows {tuple(x.shape)}")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise BadInput("x", f"strides {x.stride()}, of a weight {weight.stride()}: rows are contiguous")
    rows, inputs = x.shape
    if slices not in (2, 4) or inputs % slices:
        raise BadInput("slices", f"{slices} of {inputs} inputs", limit="2 or 4 that divide them")
    outputs, each = len(weight), inputs // slices
    out = torch.empty((rows, outputs), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    # views: a row of x is contiguous, and so is one of the weight
    left = x.as_strided((slices, rows, each), (each, x.stride(0), 1), x.storage_offset())
    right = weight.as_strided((slices, each, outputs), (each, 1, weight.stride(0)), weight.storage_offset())
    parts = batched(left, right)
    grid: Any = (triton.cdiv(out.numel(), _BLOCK),)
    _join[grid](parts, out, out.numel(), SLICES=slices, BLOCK=_BLOCK, num_warps=4, **overlap(x.device))
    return out


@triton.jit
def _join(parts, out, count, SLICES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    apart = tl.cast(count, tl.int64)
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(parts + apart + at, mask=inside, other=0.0).to(tl.float32)
    if SLICES == 4:
        third = tl.load(parts + 2 * apart + at, mask=inside, other=0.0).to(tl.float32)
        total += third + tl.load(parts + 3 * apart + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=inside)
