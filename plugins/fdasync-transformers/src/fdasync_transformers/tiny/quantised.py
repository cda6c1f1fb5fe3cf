"""Makes quantised checkpoints of plain ones, with loops and numpy alone, and the plain ones that they stand for.

Slow and obvious: it is what the loader's dequantising is compared with. Knows tensors by their names on disk. Called by
`checkpoints.py` and by tests.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fdasync_transformers.tiny.packed_forms import FORMS
from fdasync_transformers.weights.shards import SINGLE_FILE

if TYPE_CHECKING:
    from pathlib import Path

# divides every side of the tiny models' matrices
FP8_BLOCK = (4, 8)
# the values of four bits: sign, two bits of exponent, one of mantissa
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def quantise(
    plain: Path,
    quantised: Path,
    how: str,
    *,
    block: tuple[int, int] = FP8_BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a quantised checkpoint of a plain one of one shard, and make the plain one what it stands for.

    Args:
        plain: its tensors are replaced by the values that the stored ones stand for.
        quantised: the folder to write.
        how: "fp8": the layers' matrices but for routers, as published checkpoints have it; "mxfp4": the fused experts
            of gpt_oss; or a name of `FORMS`.
        block: rows and columns of an FP8 scale.
        dtype: of the replaced tensors.
    """
    tensors = load_file(plain / SINGLE_FILE)
    stored = dict(tensors)
    settings: dict[str, Any]
    if how == "fp8":
        for name, tensor in tensors.items():
            if _is_matrix(name, tensor):
                values, scales = fp8_of(tensor, block)
                stored[name], stored[f"{name}_scale_inv"] = values, scales
                tensors[name] = plain_of_fp8(values, scales, block).to(dtype)
        settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        settings["weight_block_size"] = list(block)
    elif how in FORMS:
        form = FORMS[how]
        settings = form.settings
        for name, tensor in tensors.items():
            if _is_matrix(name, tensor) and form.only in name:
                parts, made = form.write(tensor)
                del stored[name]
                stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
                tensors[name] = made.to(dtype)
    else:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = mxfp4_of(tensors[name])
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            tensors[name] = plain_of_mxfp4(blocks, scales).to(dtype)
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    quantised.mkdir(parents=True, exist_ok=True)
    for path in plain.glob("*.json"):
        (quantised / path.name).write_bytes(path.read_bytes())
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(stored, quantised / SINGLE_FILE, {"format": "pt"})
    save_file(tensors, plain / SINGLE_FILE, {"format": "pt"})


def fp8_of(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of a matrix, and float32 scales of its blocks; the last blocks may be cut off."""
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


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and ".layers." in name and name.endswith("weight") and ".gate." not in name


def _block(i: int, j: int, block: tuple[int, int]) -> tuple[slice, slice]:
    return slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
