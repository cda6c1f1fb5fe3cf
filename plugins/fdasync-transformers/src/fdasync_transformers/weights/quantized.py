"""Recognises quantised checkpoints: what config.json says, and which stored tensors make one tensor of the model.

Turns the table of stored tensors into one with the names, shapes and dtypes that a plain checkpoint would have, so that
`mapping.py` needs to know nothing of quantisation. Reads no tensor data. Called by `loading.py` and by `verify`; the
layouts do the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync.errors import CheckpointError, UnsupportedModel
from fdasync_transformers.weights.layouts import config_groups
from fdasync_transformers.weights.layouts.scaled import FP8_SCALES, Mxfp4, Scaled
from fdasync_transformers.weights.layouts.transposed import Awq, Gptq
from fdasync_transformers.weights.shards import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fdasync_transformers.weights.layouts.scaled import Block
    from fdasync_transformers.weights.shards import Layout, StoredTensor

_DEFAULT_BLOCK = (128, 128)
_MODELOPT_FILE = "hf_quant_config.json"
# of activations and of the KV cache; the weights do not depend on them
_NOT_WEIGHTS = frozenset(
    {"activation_scale", "input_scale", "input_zero_point", "output_scale", "output_zero_point"}
    | {"q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"}
)


class Scheme(NamedTuple):
    """How a checkpoint is quantised.

    Attributes:
        name: for people, as "FP8".
        layouts: that its tensors may have.
    """

    name: str
    layouts: tuple[Layout, ...]


class _Unread(Exception):
    """The settings name a quantisation that this loader does not know; its argument is the name for people."""


def read_scheme(raw: Mapping[str, Any], config_file: Path) -> Scheme | None:
    """The scheme that a config.json names; None for a plain checkpoint.

    Raises UnsupportedModel naming a quantisation that this loader does not know, CheckpointError for a bad value.
    """
    inner = raw.get("text_config")
    places = (raw, inner if isinstance(inner, dict) else {})
    found = [place.get(name) for place in places for name in ("quantization_config", "compression_config")]
    settings = next((value for value in found if value), None) or _beside(config_file)
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(str(config_file), f"quantization_config is {settings!r}, not an object")
    try:
        return _METHODS.get(str(settings.get("quant_method")), _unknown)(settings)
    except _Unread as error:
        raise UnsupportedModel(
            str(raw.get("model_type")),
            f"its weights are quantised with {error}; this loader dequantises {', '.join(_METHODS)}, and not {error}:"
            " give the checkpoint that it was quantised from, or a copy dequantised to bfloat16",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            str(config_file), f"its quantization_config cannot be read: {type(error).__name__}: {error}"
        ) from None


def plain_table(table: Mapping[str, StoredTensor], scheme: Scheme) -> dict[str, StoredTensor]:
    """The tensors as a plain checkpoint would have them: those with scales become one, the others stay.

    Raises CheckpointError naming a tensor without its scales, or with scales that do not fit it.
    """
    plain = {key: stored for key, stored in table.items() if key.rpartition(".")[2] not in _NOT_WEIGHTS}
    for key, stored in table.items():
        for layout in scheme.layouts:
            made = layout.join(key, stored, table)
            if made is None or made.quantized is None:
                continue
            for part in made.quantized.parts.values():
                plain.pop(part.name, None)
            if made.name in plain:
                raise CheckpointError(str(stored.file), f"holds {key}, and {plain[made.name].file.name} {made.name}")
            plain[made.name] = made
            break
    return plain


def _beside(config_file: Path) -> dict[str, Any] | None:
    """The settings that modelopt's older checkpoints have in a file of their own. Raises CheckpointError."""
    path = config_file.with_name(_MODELOPT_FILE)
    if not path.exists():
        return None
    settings = read_json(path).get("quantization")
    return {"quant_method": "modelopt", **settings} if isinstance(settings, dict) else None


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    experts = settings.get("expert_dtype", "fp8")
    if experts != "fp8":
        raise _Unread(f"fp8 with experts in {experts}")
    block = settings.get("weight_block_size", _DEFAULT_BLOCK)
    sides: Block = (None, None)
    if block is not None:
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ValueError(f"weight_block_size {block!r} is neither two positive integers nor null")
        sides = (block[0], block[1])
    # DeepSeek's own files say `.scale`
    names = ("_scale_inv", ".scale")
    return Scheme("FP8", (Scaled(("F8_E4M3", "F8_E5M2"), names, FP8_SCALES, (sides,), torch.float32),))


def _mxfp4(_: Mapping[str, Any]) -> Scheme:
    return Scheme("MXFP4", (Mxfp4(),))


def _compressed(settings: Mapping[str, Any]) -> Scheme:
    read = config_groups.layouts_of(settings)
    if isinstance(read, config_groups.Unread):
        raise _Unread(f"compressed-tensors ({read.what})")
    return Scheme(*read)


def _awq(settings: Mapping[str, Any]) -> Scheme:
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if layout != "gemm" or settings.get("backend") == "llm-awq":
        raise _Unread(f"awq ({layout})" if layout != "gemm" else "awq (llm-awq)")
    if bits != 4:
        raise _Unread(f"awq of {bits} bits")
    return Scheme("AWQ", (Awq(_group(settings.get("group_size", settings.get("q_group_size", 128)))),))


def _gptq(settings: Mapping[str, Any]) -> Scheme:
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    bits = settings.get("bits")
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise _Unread(f"gptq ({layout if layout not in ('gptq', 'gptq_v2') else 'marlin'})")
    if bits not in (4, 8):
        raise _Unread(f"gptq of {bits} bits")
    group = _group(settings.get("group_size", 128))
    return Scheme("GPTQ", (Gptq(bits, group, layout == "gptq"),))


def _modelopt(settings: Mapping[str, Any]) -> Scheme:
    algorithm = settings.get("quant_algo")
    if algorithm is None and "quant_algo" in settings:
        # of the KV cache alone
        return Scheme("modelopt", ())
    if algorithm != "FP8":
        raise _Unread(f"modelopt ({algorithm})")
    return Scheme("modelopt (FP8)", (Scaled(("F8_E4M3",), ("_scale",), frozenset({"F32"}), ((None, None),), None),))


def _group(value: Any) -> int | None:
    """Columns that share a scale; None: all, which is stored as -1."""
    if type(value) is not int or (value <= 0 and value != -1):
        raise ValueError(f"group_size {value!r} is neither a positive integer nor -1")
    return value if value > 0 else None


def _unknown(settings: Mapping[str, Any]) -> Scheme:
    method = settings.get("quant_method")
    if method is None and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        raise _Unread("bitsandbytes")
    if method is None:
        raise _Unread("a method that config.json does not name")
    layout = settings.get("format") or settings.get("quant_algo")
    raise _Unread(f"{method} ({layout})" if layout else str(method))


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
