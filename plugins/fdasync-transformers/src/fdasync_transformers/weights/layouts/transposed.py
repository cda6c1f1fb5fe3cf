"""The layouts of AWQ and GPTQ, which store matrices transposed, in words of 4 or 8 bits a value.

AWQ packs along a stored row, GPTQ along a stored column. Both are (value - zero point) x scale in the dtype of the
scales, as their packages have it, bit for bit. Knows tensors by their names on disk, neither configs nor models. Made
by `quantized.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.layouts.packed import WORD, WORD_BITS, check_words, unpacked, wide
from fdasync_transformers.weights.layouts.scaled import FLOAT_SCALES, joined, part_of, quantized_of, scaled
from fdasync_transformers.weights.shards import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from fdasync_transformers.weights.open_shards import OpenShards
    from fdasync_transformers.weights.shards import StoredTensor

# where AWQ has the values of a word: column 0 in the lowest bits, then column 2
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# GPTQ's first version stores zero points less 1: its packages add 1 to each of a word's, which carries
_ONES = {4: 0x11111111, 8: 0x01010101}


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
        check_words(stored, stored, None)
        columns, rows = stored.shape[0], stored.shape[1] * WORD_BITS // 4
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
        scales, zeros = (wide(grid, group)[:, :columns] for grid in (scales, zeros))
        return scaled(values, scales, zeros, None, like.dtype)


@dataclass(frozen=True)
class Gptq(Layout):
    """GPTQ's layout: MODULE.qweight [columns x bits / 32, rows], .qzeros and .scales for groups of columns, .g_idx.

    `g_idx` has the group of each column; without it columns are in the order of their groups.

    Attributes:
        bits: of the config; a tensor with `g_idx` has as many as follow from its shape.
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
        check_words(stored, stored, None)
        words, rows = stored.shape
        order = table.get(f"{stem}.g_idx")
        bits, columns = self.bits, words * WORD_BITS // self.bits
        if order is not None:
            fits = [bits for bits in _ONES if order.shape and math.ceil(order.shape[0] * bits / WORD_BITS) == words]
            if order.dtype != WORD or len(order.shape) != 1 or len(fits) != 1:
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
        values = unpacked(words.T, bits)[:, :columns]
        added = _ONES[bits] if self.less_one else 0
        zeros = _packed_columns(shards, parts["zeros"], bits, first, last, like.device, None, added).T
        scales = shards.columns(parts["scales"].file, parts["scales"].name, first, last).to(like.device).T
        if "order" not in parts:
            scales, zeros = (wide(grid, quantized.block[1])[:, :columns] for grid in (scales, zeros))
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
    check_words(zeros, values, (grid[0], math.ceil(grid[1] * bits / WORD_BITS)))
    return {"values": values, "scales": scales, "zeros": zeros}


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
    a_word = WORD_BITS // bits
    word, end = first // a_word, math.ceil(last / a_word)
    words = shards.columns(part.file, part.name, word, end).to(device)
    values = unpacked(words + added if added else words, bits)
    if places is not None:
        values = values.reshape(len(values), -1, a_word)[..., list(places)].flatten(-2)
    return values[:, first - word * a_word : last - word * a_word]
