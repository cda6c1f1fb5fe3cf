"""The layout of compressed-tensors that packs values of 4 or 8 bits along a row into words.

(value - zero point) x scale in the dtype of the scales, as the package has it, bit for bit. Knows tensors by their
names on disk, neither configs nor models. Made by `config_groups.py`; `transposed.py` shares its words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.layouts.scaled import (
    FLOAT_SCALES,
    fitting_block,
    joined,
    part_of,
    quantized_of,
    scaled,
)
from fdasync_transformers.weights.shards import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.weights.layouts.scaled import Block
    from fdasync_transformers.weights.open_shards import OpenShards
    from fdasync_transformers.weights.shards import StoredTensor

#: dtype and size of a word
WORD, WORD_BITS = "I32", 32


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
        check_words(stored, stored, None)
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
        values = unpacked(words, bits)[:, : stored.shape[1]]
        if math.prod(parts["scales"].shape) == 1:
            scales = shards.tensor(parts["scales"].file, parts["scales"].name).to(like.device).reshape(1, 1)
        else:
            scales = shards.rows(parts["scales"].file, parts["scales"].name, first, last).to(like.device)
        zeros = torch.full((1, 1), 1 << bits - 1, dtype=torch.uint8, device=like.device)
        if "zeros" in parts:
            word, end = first * bits // WORD_BITS, math.ceil(last * bits / WORD_BITS)
            packed = shards.rows(parts["zeros"].file, parts["zeros"].name, word, end).to(like.device)
            skipped = first - word * WORD_BITS // bits
            zeros = unpacked(packed.T, bits)[:, skipped : skipped + last - first].T
        return scaled(values, wide(scales, block[1]), wide(zeros, block[1]), None, like.dtype)

    def _as(self, kind: PackedKind, name: str, parts: dict[str, StoredTensor]) -> StoredTensor:
        values, scales = parts["values"], parts["scales"]
        rows, words = values.shape
        width = kind.block[1]
        columns = words * WORD_BITS // kind.bits if width is None else scales.shape[-1] * width
        if math.ceil(columns * kind.bits / WORD_BITS) != words:
            problem = f"{scales.name} has shape {scales.shape}: groups of {width} values of {kind.bits} bits"
            raise CheckpointError(str(scales.file), f"{problem} do not fill {values.name} of shape {values.shape}")
        shape = (rows, columns)
        block = fitting_block(values, shape, scales, (kind.block,), FLOAT_SCALES)
        zeros = parts.get("zeros")
        if kind.symmetric and zeros is not None:
            raise CheckpointError(str(zeros.file), f"holds {zeros.name}, and config.json says that there is none")
        if not kind.symmetric:
            zeros = part_of(values, "zero points", {} if zeros is None else {zeros.name: zeros}, f"{name}_zero_point")
            check_words(zeros, values, (math.ceil(rows * kind.bits / WORD_BITS), scales.shape[-1]))
        return joined(name, self, shape, parts, block, kind.bits)


def check_words(part: StoredTensor, values: StoredTensor, shape: tuple[int, int] | None) -> None:
    """Whether a tensor is a matrix of words, of this shape (None: any). Raises CheckpointError."""
    if part.dtype == WORD and (part.shape == shape or (shape is None and len(part.shape) == 2)):
        return
    wanted = f"{values.name} needs {WORD} of {shape}" if shape else f"{WORD} of rows and columns are known"
    raise CheckpointError(str(part.file), f"{part.name} has shape {part.shape} and dtype {part.dtype}: {wanted}")


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values of words that hold them from the lowest bits on: uint8 [rows, words x 32 / bits]."""
    # strides of a transposed vector are odd, though it is contiguous
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def wide(grid: torch.Tensor, group: int) -> torch.Tensor:
    """A number for each column of a number for each group of them."""
    return grid if grid.shape[-1] == 1 else grid.repeat_interleave(group, -1)
