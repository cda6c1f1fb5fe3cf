"""Compiles the kernels that norm rows without a GPU, and prints how each shares a row out to threads: run by
`test_same_bits.py` as a process of its own, since tests in a process with Triton's interpreter cannot compile.

A line is: dtype, size of a row, kernel, and elements of a thread at a time, threads and warps of a row.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import triton
from fdasync_kernels.layer import finish, norm, qkv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

_SIZES = {"bf16": 2, "fp32": 4}
# that the drivers of kernels find to be multiples of 16, in a step and elsewhere
_ALL = frozenset(["x", "block", "qkv", "residual", "weight", "out", "total", "hidden", "normed", "x_stride",
                  "residual_stride", "block_row", "block_slot", "residual_row", "qkv_row"])  # fmt: skip
_NEW = frozenset(["out", "total", "hidden", "normed", "weight"])


def main() -> None:
    for dtype in _SIZES:
        for size in (64, 2048):
            _show_norm(dtype, size, _ALL, added=False)
            _show_finish(dtype, size, _ALL, slots=8)
        _show_norm(dtype, 1024, _NEW, added=True)
        _show_finish(dtype, 1024, _NEW, slots=0)
        for dim, heads in ((64, 16), (256, 1)):
            _show_norm(dtype, dim, _ALL, added=False, name=-dim)
            _show_heads(dtype, dim, heads)


def _show_norm(dtype: str, size: int, divisible: frozenset[str], *, added: bool, name: int = 0) -> None:
    tile = norm.tile_of(size, _SIZES[dtype])
    constants = {"COLUMNS": size, "PADDED": tile.padded, "ROWS": tile.rows, "KIND": 0, "ADDED": added}
    _show(dtype, name or size, norm._norm_kernel, constants, tile.warps, divisible, tile.padded)


def _show_finish(dtype: str, size: int, divisible: frozenset[str], *, slots: int) -> None:
    width = max(256, triton.next_power_of_2(size))
    constants = {"SIZE": size, "WIDTH": width, "EXPERTS": 8, "SHARED": False, "GATED": False, "ADDED": True,
                 "NORMED": True, "ONCE": False, "EPS": 1e-6, "OVERLAP": True, "SLOTS": slots,
                 "MASKED": slots > 0, "RANK": 0, "RANKS": 1, "PLACES": 1}  # fmt: skip
    _show(dtype, size, finish._finish, constants, norm.warps_of(width, _SIZES[dtype]), divisible, width)


def _show_heads(dtype: str, dim: int, heads: int) -> None:
    group = max(min(8, heads), 256 // dim)
    constants = {"BLOCK_TOKENS": 16, "HEADS": heads, "KV_HEADS": 1, "DIM": dim, "WIDTH": dim, "HALF": dim // 2,
                 "HALF_WIDTH": dim // 2, "REST_WIDTH": 0, "GROUP": group, "KV_GROUP": group, "INTERLEAVED": False,
                 "FULL": False, "NORM": 1, "ONCE": False, "EPS": 1e-6, "CLIP": 0.0, "PER_SHARE": 1,
                 "OVERLAP": True}  # fmt: skip
    _show(dtype, -dim, qkv._prepare, constants, norm.warps_of(group * dim, _SIZES[dtype], 8), _ALL, dim)


def _show(
    dtype: str, size: int, kernel: Any, constants: dict[str, Any], warps: int, divisible: frozenset[str], width: int
) -> None:
    names = kernel.arg_names
    integers = {name for name in names if re.search("num_rows|_(stride|row|slot|column|block|token|head)$", name)}
    signature = {name: "i32" if name in integers else f"*{dtype}" for name in names}
    signature |= {"ids": "*i64", "live": "*i64", "slots": "*i64", "eps": "fp32", "addresses": "*i64", "turns": "*i32"}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible if name in names},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    text = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    found = {_of_row(text, operand) for operand in re.findall(r'"tt\.reduce"\((%\w+)\)', text)}
    assert len(found) == 1, found
    print(dtype, size, kernel.__name__, *_without_padding(found.pop(), abs(size), width))


def _of_row(text: str, operand: str) -> tuple[int, ...]:
    """Elements of a thread, threads and warps along a row, of the layout that a sum reads."""
    made = next(line for line in text.splitlines() if line.strip().startswith(f"{operand} ="))
    # a reshape that may put elements in another order leaves them where they are
    shown = re.search(r"allow_reorder : (\S+ ?\S*) ->", made)
    layout = re.findall(r"#(blocked\d*)", shown.group(1) if shown else made)[-1]
    said = next(line for line in text.splitlines() if line.startswith(f"#{layout} ="))
    lists = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", said)
    return tuple(int(each.split(",")[-1]) for each in lists)


def _without_padding(shares: tuple[int, ...], size: int, width: int) -> tuple[int, ...]:
    """Of a short row: threads and warps that hold padding alone add zeros to the others' sums."""
    each, threads, warps = shares
    real = min(width, triton.next_power_of_2(size))
    threads = min(threads, max(1, real // each))
    return each, threads, min(warps, max(1, real // (each * threads)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
