"""Recognises quantised checkpoints: what config.json says, and which stored tensors make one tensor of the model.

Turns the table of stored tensors into one with the names, shapes and dtypes that a plain checkpoint would have, so that
`mapping.py` needs to know nothing of quantisation. Reads no tensor data. Called by `loading.py`; `dequantize.py` does
the arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync.errors import CheckpointError, UnsupportedModel
from fdasync_transformers.weights.shards import FLOATS, Quantized, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
# float32, or powers of two as exponents of one byte
_FP8_SCALE_DTYPES = FLOATS | {"U8"}
_FP8_SCALES = "_scale_inv"
# of activations; the weights do not depend on them
_FP8_ACTIVATIONS = "activation_scale"
_DEFAULT_BLOCK = (128, 128)
_MXFP4_VALUES, _MXFP4_SCALES = "_blocks", "_scales"
# bytes of one MXFP4 block: 32 values of 4 bits, which share a scale
_MXFP4_BLOCK_NBYTES = 16
# the dtype in which a quantised tensor counts as stored
_UNPACKED = "BF16"


class Scheme(NamedTuple):
    """How a checkpoint is quantised.

    Attributes:
        name: for people, "FP8" or "MXFP4".
        block: rows and columns that share a scale of FP8; None: one scale for each matrix.
    """

    name: str
    block: tuple[int, int] | None = None


def read_scheme(raw: Mapping[str, Any], config_file: Path) -> Scheme | None:
    """The scheme that a config.json names; None for a plain checkpoint.

    Raises UnsupportedModel naming a quantisation that this loader does not know, CheckpointError for a bad value.
    """
    inner = raw.get("text_config")
    places = (raw, inner if isinstance(inner, dict) else {})
    found = [place.get(name) for place in places for name in ("quantization_config", "compression_config")]
    settings = next((value for value in found if value), None)
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(str(config_file), f"quantization_config is {settings!r}, not an object")
    method = settings.get("quant_method")
    if method == "mxfp4":
        return Scheme("MXFP4")
    if method != "fp8" or settings.get("expert_dtype", "fp8") != "fp8":
        name = _name_of(settings)
        raise UnsupportedModel(
            str(raw.get("model_type")),
            f"its weights are quantised with {name}; this loader dequantises fp8 and mxfp4, and not {name}: give the"
            " checkpoint that it was quantised from, or a copy dequantised to bfloat16",
        )
    block = settings.get("weight_block_size", _DEFAULT_BLOCK)
    if block is None:
        return Scheme("FP8")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(
            str(config_file), f"weight_block_size {block!r} is neither two positive integers nor null"
        )
    return Scheme("FP8", (block[0], block[1]))


def plain_table(table: Mapping[str, StoredTensor], scheme: Scheme) -> dict[str, StoredTensor]:
    """The tensors as a plain checkpoint would have them: those with scales become one, the others stay.

    Raises CheckpointError naming a tensor without its scales, or with scales that do not fit it.
    """
    joined = dict(table)
    for key, stored in table.items():
        if scheme.name == "MXFP4" and key.endswith(_MXFP4_VALUES) and stored.dtype == "U8":
            stem = key.removesuffix(_MXFP4_VALUES)
            scales_key = stem + _MXFP4_SCALES
            del joined[key]
            joined[stem] = _mxfp4(key, stored, scales_key, _scales_of(key, stored, scales_key, table))
        elif scheme.name == "FP8" and stored.dtype in _FP8_DTYPES:
            scales_key = key + _FP8_SCALES
            joined[key] = _fp8(key, stored, scales_key, _scales_of(key, stored, scales_key, table), scheme.block)
            joined.pop(f"{key.rpartition('.')[0]}.{_FP8_ACTIVATIONS}", None)
        else:
            continue
        joined.pop(scales_key)
    return joined


def _scales_of(key: str, stored: StoredTensor, scales_key: str, table: Mapping[str, StoredTensor]) -> StoredTensor:
    scales = table.get(scales_key)
    if scales is None:
        stem = key.rpartition(".")[0] + "."
        other = next((name for name in sorted(table) if name.startswith(stem) and name.endswith("scale")), None)
        hint = f" (it has {other}, of a layout that this loader does not know)" if other else ""
        problem = f"holds {key}, and no file of the folder holds its scales {scales_key}{hint}"
        raise CheckpointError(str(stored.file), problem)
    return scales


def _fp8(
    key: str, stored: StoredTensor, scales_key: str, scales: StoredTensor, block: tuple[int, int] | None
) -> StoredTensor:
    if len(stored.shape) not in (2, 3):
        raise CheckpointError(str(stored.file), f"{key} has shape {stored.shape}: scales need rows and columns")
    rows, columns = stored.shape[-2:]
    sides = block or (max(rows, 1), max(columns, 1))
    grid = (*stored.shape[:-2], math.ceil(rows / sides[0]), math.ceil(columns / sides[1]))
    one_of_one = grid == (1, 1) and math.prod(scales.shape) == 1
    if scales.dtype not in _FP8_SCALE_DTYPES or (scales.shape != grid and not one_of_one):
        raise CheckpointError(
            str(scales.file),
            f"{scales_key} has shape {scales.shape} and dtype {scales.dtype}: {key} of shape {stored.shape} in blocks"
            f" of {sides} needs float scales of shape {grid}",
        )
    return StoredTensor(key, stored.file, _UNPACKED, stored.shape, Quantized(key, scales_key, scales.file, sides))


def _mxfp4(key: str, stored: StoredTensor, scales_key: str, scales: StoredTensor) -> StoredTensor:
    if len(stored.shape) != 4 or stored.shape[-1] != _MXFP4_BLOCK_NBYTES:
        problem = f"{key} has shape {stored.shape}, not (experts, rows, blocks, {_MXFP4_BLOCK_NBYTES})"
        raise CheckpointError(str(stored.file), problem)
    if scales.dtype != "U8" or scales.shape != stored.shape[:-1]:
        raise CheckpointError(
            str(scales.file),
            f"{scales_key} has shape {scales.shape} and dtype {scales.dtype}: {key} needs U8 of {stored.shape[:-1]}",
        )
    experts, rows, blocks, _ = stored.shape
    # the library keeps these weights transposed
    shape = (experts, blocks * _MXFP4_BLOCK_NBYTES * 2, rows)
    return StoredTensor(key, stored.file, _UNPACKED, shape, Quantized(key, scales_key, scales.file))


def _name_of(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method == "fp8":
        return f"fp8 with experts in {settings.get('expert_dtype')}"
    if method is None and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        return "bitsandbytes"
    if method is None:
        return "a method that config.json does not name"
    layout = settings.get("format")
    return f"{method} ({layout})" if layout else str(method)
