"""The fixed order of attention: the bits of a query's output depend on its query and its keys alone.

Every kernel that is asked for it (decode, prefill, chunks, packed sequences, in a graph or not) does this, and shares
the steps below; which queries run beside it, rows and warps of a tile, and how programs share the keys change no bit:

- Keys are cut into tiles of `Grain.keys`, and tiles into parts of `Grain.part`, at absolute positions: a window or a
  chunk begins with the tile of its first key, whose earlier keys are masked.
- Logits are one product over the head's dimensions in order, in float32, not scaled. `weigh` takes a tile of them: the
  part's largest scaled logit (base 2) so far, the tile's weights 2 ** fma(logit, scale, -largest), rounded to the
  values' type, and what earlier sums shrink by. The sums of weights (a product with ones: no order that a layout of
  registers could change) and of weighted values shrink, then take the tile's product.
- A part starts from nothing, and `join` takes it into what all parts before it gave, in order of the parts. A product
  that an addition follows is a fused one by name: or a compiler may fuse it in one kernel and not in another.
- `finish` takes the sink, where a layer has one, and divides.

A tile or part in which a query sees nothing changes nothing: the largest logit stays, weights are 0, sums shrink by 1.
Knows numbers; knows no tables and no programs. Called by the kernels beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Grain:
    """Where the fixed order cuts a sequence's keys.

    Attributes:
        keys: of a tile, a power of two of at least 16.
        part: keys of a part, a multiple of `keys`.
    """

    keys: int
    part: int


def grain_of(key_dim: int, dtype: torch.dtype) -> Grain:
    """The grain for heads of this size, whatever the layer: one choice for all kernels, or their bits would differ.

    Few sequences have as many programs as parts: small parts make one sequence quicker and, as each is joined, many
    keys of several slower. At 128 dimensions, parts of 512 keys held one sequence back on an H200, and parts of 128
    long contexts.
    """
    if dtype == torch.float32:
        return Grain(16 if key_dim > 64 else 32, 512)
    return Grain(64, 256) if key_dim <= 128 else Grain(32, 512)


def most_parts(max_context: int, reach: int | None, grain: Grain) -> int:
    """Parts in which a query can see keys, at most: `reach` keys side by side, or all (None)."""
    parts = triton.cdiv(max_context, grain.part)
    if reach is not None:
        # a reach may begin in the middle of a part
        parts = min(parts, triton.cdiv(reach - 1, grain.part) + 1)
    return int(max(1, parts))


@triton.jit
def weigh(logits, best, scale):
    """A part's largest scaled logit so far, the tile's weights (float32), and what sums before it shrink by."""
    above = tl.maximum(best, tl.max(logits, 1) * scale)
    # a row that has seen nothing yet: -inf less -inf would be NaN
    base = tl.where(above == float("-inf"), 0.0, above)
    weights = tl.math.exp2(tl.fma(logits, scale, -base[:, None]))
    return above, weights, tl.math.exp2(best - base)


@triton.jit
def join(best, total, sums, peak, weight, part):
    """Takes one more part into those before it: largest logit [M], sum of weights [M], weighted values [M, D]."""
    above = tl.maximum(best, peak)
    base = tl.where(above == float("-inf"), 0.0, above)
    keep = tl.math.exp2(best - base)
    grow = tl.math.exp2(peak - base)
    total = tl.fma(total, keep, weight * grow)
    sums = tl.fma(sums, keep[:, None], part * grow[:, None])
    return above, total, sums


@triton.jit
def finish(best, total, sums, sinks, head, inside, SINKS: tl.constexpr):
    """The output in float32, of all parts; rows outside become zeros."""
    total = tl.where(inside, total, 1.0)
    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.where(inside, best, 0.0)
        above = tl.maximum(best, sink * 1.4426950408889634)
        keep = tl.math.exp2(best - above)
        total = tl.fma(total, keep, tl.math.exp2(tl.fma(sink, 1.4426950408889634, -above)))
        share = keep / total
    else:
        share = 1.0 / total
    # the last addition makes one zero of both
    return tl.fma(sums, share[:, None], 0.0)
