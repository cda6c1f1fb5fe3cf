"""Reads the config of compressed-tensors: which layouts its groups say that the stored tensors have.

Which tensor belongs to which group follows from the tensors: targets and `ignore` are not read. Called by
`quantized.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync_transformers.weights.layouts.packed import PackedKind, PackedRows
from fdasync_transformers.weights.layouts.scaled import FLOAT_SCALES, Scaled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.weights.layouts.scaled import Block
    from fdasync_transformers.weights.shards import Layout

_PACKED = "pack-quantized"
# values of one byte each; the formats differ in what they say of activations
_BYTES = ("float-quantized", "int-quantized", "naive-quantized")
_PLAIN = "dense"


class Unread(NamedTuple):
    """A config that is not read: what it has, for people."""

    what: str


def layouts_of(settings: Mapping[str, Any]) -> tuple[str, tuple[Layout, ...]] | Unread:
    """What the quantisation is called and its layouts. Raises TypeError, ValueError, KeyError and
    AttributeError for a config of other types than the format has."""
    for key in ("sparsity_config", "transform_config"):
        inner = settings.get(key) or {}
        told = inner.get("format", _PLAIN) if key == "sparsity_config" else "transforms" if inner else _PLAIN
        if told != _PLAIN:
            return Unread(told)
    formats: set[str] = set()
    blocks: dict[Block, None] = {}
    kinds: dict[PackedKind, None] = {}
    for group in settings["config_groups"].values():
        how, weights = group.get("format") or settings.get("format"), group.get("weights")
        if weights is None or how == _PLAIN:
            continue
        read = _read_weights(str(how), weights)
        if isinstance(read, Unread):
            return read
        formats.add(str(how))
        if isinstance(read, PackedKind):
            kinds[read] = None
        else:
            blocks[read] = None
    layouts: list[Layout] = []
    if blocks:
        layouts.append(Scaled(("F8_E4M3", "I8"), ("_scale",), FLOAT_SCALES, tuple(blocks), None, "_zero_point"))
    if kinds:
        layouts.append(PackedRows(tuple(kinds)))
    return f"compressed-tensors ({', '.join(sorted(formats))})", tuple(layouts)


def _read_weights(how: str, weights: Mapping[str, Any]) -> PackedKind | Block | Unread:
    """A group's kind (packed) or block (bytes)."""
    bits, number = int(weights.get("num_bits", 8)), weights.get("type", "int")
    if how != _PACKED and how not in _BYTES:
        return Unread(how)
    if (bits, number) not in {(4, "int"), (8, "int")} | ({(8, "float")} if how in _BYTES else set()):
        return Unread(f"{how} of {bits}-bit {number}")
    if weights.get("actorder") in ("group", "dynamic"):
        return Unread(f"{how} with columns in an order of their own")
    group = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if group is None else "group" if int(group) > 0 else "channel")
    blocks: dict[str, Block] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "group":
        blocks["group"] = (1, _side(group))
    elif strategy == "block" and how in _BYTES:
        height, width = weights["block_structure"]
        blocks["block"] = (_side(height), _side(width))
    if strategy not in blocks:
        return Unread(f"{how} by {strategy}")
    block = blocks[strategy]
    return PackedKind(bits, block, bool(weights.get("symmetric", True))) if how == _PACKED else block


def _side(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{value!r} is no number of rows or columns")
    return value
