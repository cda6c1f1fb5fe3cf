"""Makes quantised checkpoints of plain ones, and the plain ones that they stand for, with loops and numpy alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from families_zoo import make_model
from fdasync_transformers.weights.shards import INDEX_FILE, SINGLE_FILE
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# divides every side of the tiny models' matrices
FP8_BLOCK = (4, 8)
# the values of four bits: sign, two bits of exponent, one of mantissa
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
# MXFP4 blocks have 32 columns
MXFP4_SIZES = {"hidden_size": 64, "intermediate_size": 64}


def make_fp8(
    quantised: Path, plain: Path, family: str, seed: int = 0, block: tuple[int, int] = FP8_BLOCK, **overrides: Any
) -> None:
    """A checkpoint whose layers' matrices are FP8 (routers and embeddings are not), and its plain form in bfloat16."""
    tensors = _save(plain, family, seed, overrides)
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name and name.endswith("weight") and "mlp.gate." not in name:
            values, scales = fp8_of(tensor, block)
            stored[name], stored[f"{name}_scale_inv"] = values, scales
            tensors[name] = plain_of_fp8(values, scales, block).bfloat16()
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    _write(quantised, plain, stored, tensors, settings)


def make_mxfp4(quantised: Path, plain: Path, seed: int = 0) -> None:
    """A gpt_oss checkpoint whose experts are MXFP4, and its plain form in bfloat16."""
    tensors = _save(plain, "gpt_oss", seed, MXFP4_SIZES)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4_of(tensors[name])
        del stored[name]
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = plain_of_mxfp4(blocks, scales).bfloat16()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    _write(quantised, plain, stored, tensors, settings)


def fp8_of(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of a matrix, and float32 scales of its blocks, of which the last ones may be cut off."""
    rows, columns = tensor.shape
    values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = _block(i, j, block)
            piece = tensor[where].float()
            scales[i, j] = piece.abs().max() / 448
            values[where] = (piece / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def plain_of_fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What the values stand for, in float32."""
    made = torch.empty(values.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = _block(i, j, block)
            made[where] = values[where].float() * scales[i, j].float()
    return made


def mxfp4_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values and exponents of experts' weights [experts, columns, rows], which are packed by rows."""
    numbers = tensor.float().numpy().transpose(0, 2, 1)
    grouped = numbers.reshape(*numbers.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(grouped).max(-1))).astype(np.int32) - 2
    scaled = grouped / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - FP4).argmin(-1).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(packed).contiguous(), torch.from_numpy((exponents + 127).astype(np.uint8)).contiguous()


def plain_of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the packed values stand for, in float32: [experts, columns, rows]."""
    packed, exponents = blocks.numpy(), scales.numpy().astype(np.int32) - 127
    experts, rows, groups, _ = packed.shape
    made = np.empty((experts, rows, groups, 32), np.float32)
    made[..., 0::2], made[..., 1::2] = FP4[packed & 15], FP4[packed >> 4]
    made *= np.exp2(exponents.astype(np.float32))[..., None]
    return torch.from_numpy(made.reshape(experts, rows, groups * 32).transpose(0, 2, 1).copy())


def split(folder: Path, of_second: Iterable[str]) -> None:
    """Move tensors whose names end so to a second shard."""
    tensors = load_file(folder / SINGLE_FILE)
    ends = tuple(of_second)
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    weight_map = {name: "b.safetensors" if name.endswith(ends) else "a.safetensors" for name in tensors}
    for name, file in weight_map.items():
        shards[file][name] = tensors[name]
    (folder / SINGLE_FILE).unlink()
    for file, held in shards.items():
        save_file(held, folder / file, {"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, **changed: torch.Tensor | None) -> None:
    """Replace tensors of a folder of one file, or take them away (None)."""
    tensors = {**load_file(folder / SINGLE_FILE), **changed}
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(held, folder / SINGLE_FILE, {"format": "pt"})


def set_quantization(folder: Path, **values: Any) -> None:
    """Change keys of the folder's quantization_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **values}
    path.write_text(json.dumps(config))


def _block(i: int, j: int, block: tuple[int, int]) -> tuple[slice, slice]:
    return slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])


def _save(folder: Path, family: str, seed: int, overrides: dict[str, Any]) -> dict[str, torch.Tensor]:
    make_model(family, seed, **overrides).to(torch.bfloat16).save_pretrained(folder)
    return load_file(folder / SINGLE_FILE)


def _write(
    quantised: Path, plain: Path, stored: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], settings: Any
) -> None:
    quantised.mkdir(parents=True)
    for path in plain.glob("*.json"):
        (quantised / path.name).write_bytes(path.read_bytes())
    set_quantization(quantised, **settings)
    save_file(stored, quantised / SINGLE_FILE, {"format": "pt"})
    save_file(tensors, plain / SINGLE_FILE, {"format": "pt"})
