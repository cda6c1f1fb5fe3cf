"""Compiles the products of experts with many rows without a GPU and prints what they take: run by
`test_experts_many.py` as a process of its own, since tests in a process with Triton's interpreter cannot compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from fdasync_kernels.experts import many
from fdasync_kernels.experts.tiles import Tile, choose_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

_POINTERS = {"order": "*i32", "tiles": "*i32", "alpha": "fp32", "limit": "fp32"}
_DIVISIBLE = ("x", "bias", "weights", "out", "order", "tiles", "x_row", "bias_expert")


def main() -> None:
    tiles = choose_tiles(8192, 8, 128, torch.bfloat16, large=True, bulk=True)
    kinds = {"TOPK": 8, "KIND": 0, "FORM": 0, "GATED": True}
    rows = f"tensordesc<bf16[{tiles.rows}, {tiles.down.depth}]>"
    _compile(many.experts_gate_up_many, tiles.rows, tiles.up, 2, "*bf16", {"K": 2048, "N": 768, **kinds})
    _compile(many.experts_down_many, tiles.rows, tiles.down, 1, rows, {"K": 768, "N": 2048})


def _compile(kernel: Any, rows: int, tile: Tile, matrices: int, x: str, constants: dict[str, Any]) -> None:
    """Print the bytes of shared memory, the numbers of asynchronous products and of copies of both kinds."""
    names = kernel.arg_names
    constants |= {"BIASED": False, "COLUMNS": constants["N"] // tile.columns, "WIDEN": False, "OVERLAP": True}
    constants |= {"BM": rows, "BN": tile.columns, "BK": tile.depth}
    block = f"tensordesc<bf16[{matrices}, {tile.columns}, {tile.depth}]>"
    signature = {"x": x, "w": block, "bias": "*bf16", "weights": "*bf16", "out": "*bf16", **_POINTERS}
    divisible = [name for name in _DIVISIBLE if name in names and not (name == "x" and x != "*bf16")]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    counts = [
        len(re.findall(name, ptx)) for name in ("wgmma.mma_async", "cp.async.bulk.tensor", r"cp.async.c[ag]\.shared")
    ]
    print(built.metadata.shared, *counts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
