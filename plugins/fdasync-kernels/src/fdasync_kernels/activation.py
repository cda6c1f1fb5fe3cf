"""Activations of values in registers, as a part of other kernels: one code for experts and for dense layers.

There are two ways to an exponential. EXACT kernels use the functions that torch is compiled with, in torch's order of
operations, so that the bits are torch's. The others use the device's own exponential, which is quicker and as good but
for float32's last places. Knows no products and no layouts. Used by `experts/activation.py` and `layer/gate.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fdasync_kernels.rounding import rounded

Kind = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]

#: codes of the kinds in the kernels
KINDS: dict[Kind, int] = {kind: code for code, kind in enumerate(get_args(Kind))}
# as constants of kernels
_SILU, _GELU, _GELU_TANH, _QUICK_GELU, _RELU, _RELU2, _SIGMOID = (tl.constexpr(code) for code in KINDS.values())
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _one_and_exp(value, EXACT: tl.constexpr):
    """1 + exp(-value), the denominator of a quotient."""
    if not EXACT:
        # exp does not overflow: past this bound the quotient is as good as 0
        return 1.0 + tl.exp(tl.minimum(-value, 88.0))
    if not _INTERPRETED:
        return 1.0 + libdevice.exp(-value)
    # numpy warns of what overflows
    largest: tl.constexpr = 88.72283
    return 1.0 + tl.where(-value > largest, float("inf"), tl.exp(tl.minimum(-value, largest)))


@triton.jit
def sigmoid(value, EXACT: tl.constexpr):
    """1 / (1 + exp(-value)) in float32."""
    return tl.div_rn(1.0, _one_and_exp(value, EXACT))


@triton.jit
def _over(value, whole):
    """value / whole, rounded once, for a whole from 1 on; of infinity over more than 1 a NaN, as torch's silu has it.

    The device's own division asks of each number whether it needs a slower way, and waits at each branch.
    """
    if _INTERPRETED:
        return tl.div_rn(value, whole)
    # not exact: two steps correct it, as the remainder of the first is exact; zeros keep their sign
    negative = -1.0 / whole
    other = value * -1.0
    result = other * negative
    result = tl.fma(tl.fma(whole, result, other), negative, result)
    result = tl.fma(tl.fma(whole, result, other), negative, result)
    return tl.where(whole == 1.0, value, result)


@triton.jit
def _tanh(value):
    if not _INTERPRETED:
        return libdevice.tanh(value)
    wide = value.to(tl.float64)
    far = tl.exp(-2.0 * tl.abs(wide))
    size = (1.0 - far) / (1.0 + far)
    return tl.where(wide < 0.0, -size, size).to(tl.float32)


@triton.jit
def _gelu_tanh(value, EXACT: tl.constexpr):
    if not EXACT:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        # tanh(z) = 2 sigmoid(2 z) - 1
        return value * sigmoid(2.0 * inner, EXACT)
    cube = value * value * value
    # torch's compiler contracts this sum on a device, and not on a CPU
    inner = value + 0.044715 * cube if _INTERPRETED else tl.fma(cube, 0.044715, value)
    return 0.5 * value * (1.0 + _tanh(0.7978845608028654 * inner))


@triton.jit
def function(value, dtype: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr):
    """f(value) of float32 values, in float32, not rounded at the end. "quick_gelu", for which torch has no operation,
    rounds to `dtype` inside.

    KIND: of `KINDS`. EXACT: see the module.
    """
    if KIND == _SILU:
        whole = _one_and_exp(value, EXACT)
        return tl.div_rn(value, whole) if EXACT else _over(value, whole)
    elif KIND == _GELU:
        return 0.5 * value * (1.0 + tl.math.erf(value * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        return _gelu_tanh(value, EXACT)
    elif KIND == _QUICK_GELU:
        return value * rounded(sigmoid(rounded(1.702 * value, dtype), EXACT), dtype)
    elif KIND == _SIGMOID:
        return sigmoid(value, EXACT)
    # NaN stays, as in torch
    positive = tl.where(value < 0.0, 0.0, value)
    return positive * positive if KIND == _RELU2 else positive
