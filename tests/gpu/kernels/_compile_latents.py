"""Compiles Hopper's kernel of latents without a GPU and prints what it takes: run by `test_latent_compiles.py` as a
process of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from fdasync.gpu.kernels.attention.latent import HOPPER
from fdasync.gpu.kernels.attention.latent_hopper import latents_hopper

POINTERS = {
    "query": "*bf16", "rotary": "*bf16", "latents": "*bf16", "out": "*bf16", "tables": "*i32", "lanes": "*i32",
    "positions": "*i64", "partials": "*fp32", "stats": "*fp32", "scale": "fp32",
}  # fmt: skip
DIVISIBLE = (
    "query", "rotary", "latents", "out", "partials", "stats", "tables", "query_row", "query_head", "rotary_row",
    "rotary_head", "latents_block", "latents_token", "out_row", "out_head", "width",
)  # fmt: skip


def main(heads: int, split: bool) -> None:
    constants: dict[str, Any] = {"HEADS": heads, "BLOCK_TOKENS": 16, "SPLIT": split}
    names = latents_hopper.arg_names
    source = GluonASTSource(
        latents_hopper,
        {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in DIVISIBLE},
    )
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": HOPPER.warps})
    products = len(re.findall("wgmma.mma_async", built.asm["ptx"]))
    copies = len(re.findall(r"cp\.async\.cg", built.asm["ptx"]))
    print(built.metadata.shared, products, copies)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), sys.argv[2] == "split")
