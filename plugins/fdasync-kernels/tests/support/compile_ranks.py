"""Compiles the kernels that wait for other devices, without a GPU, and prints how many programs of each a
multiprocessor of Hopper holds: run by `test_all_reduce.py` as a process of its own, since tests in a process with
Triton's interpreter cannot compile.

A line is: ranks, way, programs that the registers of a multiprocessor hold, and programs that a launch may have there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import triton
from fdasync_kernels.collectives import all_reduce
from fdasync_kernels.collectives.peer_memory import Group
from fdasync_kernels.layer import finish, norm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_REGISTERS, _PROCESSORS = 65536, 132
# of rows: 4,096 elements are the most of which a multiprocessor is to hold two
_WIDTHS = (2048, 4096, 8192)


def main() -> None:
    for ranks in (2, 4, 8):
        for width in _WIDTHS:
            for name, way in Group(ranks, _PROCESSORS, 2 * width).ways().items():
                # the others' programs are small, and one on each
                if name != "rows" and not (name.endswith("_wide") and width == _WIDTHS[0]):
                    continue
                kernel, constants, warps = _kernel(name, way.tile_nbytes // 2, ranks)
                held = _REGISTERS // (_registers(kernel, constants, way.warps or warps) * 32 * (way.warps or warps))
                print(ranks, name, held, -(-way.programs // _PROCESSORS))


def _kernel(name: str, tile: int, ranks: int) -> tuple[Any, dict[str, Any], int]:
    constants = {"RANK": 1, "RANKS": ranks, "PLACES": ranks, "OVERLAP": True}
    if name == "rows":
        constants |= {"SIZE": tile, "WIDTH": tile, "SLOTS": 10, "EXPERTS": 128, "MASKED": True, "SHARED": True,
                      "GATED": True, "ADDED": True, "NORMED": True, "ONCE": False, "EPS": 1e-6}  # fmt: skip
        return finish._finish, constants, norm.warps_of(tile, 2)
    one_shot = name.startswith("one")
    kernel = all_reduce._one_shot_kernel if one_shot else all_reduce._two_shot_kernel
    return kernel, {**constants, "VECTOR": 8, "TILE": tile}, 0


def _registers(kernel: Any, constants: dict[str, Any], warps: int) -> int:
    names = kernel.arg_names
    wide = {"addresses": "*i64", "turns": "*i32", "ids": "*i64", "live": "*i64", "vectors": "i32"}
    integers = {name for name in names if re.search("_(row|slot)$", name)}
    signature = {name: wide.get(name, "i32" if name in integers else "*bf16") for name in names}
    aligned = [name for name in names if name not in constants and name not in ("vectors", "ids", "live")]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=600)
    found = re.search(r"REG:(\d+)", said.stdout + said.stderr)
    assert found is not None, said
    # the chip allots them in eights
    return -(-int(found[1]) // 8) * 8


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
