"""The layouts whose values are stored one a byte, MXFP4, and what layouts share.

A layout recognises its values among the stored tensors, checks that scales and zero points fit, and later makes bands
of rows, on the device that they are meant for. Knows tensors by their names on disk, neither configs nor models. Made
and called by `quantized.py`; `reading.py` reads the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.shards import FLOATS, Layout, Quantized, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.weights.open_shards import OpenShards

#: rows and columns that share a scale; None: all of them
Block: TypeAlias = tuple[int | None, int | None]
#: dtypes of scales that are numbers
FLOAT_SCALES = frozenset({"F32", "F16", "BF16"})
#: dtypes of the scales of FP8 blocks: numbers, or powers of two as exponents of one byte
FP8_SCALES = FLOATS | {"U8"}

# the dtype in which a quantised tensor counts as stored
_UNPACKED = "BF16"
_E8M0_BIAS = 127.0
_MXFP4_VALUES, _MXFP4_SCALES = "_blocks", "_scales"
# bytes of one MXFP4 block: 32 values of 4 bits, which share a scale
_MXFP4_BLOCK_NBYTES = 16


@dataclass(frozen=True)
class Scaled(Layout):
    """Matrices (or stacks of them) of one value a byte, and a scale for each block: (value - zero point) x scale.

    Attributes:
        values: dtypes of values that have scales.
        scale_names: of the scales of NAME: NAME and the end, or with a dot in place of NAME's last part.
        scale_dtypes: of scales; bytes are exponents.
        blocks: that the checkpoint may have; the shape of the scales tells which.
        dtype: of the arithmetic; None: that of the scales.
        zero_end: of the name of zero points, of the shape of the scales, which a tensor may have; "": none has.
    """

    values: tuple[str, ...]
    scale_names: tuple[str, ...]
    scale_dtypes: frozenset[str]
    blocks: tuple[Block, ...]
    dtype: torch.dtype | None
    zero_end: str = ""

    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        if stored.dtype not in self.values or (self.zero_end and key.endswith(self.zero_end)):
            return None
        names = [key + end if end[0] == "_" else key.rpartition(".")[0] + end for end in self.scale_names]
        scales = part_of(stored, "scales", table, *names)
        if len(stored.shape) not in (2, 3):
            raise CheckpointError(str(stored.file), f"{key} has shape {stored.shape}: scales need rows and columns")
        block = fitting_block(stored, stored.shape, scales, self.blocks, self.scale_dtypes)
        parts = {"values": stored, "scales": scales}
        zeros = table.get(key + self.zero_end) if self.zero_end else None
        if zeros is not None:
            if zeros.shape != scales.shape or zeros.dtype != stored.dtype:
                problem = f"{zeros.name} has shape {zeros.shape} and dtype {zeros.dtype}, not {scales.shape}"
                raise CheckpointError(str(zeros.file), f"{problem} and {stored.dtype} as {key} needs it")
            parts["zeros"] = zeros
        return joined(key, self, stored.shape, parts, block)

    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        quantized = quantized_of(stored)
        parts = quantized.parts
        values = shards.rows(stored.file, parts["values"].name, first, last).to(like.device)
        scales, zeros = (
            _grid_rows(shards, parts[name], stored.shape, quantized.block, first, last, like.device)
            if name in parts
            else None
            for name in ("scales", "zeros")
        )
        return scaled(values, scales, zeros, self.dtype, like.dtype)


class Mxfp4(Layout):
    """Experts' matrices of 4-bit floats in blocks of 32, whose scales are exponents; the library's own arithmetic."""

    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        if not key.endswith(_MXFP4_VALUES) or stored.dtype != "U8":
            return None
        stem = key.removesuffix(_MXFP4_VALUES)
        scales = part_of(stored, "scales", table, stem + _MXFP4_SCALES)
        if len(stored.shape) != 4 or stored.shape[-1] != _MXFP4_BLOCK_NBYTES:
            problem = f"{key} has shape {stored.shape}, not (experts, rows, blocks, {_MXFP4_BLOCK_NBYTES})"
            raise CheckpointError(str(stored.file), problem)
        if scales.dtype != "U8" or scales.shape != stored.shape[:-1]:
            problem = f"{scales.name} has shape {scales.shape} and dtype {scales.dtype}"
            raise CheckpointError(str(scales.file), f"{problem}: {key} needs U8 of {stored.shape[:-1]}")
        experts, rows, blocks, _ = stored.shape
        # the library keeps these weights transposed
        shape = (experts, blocks * _MXFP4_BLOCK_NBYTES * 2, rows)
        return joined(stem, self, shape, {"values": stored, "scales": scales}, bits=4)

    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        values, scales = (
            shards.rows(part.file, part.name, first, last).to(like.device)
            for part in quantized_of(stored).parts.values()
        )
        packed: Any = convert_moe_packed_tensors
        made: torch.Tensor = packed(values, scales, dtype=like.dtype)
        return made


# -- for layouts ------------------------------------------------------------------------------------


def joined(
    name: str,
    layout: Layout,
    shape: tuple[int, ...],
    parts: dict[str, StoredTensor],
    block: tuple[int, int] = (0, 0),
    bits: int = 8,
) -> StoredTensor:
    """The tensor that parts make: it lies where its values lie."""
    return StoredTensor(name, parts["values"].file, _UNPACKED, shape, Quantized(layout, parts, block, bits))


def quantized_of(stored: StoredTensor) -> Quantized:
    """What a joined tensor is made of."""
    assert stored.quantized is not None
    return stored.quantized


def part_of(stored: StoredTensor, what: str, table: Mapping[str, StoredTensor], *names: str) -> StoredTensor:
    """The first of the names that the table has. Raises CheckpointError."""
    for name in names:
        if name in table:
            return table[name]
    stem = stored.name.rpartition(".")[0] + "."
    other = next((name for name in sorted(table) if name.startswith(stem) and name.endswith("scale")), None)
    hint = f" (it has {other}, of a layout that this loader does not know)" if other and what == "scales" else ""
    problem = f"holds {stored.name}, and no file of the folder holds its {what} {' or '.join(names)}{hint}"
    raise CheckpointError(str(stored.file), problem)


def fitting_block(
    stored: StoredTensor,
    shape: tuple[int, ...],
    scales: StoredTensor,
    blocks: tuple[Block, ...],
    dtypes: frozenset[str],
) -> tuple[int, int]:
    """The block, among the checkpoint's possible blocks, whose grid over a matrix has the shape of the scales.

    Raises CheckpointError if none is, or if it cannot be told which.
    """
    rows, columns = shape[-2:]
    sides = [(height or max(rows, 1), width or max(columns, 1)) for height, width in blocks]
    grids = [(*shape[:-2], math.ceil(rows / height), math.ceil(columns / width)) for height, width in sides]
    one = math.prod(scales.shape) == 1
    found = [side for side, grid in zip(sides, grids, strict=True) if scales.shape == grid or (one and grid == (1, 1))]
    if scales.dtype not in dtypes or not found:
        raise CheckpointError(
            str(scales.file),
            f"{scales.name} has shape {scales.shape} and dtype {scales.dtype}: {stored.name} of shape {shape} in blocks"
            f" of {' or '.join(map(str, sides))} needs float scales of shape {' or '.join(map(str, grids))}",
        )
    if len({(min(height, rows), min(width, columns)) for height, width in found}) > 1:
        problem = f"the scales of {stored.name} may be of blocks of {' or '.join(map(str, found))}"
        raise CheckpointError(str(scales.file), problem)
    return found[0]


def scaled(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    dtype: torch.dtype | None,
    made_dtype: torch.dtype,
) -> torch.Tensor:
    """(values - zeros) x scales in `dtype` (None: that of the scales), rounded once more to `made_dtype`."""
    assert scales is not None
    # one byte is an exponent
    factors = (scales.float() - _E8M0_BIAS).exp2() if scales.dtype == torch.uint8 else scales
    factors = factors if dtype is None else factors.to(dtype)
    numbers = values.to(factors.dtype)
    if zeros is not None:
        numbers.sub_(zeros.to(factors.dtype))
    return numbers.mul_(factors).to(made_dtype)


def _grid_rows(
    shards: OpenShards,
    part: StoredTensor,
    shape: tuple[int, ...],
    block: tuple[int, int],
    first: int,
    last: int,
    device: torch.device,
) -> torch.Tensor:
    """The numbers of a grid that belong to the values of some rows: broadcastable to them."""
    height, width = block
    rows, columns = shape[-2:]
    if len(shape) == 3:
        grid = shards.rows(part.file, part.name, first, last).to(device)
        return _spread(_spread(grid, height, rows, -2), width, columns, -1)
    if math.prod(part.shape) == 1:
        # it may be stored in any shape
        return shards.tensor(part.file, part.name).to(device).reshape(1, 1)
    skipped = first // height
    grid = shards.rows(part.file, part.name, skipped, math.ceil(last / height)).to(device)
    grid = _spread(grid, height, rows, 0)[first - skipped * height :]
    return _spread(grid[: last - first], width, columns, -1)


def _spread(grid: torch.Tensor, side: int, size: int, dim: int) -> torch.Tensor:
    """Each number as often as its block is long; the last blocks may be cut off by the tensor's edge."""
    if side == 1 or (grid.shape[dim] == 1 and dim == -1):
        return grid
    spread = grid.repeat_interleave(side, dim)
    return spread.narrow(dim, 0, min(size, spread.shape[dim]))
