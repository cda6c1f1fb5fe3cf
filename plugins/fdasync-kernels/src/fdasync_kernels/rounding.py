"""Rounding inside kernels, where a library's separate operations round: to a narrow dtype after each of them.

A fused kernel computes in float32 and keeps the library's bits by rounding at the same places. The device has an
instruction for it. Triton's interpreter cuts bfloat16 off instead of rounding to nearest, so there the bits are rounded
by hand. Used by the fused kernels beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """float32 values, rounded to the nearest of `dtype` (ties to even), as float32."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        # infinities and NaNs stay what they are
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits) & -65536
        return bits.to(tl.float32, bitcast=True)
    return value.to(dtype).to(tl.float32)
