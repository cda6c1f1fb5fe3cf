"""Compiles products with a bias for Hopper without one, and prints with what each product's sum begins: run by
`test_linear.py` as a process of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from fdasync.gpu.kernels.linear.kernel import linear_kernel

_TILE = {"ROWS": 16, "COLUMNS": 16, "DEPTH": 64, "STAGES": 2}


def main() -> None:
    for swap in (False, True):
        constants: dict[str, Any] = {**_TILE, "INPUTS": 64, "EVEN": True, "BIASED": True, "WIDEN": False, "SWAP": swap}
        constants["OVERLAP"] = False
        names = linear_kernel.arg_names
        pointers = dict.fromkeys(("x", "weight", "bias", "out"), "*fp32")
        source = ASTSource(
            linear_kernel,
            {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )
        text = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ttir"]
        (first,) = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", text)
        made = next(line for line in text.splitlines() if line.strip().startswith(f"{first} ="))
        print(*re.findall(r"arith.constant dense<(.*?)>", made) or [made])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
