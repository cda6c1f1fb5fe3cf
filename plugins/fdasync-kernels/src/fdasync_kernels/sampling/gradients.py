"""Gradients of log-probs and entropies of tokens with respect to the logits: one pass, over the logits if wanted.

Takes the normalisers of `log_masses.py`, so the softmax is not summed again. Arithmetic is float64 up to the log-prob
and float32 behind it, in registers: no table in float32 is made. Knows no requests. Called by trainers' log-prob
functions; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fdasync_kernels.registry import operation
from fdasync_kernels.sampling.log_masses import place_of
from fdasync_kernels.sampling.tile import read_raw, scaled

if TYPE_CHECKING:
    from fdasync_kernels.sampling.log_masses import LogMasses

_TILE, _WARPS = 2048, 4


@triton.jit
def _gradients_kernel(
    logits, stride, width, into, into_stride, targets, scales, best, log_mass, weights, entropy, entropy_weights,
    tiles, tile: tl.constexpr,
):  # fmt: skip
    row, number = place_of(tl.program_id(0), tiles)
    ids = number * tile + tl.arange(0, tile)
    x = read_raw(logits, stride, row, ids, width)
    scale = tl.load(scales)
    log = (scaled(x, tl.load(best + row), scale) - tl.load(log_mass + row)).to(tl.float32)
    p = tl.exp(log)
    weight = tl.load(weights + row)
    gradient = tl.where(ids == tl.load(targets + row), weight, 0.0) - weight * p
    if entropy is not None:
        gradient -= tl.where(p > 0.0, tl.load(entropy_weights + row) * p * (log + tl.load(entropy + row)), 0.0)
    gradient *= scale.to(tl.float32)
    tl.store(into + row * into_stride + ids, gradient.to(into.dtype.element_ty), mask=ids < width)


@operation
def logit_gradients(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, masses: LogMasses, weights: torch.Tensor,
    entropy_weights: torch.Tensor | None, into: torch.Tensor,
) -> None:  # fmt: skip
    """Write the gradient of sum(weights * log-probs + entropy_weights * entropies) into `into`. One launch on the
    current stream; nothing is checked.

    Args:
        logits: [n, V], rows may be strided. Read.
        targets: int64 [n]; of one outside the vocabulary only the softmax has a gradient.
        scale, masses: what `log_masses` took and made; with entropies where there are `entropy_weights`.
        weights, entropy_weights: float32 [n].
        into: [n, V] of any float dtype, rows may be strided. May be `logits`. Written.
    """
    count, width = logits.shape
    if not count:
        return
    entropy = None
    if entropy_weights is not None and masses.entropy is not None:
        entropy, entropy_weights = masses.entropy.float().contiguous(), entropy_weights.contiguous()
    scales = torch.full((1,), scale, dtype=torch.float64, device=logits.device)
    tiles = triton.cdiv(width, _TILE)
    _gradients_kernel[(tiles * count,)](
        logits, logits.stride(0), width, into, into.stride(0), targets.contiguous(), scales,
        masses.best.contiguous(), masses.log_mass.contiguous(), weights.contiguous(), entropy, entropy_weights, tiles,
        tile=_TILE, num_warps=_WARPS,
    )  # fmt: skip
