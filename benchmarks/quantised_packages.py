"""Compares the tiny quantised checkpoints, and what the loader makes of them, with the packages of their layouts.

For each form of `fdasync_transformers.tiny.packed_forms` a tiny qwen3_moe is written. Then the package packs the same
matrices with the same scales and zero points, and dequantises what is stored:

    matrices            that are stored so
    other_bytes         of these, whose stored parts differ from those that the package packs
    other_values        tensors of the model, in bfloat16, float16 and float32 together, that differ in a bit from those
                        of the package's own dequantising

It needs compressed-tensors, gptqmodel and nvidia-modelopt, which neither the plugin nor its tests need. The exit status
is 0 where nothing differs.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.tiny.packed_forms import FORMS, Form
from fdasync_transformers.tiny.quantised import quantise
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.shards import SINGLE_FILE
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable

_Parts = dict[str, torch.Tensor]
_DTYPES = ("bfloat16", "float16", "float32")
# gptqmodel knows no groups of fewer columns
_GROUP = 16


def main() -> int:
    """Play every form, and print a line for each."""
    different = 0
    for name, form in [*FORMS.items()]:
        if form.settings["quant_method"] in ("awq", "gptq"):
            FORMS[name] = Form(partial(form.write, group=_GROUP), {**form.settings, "group_size": _GROUP}, form.only)
        matrices, other_bytes, other_values = _play(name)
        different += other_bytes + other_values
        print(f"{name}: matrices={matrices} other_bytes={other_bytes} other_values={other_values}", flush=True)
    return 1 if different else 0


def _play(name: str) -> tuple[int, int, int]:
    settings = FORMS[name].settings
    package = _PACKAGES[settings["quant_method"]]
    with tempfile.TemporaryDirectory(prefix="fdasync-packages-") as folder:
        plain, quantised = Path(folder, "plain"), Path(folder, "quantised")
        make_tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(plain)
        quantise(plain, quantised, name)
        tensors = load_file(quantised / SINGLE_FILE)
        ends = ("qweight", "weight_packed", "weight_scale")
        modules = sorted({key.rpartition(".")[0] for key in tensors if key.rpartition(".")[2] in ends})
        other_bytes = other_values = 0
        for module in modules:
            names = [key for key in tensors if key.rpartition(".")[0] == module]
            parts = {key.rpartition(".")[2]: tensors.pop(key) for key in names}
            parts.pop("input_scale", None)
            tensors[f"{module}.weight"], packed = package(parts, settings)
            other_bytes += not _equal(packed, parts)
        for dtype in _DTYPES:
            rounded = {key: tensor.to(getattr(torch, dtype)).contiguous() for key, tensor in tensors.items()}
            save_file(rounded, plain / SINGLE_FILE, {"format": "pt"})
            ours, theirs = (_load(folder, dtype) for folder in (quantised, plain))
            other_values += sum(not torch.equal(ours[key], theirs[key]) for key in theirs)
    return len(modules), other_bytes, other_values


def _load(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    return loading.load(loading.read_checkpoint(str(folder)), dtype, torch.device("cpu")).state_dict()


def _equal(one: _Parts, other: _Parts) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(_bytes(tensor), _bytes(other[name]))
        for name, tensor in one.items()
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


# -- the packages: the plain matrix of stored parts, and the parts that they pack of it ---------------


def _compressed_tensors(parts: _Parts, settings: dict[str, Any]) -> tuple[torch.Tensor, _Parts]:
    package: Any = import_module("compressed_tensors")
    compressors, quantization = (
        import_module(f"{package.__name__}.{name}") for name in ("compressors", "quantization")
    )
    scheme = quantization.QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(settings["format"])
    # scales in float32, so that the matrix is exact and packs into the same integers
    scales = {"weight_scale": parts["weight_scale"].float()}
    unpacked = compressor.decompress({**parts, **scales}, scheme)
    state = {"weight": unpacked["weight"], **scales}
    if "weight_zero_point" in parts:
        state["weight_zero_point"] = unpacked["weight_zero_point"].contiguous()
    packed = {**compressor.compress(state, scheme), "weight_scale": parts["weight_scale"]}
    return compressor.decompress(parts, scheme)["weight"], packed


def _gptq(parts: _Parts, settings: dict[str, Any]) -> tuple[torch.Tensor, _Parts]:
    linears: Any = import_module("gptqmodel.nn_modules.qlinear.torch")
    formats: Any = import_module("gptqmodel.utils.model")
    bits, first = settings["bits"], settings["checkpoint_format"] == "gptq"
    columns, rows = parts["g_idx"].numel(), parts["scales"].shape[1]
    sizes = {"bits": bits, "group_size": settings["group_size"], "sym": settings["sym"]}
    sizes |= {"desc_act": settings["desc_act"], "in_features": columns, "out_features": rows}
    stored, made = (linears.TorchLinear(**sizes, register_buffers=True) for _ in range(2))
    for name, part in parts.items():
        getattr(stored, name).data = part.clone()
    stored.qzero_format(format=1 if first else 2)
    if first:
        formats.convert_gptq_v1_to_v2_format_module(stored, bits, torch.int32)
    stored.eval()
    places = torch.arange(0, 32, bits)
    zeros = (stored.qzeros.unsqueeze(-1) >> places & 2**bits - 1).flatten(-2)[:, :rows]
    codes = (parts["qweight"].unsqueeze(1) >> places[:, None] & 2**bits - 1).flatten(0, 1)[:columns]
    groups = parts["g_idx"].long()
    matrix = (codes - zeros[groups]).double() * parts["scales"].double()[groups]
    made.pack_original(_linear(matrix.T), parts["scales"].double().T, zeros.double().T, parts["g_idx"])
    made.qzero_format(format=2)
    if first:
        formats.convert_gptq_v2_to_v1_format_module(made, _Bits(bits))
    return stored.dequantize_weight().T, {name: getattr(made, name).data for name in parts}


def _awq(parts: _Parts, settings: dict[str, Any]) -> tuple[torch.Tensor, _Parts]:
    packing: Any = import_module("gptqmodel.quantization.awq.utils.packing_utils")
    linears: Any = import_module("gptqmodel.nn_modules.qlinear.torch_awq")
    group = settings["group_size"]
    plain = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, group)
    unpacked = packing.reverse_awq_order(*packing.unpack_awq(parts["qweight"], parts["qzeros"], 4), 4)
    codes, zeros = (part & 15 for part in unpacked)
    columns, rows = codes.shape
    groups = torch.arange(columns) // group
    matrix = (codes - zeros[groups]).double() * parts["scales"].double()[groups]
    made = linears.AwqTorchLinear(
        bits=4,
        group_size=group,
        sym=False,
        desc_act=False,
        in_features=columns,
        out_features=rows,
        register_buffers=True,
    )
    made.pack(_linear(matrix.T), parts["scales"].T, zeros.half().T)
    return plain.T, {name: getattr(made, name).data for name in parts}


def _modelopt(parts: _Parts, _: dict[str, Any]) -> tuple[torch.Tensor, _Parts]:
    package: Any = import_module("modelopt.torch.quantization.qtensor.fp8_tensor")
    matrix = parts["weight"].double() * parts["weight_scale"].double()
    packed, scale = package.FP8QTensor.quantize(matrix, parts["weight_scale"])
    plain = package.FP8QTensor(matrix.shape, torch.float32, parts["weight"])
    # in float32: it rounds the scale to the dtype that it is asked for
    made = plain.dequantize(torch.float32, scale=parts["weight_scale"])
    return made, {"weight": packed._quantized_data, "weight_scale": scale}


class _Bits:
    """What gptqmodel reads of a config here."""

    def __init__(self, bits: int) -> None:
        self.bits = self.runtime_bits = bits
        self.pack_dtype = torch.int32


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.contiguous()
    return linear


_PACKAGES: dict[str, Callable[[_Parts, dict[str, Any]], tuple[torch.Tensor, _Parts]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}

if __name__ == "__main__":
    sys.exit(main())
