"""Activations of gated experts, as a part of other kernels: kinds, forms, and their rounding.

An activation is a kind (of the gate, `activation.py`) and a form (how gate and up meet). Every operation is
rounded to the model's dtype where torch, which runs them one by one, rounds. Knows no products. Used by `chain.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from fdasync_kernels import activation as functions
from fdasync_kernels.activation import function, sigmoid
from fdasync_kernels.rounding import rounded

Kind = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
Form = Literal["plain", "wide", "clamped", "clamped_after", "swiglu_oai"]

#: codes in the kernels, of the kinds that experts have
KINDS: dict[Kind, int] = {kind: functions.KINDS[kind] for kind in get_args(Kind)}
_FORMS: dict[Form, int] = {"plain": 0, "wide": 1, "clamped": 2, "clamped_after": 3, "swiglu_oai": 4}


@dataclass(frozen=True)
class Activation:
    """What experts do between their products.

    Attributes:
        kind: of the function of the gate; of the only input where there is no gate. Passed over in "swiglu_oai".
        form: "plain": f(gate) * up. "wide": the same in float32, rounded once. "clamped": gate at most `limit`, up
            within it, before that. "clamped_after": f(gate) at most `limit`, up within it. "swiglu_oai":
            (up + 1) * gate * sigmoid(alpha * gate), clamped before.
        alpha: of "swiglu_oai".
        limit: of the clamped forms, above 0.
    """

    kind: Kind
    form: Form = "plain"
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def kind_code(self) -> int:
        """The kernels' KIND."""
        return KINDS[self.kind]

    @property
    def form_code(self) -> int:
        """The kernels' FORM."""
        return _FORMS[self.form]


@triton.jit
def activate(gate, up, alpha, limit, dtype: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr):
    """float32 sums of both products -> the activation, in `dtype`. Without GATED `up` is passed over."""
    gate = rounded(gate, dtype)
    if not GATED:
        return rounded(function(gate, dtype, KIND, False), dtype).to(dtype)
    else:
        up = rounded(up, dtype)
        if FORM == 2 or FORM == 4:
            # NaN stays, as in torch's clamp
            gate = tl.where(gate > limit, limit, gate)
        if FORM >= 2:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        if FORM == 4:
            part = rounded(gate * rounded(sigmoid(rounded(gate * alpha, dtype), False), dtype), dtype)
            return rounded(rounded(up + 1.0, dtype) * part, dtype).to(dtype)
        else:
            value = function(gate, dtype, KIND, False)
            if FORM != 1:
                value = rounded(value, dtype)
            if FORM == 3:
                value = tl.where(value > limit, limit, value)
            return rounded(value * up, dtype).to(dtype)


@triton.jit
def _experts_activation(
    rows, out, alpha, limit, count,
    WIDTH: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = rows + place
    step = 1
    if GATED:
        at = rows + place // WIDTH * 2 * WIDTH + (place % WIDTH * 2 if INTERLEAVED else place % WIDTH)
        step = 1 if INTERLEAVED else WIDTH
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + step, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, up, alpha, limit, out.dtype.element_ty, KIND, FORM, GATED)
    tl.store(out + place, value, mask=inside)


def activation_of(rows: torch.Tensor, activation: Activation, *, gated: bool, interleaved: bool) -> torch.Tensor:
    """The activation alone, by the code that the experts run: rows [n, 2I] (or [n, I]) -> [n, I]. For proofs.

    `rows` are contiguous, of a float dtype, on a device that kernels run on; the result is new, in their dtype.
    """
    width = rows.shape[1] // 2 if gated else rows.shape[1]
    out = torch.empty((rows.shape[0], width), dtype=rows.dtype, device=rows.device)
    _experts_activation[(triton.cdiv(out.numel(), 1024),)](
        rows, out, activation.alpha, activation.limit, out.numel(),
        WIDTH=width, KIND=activation.kind_code, FORM=activation.form_code, GATED=gated, INTERLEAVED=interleaved,
        BLOCK=1024,
    )  # fmt: skip
    return out
