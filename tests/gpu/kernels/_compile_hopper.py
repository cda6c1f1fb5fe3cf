"""Compiles Hopper's prefill kernel without a GPU and prints what it takes: run by `test_prefill_hopper.py` as a process
of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fdasync.gpu.kernels.attention import prefill_hopper


def main(dim: int, reach: int) -> None:
    kernel = prefill_hopper._prefill_hopper
    keys_at_once, stages = prefill_hopper._TILES[dim]
    descriptor = f"tensordesc<bf16[16, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    signature = {"keys": descriptor, "values": descriptor, "query": "*bf16", "out": "*bf16", "scale": "fp32"}
    signature |= {"tables": "*i32", "lanes": "*i32", "starts": "*i64", "first_rows": "*i32", "counts": "*i32"}
    signature["tiles"] = "*i32"
    constants: dict[str, Any] = {
        "sinks": None, "KV_HEADS": 4, "GROUP": 8, "PIECES": 8, "TILE": 128, "BLOCK_TOKENS": 16, "DIM": dim,
        "SINKS": False, "REACH": reach, "BLOCK_N": keys_at_once, "STAGES": stages, "ROWS": prefill_hopper.ROWS,
        "OVERLAP": True,
    }  # fmt: skip
    names = kernel.arg_names
    divisible = ("query", "out", "tables", "query_row", "query_head", "table_row", "out_row", "out_head")
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": 4, "maxnreg": prefill_hopper.REGISTERS}
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    products = len(re.findall("wgmma.mma_async", built.asm["ptx"]))
    copies = len(re.findall("cp.async.bulk.tensor", built.asm["ptx"]))
    print(built.metadata.shared, products, copies)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]))
