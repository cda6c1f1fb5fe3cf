"""Checkpoint folders of `shapes`: how many layers fit, a config.json, and where asked quantised shards.

Shards are those of a published checkpoint: names and forms of tensors are the ones of the family on disk, and weights
are drawn on the device and quantised there. FP8: every matrix of the layers but routers, in blocks of 128 by 128 with
float32 scales. MXFP4: the experts. Knows the plugin's loader only as far as it reads a config. Used by
`child.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.shards import INDEX_FILE
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.lib.published_shapes import SHAPES, tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# of one file, as published ones have it
SHARD_NBYTES = 5 * 10**9
_STD = 0.02
_FP8_MOST = 448.0
# exponents of MXFP4 blocks under which random codes spread about as `_STD`
_MXFP4_EXPONENTS = (119, 122)


def write_config(folder: Path, name: str, nbytes: int, *, small: bool, quantised: bool = False) -> int:
    """config.json of a shape with as many layers as `nbytes` of plain weights have room for, and at least the fewest.
    Returns the number of layers."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)

    def write(layers: int) -> None:
        config = shape.cut(layers)
        config = tiny(config) if small else config
        if quantised:
            config["quantization_config"] = shape.quantised
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    least = shape.least_layers
    write(least)
    layers = least
    if not small:
        base = _nbytes(empty_model(folder))
        write(least + shape.period)
        period = _nbytes(empty_model(folder)) - base
        layers += shape.period * max(0, (nbytes - base) // period)
        layers = min(layers, shape.most_layers)
        write(layers)
    return layers


def empty_model(folder: Path) -> Any:
    """The folder's model in bfloat16, on the meta device."""
    checkpoint = loading.read_checkpoint(str(folder), with_tensors=False)
    return loading.build(checkpoint, "bfloat16")


def _nbytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.parameters())


def write_shards(folder: Path, device: torch.device) -> dict[str, int]:
    """Quantised weights for the folder's config. Returns the bytes of each file."""
    config = json.loads((folder / "config.json").read_text())
    random = torch.Generator(device).manual_seed(0)
    sizes: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(sizes) + 1:05}.safetensors"
        save_file(held, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
        sizes[file] = (folder / file).stat().st_size
        held.clear()

    for name, tensor in _stored(empty_model(folder), config["quantization_config"], random):
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > SHARD_NBYTES:
            flush()
        held[name] = tensor.cpu()
    flush()
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sizes


def _stored(model: Any, settings: dict[str, Any], random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the files, drawn one by one. Tensors tied to another are left out, as on disk."""
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in revert_weight_conversion(model, state).items():
        packed = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if settings["quant_method"] == "mxfp4" and packed:
            blocks, scales = _mxfp4(tuple(tensor.shape), random)
            yield f"{name}_blocks", blocks
            yield f"{name}_scales", scales
            continue
        drawn = _drawn(name, tensor, random)
        is_router = name.rpartition(".weight")[0].endswith((".gate", ".router"))
        if settings["quant_method"] == "fp8" and drawn.dim() == 2 and ".layers." in name and not is_router:
            values, factors = fp8_of(drawn, settings["weight_block_size"])
            yield name, values
            yield f"{name}_scale_inv", factors
        else:
            yield name, drawn


def _drawn(name: str, like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    if like.dim() > 1:
        return torch.empty(like.shape, dtype=like.dtype, device=random.device).normal_(0.0, _STD, generator=random)
    fill = 0.0 if name.endswith("bias") else 1.0
    return torch.full(like.shape, fill, dtype=like.dtype, device=random.device)


def fp8_of(tensor: torch.Tensor, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of a matrix and float32 scales of its blocks, of which the last ones may be cut off."""
    rows, columns = tensor.shape
    height, width = block
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % width, 0, -rows % height))
    grid = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scales = grid.abs().amax((1, 3)) / _FP8_MOST
    values = (grid / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def _mxfp4(shape: tuple[int, ...], random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and exponents for experts' weights [experts, columns, rows], which are packed by rows."""
    experts, columns, rows = shape
    packed = (experts, rows, columns // 32, 16)
    blocks = torch.randint(0, 256, packed, dtype=torch.uint8, device=random.device, generator=random)
    scales = torch.randint(*_MXFP4_EXPONENTS, packed[:-1], dtype=torch.uint8, device=random.device, generator=random)
    return blocks, scales
