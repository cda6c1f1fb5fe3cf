"""Makes and damages quantised checkpoints of tiny families, and the plain ones that they stand for."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.tiny.quantised import FP8_BLOCK, quantise
from fdasync_transformers.weights.shards import INDEX_FILE, SINGLE_FILE
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def make_fp8(
    quantised: Path, plain: Path, family: str, seed: int = 0, block: tuple[int, int] = FP8_BLOCK, **overrides: Any
) -> None:
    """A checkpoint whose layers' matrices are FP8 (routers and embeddings are not), and its plain form in bfloat16."""
    _write(quantised, plain, family, seed, "fp8", torch.bfloat16, block, overrides)


def make_mxfp4(quantised: Path, plain: Path, seed: int = 0, **overrides: Any) -> None:
    """A gpt_oss checkpoint whose experts are MXFP4, and its plain form in bfloat16."""
    _write(quantised, plain, "gpt_oss_mxfp4", seed, "mxfp4", overrides=overrides)


def make_form(
    quantised: Path, plain: Path, how: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> None:
    """A qwen3_moe checkpoint in a form of `FORMS`, and its plain form."""
    _write(quantised, plain, "qwen3_moe", seed, how, dtype, overrides=overrides)


def _write(
    quantised: Path,
    plain: Path,
    family: str,
    seed: int,
    how: str,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] = FP8_BLOCK,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    made = _made(family, seed, how, dtype, block, json.dumps(overrides or {}))
    for folder, files in zip((quantised, plain), made, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)


@cache
def _made(
    family: str, seed: int, how: str, dtype: torch.dtype, block: tuple[int, int], overrides: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of both folders: many tests damage the same checkpoint, each a fresh one, and quantising is slow."""
    with TemporaryDirectory() as folder:
        quantised, plain = Path(folder, "quantised"), Path(folder, "plain")
        make_tiny_model(family, seed, **json.loads(overrides)).to(torch.bfloat16).save_pretrained(plain)
        quantise(plain, quantised, how, dtype=dtype, block=block)
        first, second = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (quantised, plain))
        return first, second


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
