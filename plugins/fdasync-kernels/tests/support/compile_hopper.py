"""Compiles Hopper's kernels of attention without a GPU and prints what they take: run by `test_hopper_compiles.py` as a
process of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from fdasync_kernels.attention import latent_hopper, prefill_hopper
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

PAGES = f"tensordesc<bf16[16, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
POINTERS = {
    "query": "*bf16", "rotary": "*bf16", "out": "*bf16", "partials": "*fp32", "stats": "*fp32", "tables": "*i32",
    "lanes": "*i32", "starts": "*i64", "positions": "*i64", "first_rows": "*i32", "counts": "*i32", "tiles": "*i32",
    "scale": "fp32", "keys": PAGES, "values": PAGES, "latents": PAGES,
}  # fmt: skip
DIVISIBLE = (
    "query", "rotary", "out", "partials", "stats", "tables", "capacity", "width", "query_row", "query_head",
    "rotary_row", "rotary_head", "table_row", "out_row", "out_head",
)  # fmt: skip


def build(kernel: Any, constants: dict[str, Any], registers: int) -> Any:
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in DIVISIBLE if name in names},
    )
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": registers})


def prefill(dim: int, reach: int, part: int = 0, per_share: int = 1) -> Any:
    keys_at_once, stages = (64, 4) if part else prefill_hopper._TILES[dim]
    constants = {
        "sinks": None, "KV_HEADS": 4, "GROUP": 8, "PIECES": 8, "TILE": 128, "BLOCK_TOKENS": 16, "DIM": dim,
        "SINKS": False, "REACH": reach, "BLOCK_N": keys_at_once, "STAGES": stages, "ROWS": prefill_hopper.ROWS,
        "OVERLAP": True, "PART": part, "PER_SHARE": per_share,
    }  # fmt: skip
    return build(prefill_hopper._prefill_hopper, constants, prefill_hopper.REGISTERS)


def latent(heads: int, split: int) -> Any:
    constants = {"HEADS": heads, "BLOCK_TOKENS": 16, "SPLIT": bool(split), "OVERLAP": True}
    return build(latent_hopper.latents_hopper, constants, latent_hopper.REGISTERS)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for argument in sys.argv[1:]:
        what, *numbers = argument.split(",")
        built = {"prefill": prefill, "latent": latent}[what](*map(int, numbers))
        products = len(re.findall("wgmma.mma_async", built.asm["ptx"]))
        copies = len(re.findall("cp.async.bulk.tensor", built.asm["ptx"]))
        waits = len(re.findall("WARPGROUP.DEPBAR", built.asm["sass"]))
        print(argument, built.metadata.shared, products, copies, waits)
