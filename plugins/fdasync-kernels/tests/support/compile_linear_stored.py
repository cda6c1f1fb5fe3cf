"""Compiles the product with FP8 weights without a GPU and prints what it takes: run by `test_linear_stored.py` as a
process of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

from fdasync_kernels.linear.stored import StoredTile, all_stored_tiles, stored_linear_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

_POINTERS = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "bias": "*bf16", "out": "*bf16"}


def main() -> None:
    for tile in dict.fromkeys(all_stored_tiles()):
        for capability in (89, 90):
            _compile(tile, capability)


def _compile(tile: StoredTile, capability: int) -> None:
    """Print the bytes of shared memory, products of tensor cores, and whether anything is spilled."""
    names = stored_linear_kernel.arg_names
    constants: dict[str, Any] = {"INPUTS": 2048, "EVEN": True, "BIASED": True, "WIDEN": False}
    constants |= {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "WAYS": tile.ways,
        "STAGES": tile.stages,
    }
    constants |= {"OVERLAP": capability >= 90}
    source = ASTSource(
        stored_linear_kernel,
        {name: "constexpr" if name in constants else _POINTERS.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*_POINTERS, "x_row")},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    counts = [len(re.findall(name, ptx)) for name in (r"mma\.sync", r"\.local\.")]
    print(built.metadata.shared, *counts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
