"""The layouts that pack values of 4 or 8 bits into 32-bit words: those of compressed-tensors, AWQ and GPTQ.

compressed-tensors packs along a row; AWQ and GPTQ store matrices transposed, AWQ packs along a stored row, GPTQ along a
stored column. Each is (value - zero point) x scale in the dtype of the scales, as their packages have it, bit for bit.
Knows tensors by their names on disk, neither configs nor models. Made by `quantized.py` and `config_groups.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.layouts import (
    FLOAT_SCALES,
    Layout,
    fitting_block,
    joined,
    part_of,
    quantized_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.weights.layouts import Block
    from fdasync_transformers.weights.open_shards import OpenShards
    from fdasync_transformers.weights.shards import StoredTensor

_WORD = "I32"
_WORD_BITS = 32
# where AWQ has the values of a word: column 0 in the lowest bits, then column 2
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# GPTQ's first version stores zero points less 1: its packages add 1 to each of a word's, which carries
_ONES = {4: 0x11111111, 8: 0x01010101}


class PackedKind(NamedTuple):
    """A group of a compressed-tensors config: bits of a value, the block of a scale, whether it has no zero points."""

    bits: int
    block: Block
    symmetric: bool


@dataclass(frozen=True)
class PackedRows(Layout):
    """compressed-tensors' `pack-quantized`: NAME_packed, NAME_scale, NAME_shape, and NAME_zero_point if asymmetric.

    Attributes:
        kinds: that the checkpoint may have; the shapes of a tensor's parts tell which.
    """

    kinds: tuple[PackedKind, ...]

    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        if not key.endswith("_packed"):
            return None
        name = key.removesuffix("_packed")
        _check_words(stored, stored, None)
        parts = {
            "values": stored,
            "scales": part_of(stored, "scales", table, f"{name}_scale"),
            "shape": part_of(stored, "shape", table, f"{name}_shape"),
        }
        zeros = table.get(f"{name}_zero_point")
        if zeros is not None:
            parts["zeros"] = zeros
        found: dict[tuple[int, ...], StoredTensor] = {}
        problem: CheckpointError | None = None
        for kind in self.kinds:
            try:
                made = self._as(kind, name, parts)
            except CheckpointError as error:
                problem = problem or error
            else:
                quantized = quantized_of(made)
                found[*made.shape[-1:], quantized.bits, *quantized.block] = made
        if not found:
            assert problem is not None
            raise problem
        if len(found) > 1:
            raise CheckpointError(str(stored.file), f"{key} may be of several of the config_groups")
        return next(iter(found.values()))

    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        parts, block, bits = quantized_of(stored).parts, quantized_of(stored).block, quantized_of(stored).bits
        told = shards.tensor(parts["shape"].file, parts["shape"].name).tolist()
        if told != list(stored.shape):
            problem = f"{parts['shape'].name} says {told}; the packed values and scales are those of {stored.shape}"
            raise CheckpointError(str(parts["shape"].file), problem)
        words = shards.rows(stored.file, parts["values"].name, first, last).to(like.device)
        values = _unpacked(words, bits)[:, : stored.shape[1]]
        if math.prod(parts["scales"].shape) == 1:
            scales = shards.tensor(parts["scales"].file, parts["scales"].name).to(like.device).reshape(1, 1)
        else:
            scales = shards.rows(parts["scales"].file, parts["scales"].name, first, last).to(like.device)
        zeros = torch.full((1, 1), 1 << bits - 1, dtype=torch.uint8, device=like.device)
        if "zeros" in parts:
            word, end = first * bits // _WORD_BITS, math.ceil(last * bits / _WORD_BITS)
            packed = shards.rows(parts["zeros"].file, parts["zeros"].name, word, end).to(like.device)
            skipped = first - word * _WORD_BITS // bits
            zeros = _unpacked(packed.T, bits)[:, skipped : skipped + last - first].T
        return scaled(values, _wide(scales, block[1]), _wide(zeros, block[1]), None, like.dtype)

    def _as(self, kind: PackedKind, name: str, parts: dict[str, StoredTensor]) -> StoredTensor:
        values, scales = parts["values"], parts["scales"]
        rows, words = values.shape
        width = kind.block[1]
        columns = words * _WORD_BITS // kind.bits if width is None else scales.shape[-1] * width
        if math.ceil(columns * kind.bits / _WORD_BITS) != words:
            problem = f"{scales.name} has shape {scales.shape}: groups of {width} values of {kind.bits} bits"
            raise CheckpointError(str(scales.file), f"{problem} do not fill {values.name} of shape {values.shape}")
        shape = (rows, columns)
        block = fitting_block(values, shape, scales, (kind.block,), FLOAT_SCALES)
        zeros = parts.get("zeros")
        if kind.symmetric and zeros is not None:
            raise CheckpointError(str(zeros.file), f"holds {zeros.name}, and config.json says that there is none")
        if not kind.symmetric:
            zeros = part_of(values, "zero points", {} if zeros is None else {zeros.name: zeros}, f"{name}_zero_point")
            _check_words(zeros, values, (math.ceil(rows * kind.bits / _WORD_BITS), scales.shape[-1]))
        return joined(name, self, shape, parts, block, kind.bits)


@dataclass(frozen=True)
class Awq(Layout):
    """AWQ's `gemm` layout, 4 bits: MODULE.qweight [columns, rows / 8], .qzeros and .scales for groups of columns.

    Attributes:
        group: columns that share a scale; None: all.
    """

    group: int | None

    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        if not key.endswith(".qweight"):
            return None
        stem = key.removesuffix(".qweight")
        _check_words(stored, stored, None)
        columns, rows = stored.shape[0], stored.shape[1] * _WORD_BITS // 4
        group = self.group or columns
        parts = _transposed_parts(stem, stored, table, (math.ceil(columns / group), rows), 4)
        return joined(f"{stem}.weight", self, (rows, columns), parts, (1, group), 4)

    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        quantized = quantized_of(stored)
        values, zeros = (
            _packed_columns(shards, quantized.parts[name], 4, first, last, like.device, _AWQ_PLACES).T
            for name in ("values", "zeros")
        )
        part = quantized.parts["scales"]
        scales = shards.columns(part.file, part.name, first, last).to(like.device).T
        group, columns = quantized.block[1], stored.shape[1]
        scales, zeros = (_wide(grid, group)[:, :columns] for grid in (scales, zeros))
        return scaled(values, scales, zeros, None, like.dtype)


@dataclass(frozen=True)
class Gptq(Layout):
    """GPTQ's layout: MODULE.qweight [columns x bits / 32, rows], .qzeros and .scales for groups of columns, .g_idx.

    `g_idx` has the group of each column; without it columns are in the order of their groups.

    Attributes:
        bits: of the config; those of a tensor with `g_idx` follow from its shape.
        group: columns that share a scale; None: all.
        less_one: whether zero points are stored less 1, as the format's first version does.
    """

    bits: int
    group: int | None
    less_one: bool

    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        if not key.endswith(".qweight"):
            return None
        stem = key.removesuffix(".qweight")
        _check_words(stored, stored, None)
        words, rows = stored.shape
        order = table.get(f"{stem}.g_idx")
        bits, columns = self.bits, words * _WORD_BITS // self.bits
        if order is not None:
            fits = [bits for bits in _ONES if order.shape and math.ceil(order.shape[0] * bits / _WORD_BITS) == words]
            if order.dtype != _WORD or len(order.shape) != 1 or len(fits) != 1:
                problem = f"{order.name} has shape {order.shape} and dtype {order.dtype}"
                raise CheckpointError(str(order.file), f"{problem}: it does not fit {key} of shape {stored.shape}")
            bits, columns = fits[0], order.shape[0]
        scales = part_of(stored, "scales", table, f"{stem}.scales")
        group = self.group or columns
        groups = math.ceil(columns / group)
        if order is not None and scales.shape:
            # the number of groups is free: g_idx says which there are
            groups = scales.shape[0]
        parts = _transposed_parts(stem, stored, table, (groups, rows), bits)
        if order is not None:
            parts["order"] = order
        return joined(f"{stem}.weight", self, (rows, columns), parts, (1, group), bits)

    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        quantized = quantized_of(stored)
        parts, bits, columns = quantized.parts, quantized.bits, stored.shape[1]
        words = shards.columns(stored.file, parts["values"].name, first, last).to(like.device)
        values = _unpacked(words.T, bits)[:, :columns]
        added = _ONES[bits] if self.less_one else 0
        zeros = _packed_columns(shards, parts["zeros"], bits, first, last, like.device, None, added).T
        scales = shards.columns(parts["scales"].file, parts["scales"].name, first, last).to(like.device).T
        if "order" not in parts:
            scales, zeros = (_wide(grid, quantized.block[1])[:, :columns] for grid in (scales, zeros))
        else:
            order = shards.tensor(parts["order"].file, parts["order"].name)
            if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < scales.shape[1]:
                problem = f"{parts['order'].name} names groups that are not among the {scales.shape[1]} scales"
                raise CheckpointError(str(parts["order"].file), problem)
            order = order.to(like.device)
            scales, zeros = scales.index_select(1, order), zeros.index_select(1, order)
        return scaled(values, scales, zeros, None, like.dtype)


def _transposed_parts(
    stem: str, values: StoredTensor, table: Mapping[str, StoredTensor], grid: tuple[int, int], bits: int
) -> dict[str, StoredTensor]:
    """The parts of a matrix that is stored transposed. Raises CheckpointError if they do not fit."""
    scales = part_of(values, "scales", table, f"{stem}.scales")
    zeros = part_of(values, "zero points", table, f"{stem}.qzeros")
    if scales.dtype not in FLOAT_SCALES or scales.shape != grid:
        raise CheckpointError(
            str(scales.file),
            f"{scales.name} has shape {scales.shape} and dtype {scales.dtype}: {values.name} of shape {values.shape}"
            f" needs float scales of shape {grid}",
        )
    _check_words(zeros, values, (grid[0], math.ceil(grid[1] * bits / _WORD_BITS)))
    return {"values": values, "scales": scales, "zeros": zeros}


def _check_words(part: StoredTensor, values: StoredTensor, shape: tuple[int, int] | None) -> None:
    """Whether a tensor is a matrix of words, of this shape (None: any). Raises CheckpointError."""
    if part.dtype == _WORD and (part.shape == shape or (shape is None and len(part.shape) == 2)):
        return
    wanted = f"{values.name} needs {_WORD} of {shape}" if shape else f"{_WORD} of rows and columns are known"
    raise CheckpointError(str(part.file), f"{part.name} has shape {part.shape} and dtype {part.dtype}: {wanted}")


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values of words that hold them from the lowest bits on: uint8 [rows, words x 32 / bits]."""
    # strides of a transposed vector are odd, though it is contiguous
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _packed_columns(
    shards: OpenShards,
    part: StoredTensor,
    bits: int,
    first: int,
    last: int,
    device: torch.device,
    places: tuple[int, ...] | None,
    added: int = 0,
) -> torch.Tensor:
    """Values `first` to `last` (exclusive) of each row of packed words: uint8.

    Args:
        places: of the values in a word, in the order of columns; None: in their order.
        added: to each word, modulo 2^32.
    """
    a_word = _WORD_BITS // bits
    word, end = first // a_word, math.ceil(last / a_word)
    words = shards.columns(part.file, part.name, word, end).to(device)
    values = _unpacked(words + added if added else words, bits)
    if places is not None:
        values = values.reshape(len(values), -1, a_word)[..., list(places)].flatten(-2)
    return values[:, first - word * a_word : last - word * a_word]


def _wide(grid: torch.Tensor, group: int) -> torch.Tensor:
    """A number for each column of a number for each group of them."""
    return grid if grid.shape[-1] == 1 else grid.repeat_interleave(group, -1)
