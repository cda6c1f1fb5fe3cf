"""The gate of dense layers, `act(gate) * up`, in one launch.

Rounds as torch does: the activation to the dtype, then the product. On a device it calls the exponentials and error
functions that torch is compiled with, so the bits are torch's. Knows no models. Called by the plugins' fused dense
layers and by benchmarks. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels import activation as functions
from fdasync_kernels.activation import function
from fdasync_kernels.layer.norm import as_rows
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]

KINDS: dict[Activation, int] = {kind: functions.KINDS[kind] for kind in get_args(Activation)}
_COLUMNS = 1024
_INTERPRETED_ROWS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    gate, up, out, num_rows, gate_stride, up_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = gate.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    here = (row < num_rows) & (column < WIDTH)
    value = tl.load(gate + row * gate_stride + column, mask=here, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + column, mask=here, other=0.0).to(tl.float32)
    active = function(value, DTYPE, KIND, True)
    if not WIDE:
        active = rounded(active, DTYPE)
    tl.store(out + row * WIDTH + column, rounded(active * other, DTYPE).to(DTYPE), mask=here)


def gated(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation = "silu", wide: bool = False) -> torch.Tensor:
    """`act(gate) * up`, with the activation rounded to the dtype, and then the product. One launch; no gradient.

    On the current stream, without synchronising; may be captured in a CUDA graph. The number of rows compiles nothing
    anew.

    Args:
        gate: [..., I] bfloat16, float16 or float32. Read.
        up: of the gate's shape and dtype. Read. Halves of one [..., 2I] are as good as tensors of their own; rows whose
            leading dimensions are no view of one are copied first.
        activation: "gelu" is the exact one, "relu2" the square of relu.
        wide: the activation is not rounded, only the product.

    Returns:
        A new contiguous tensor of the gate's shape and dtype.

    Raises:
        BadInput: shapes or dtypes that the kernel does not take.
    """
    if activation not in KINDS:
        raise BadInput("activation", f"{activation!r} is none of {', '.join(KINDS)}")
    if gate.dtype not in FLOATS or not gate.dim() or not gate.shape[-1]:
        raise BadInput("gate", f"{gate.dtype} {tuple(gate.shape)} where [..., columns] was expected")
    if up.shape != gate.shape or up.dtype is not gate.dtype:
        raise BadInput("up", f"{up.dtype} {tuple(up.shape)}, beside {gate.dtype} {tuple(gate.shape)}")
    return gated_unchecked(gate, up, KINDS[activation], wide)


@operation
def gated_unchecked(gate: torch.Tensor, up: torch.Tensor, kind: int, wide: bool = False) -> torch.Tensor:
    """`gated` for callers that know their tensors: `kind` is of `KINDS`, and nothing is checked."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    num_rows = gate.numel() // width
    if not num_rows:
        return out
    gate, gate_stride = as_rows(gate, num_rows, width)
    up, up_stride = as_rows(up, num_rows, width)
    device = isinstance(_gate_kernel, triton.runtime.JITFunction)
    # in the interpreter the number of programs is the cost
    rows = 1 if device else _INTERPRETED_ROWS
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    grid: Any = (-(-num_rows // rows), -(-width // columns))
    _gate_kernel[grid](
        gate,
        up,
        out,
        num_rows,
        gate_stride,
        up_stride,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        KIND=kind,
        WIDE=wide,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
