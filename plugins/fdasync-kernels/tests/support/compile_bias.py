"""Compiles products with a bias for Hopper without one, each of one step of its inner dimension, and prints with what
each product's sum begins, a line for each kernel: run by `test_linear.py` as a process of its own, since tests in a
process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

from fdasync_kernels.experts import many
from fdasync_kernels.experts.kernels import experts_down, experts_gate_up
from fdasync_kernels.linear.kernel import linear_kernel
from fdasync_kernels.linear.many import linear_many_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

_COMMON: dict[str, Any] = {"BIASED": True, "WIDEN": False, "OVERLAP": False}
_TILE = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64, "INPUTS": 64}
_EXPERTS = {"TOPK": 2, "E": 4, "K": 64, "N": 64, "BM": 16, "BN": 16, "BK": 64, "COLUMNS": 4}
_FEW = {**_EXPERTS, "MASKED": False, "SINGLE": False, "TMA": False}
_MANY = {**_EXPERTS, "BM": 128, "BN": 64, "COLUMNS": 1}
_SILU = {"KIND": 0, "FORM": 0, "GATED": True}
_INT32 = dict.fromkeys(("order", "tiles", "live"), "*i32") | {"ids": "*i64"}
_FLOATS = dict.fromkeys(("x", "weight", "w", "bias", "out", "weights"), "*bf16") | {"alpha": "fp32", "limit": "fp32"}


def main() -> None:
    for swap in (False, True):
        _compile(linear_kernel, {**_TILE, "STAGES": 2, "EVEN": True, "SWAP": swap})
        _compile(experts_down, {**_FEW, "SWAP": swap})
        for paired in (False, True)[: 1 + swap]:
            _compile(experts_gate_up, {**_FEW, **_SILU, "SWAP": swap, "PAIRED": paired, "INTERLEAVED": False})
    rows = "tensordesc<bf16[64, 64]>"
    _compile(linear_many_kernel, {**_TILE, "PARTS": 1}, x=rows, weight=rows, out=rows)
    _compile(many.experts_gate_up_many, {**_MANY, **_SILU}, w="tensordesc<bf16[2, 64, 64]>")
    _compile(many.experts_down_many, _MANY, x="tensordesc<bf16[128, 64]>", w="tensordesc<bf16[1, 64, 64]>")


def _compile(kernel: Any, constants: dict[str, Any], **types: str) -> None:
    names = kernel.arg_names
    constants = {name: value for name, value in (_COMMON | constants).items() if name in names}
    known = _FLOATS | _INT32 | types
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else known.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    text = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ttir"]
    begins = []
    for first in re.findall(r"tt\.dot %[\w#]+, %[\w#]+, (%[\w#]+)", text):
        made = next(line for line in text.splitlines() if line.strip().startswith(f"{first} ="))
        begins += re.findall(r"arith.constant dense<(.*?)>", made) or [made]
    print(kernel.__name__, *begins)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
