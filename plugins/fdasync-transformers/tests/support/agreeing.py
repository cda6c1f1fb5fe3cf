"""Tiny checkpoints whose multi-token prediction layer is often right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.tiny.mtp import make_mtp_checkpoint
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path


def make_agreeing_checkpoint(
    folder: Path, family: str = "qwen3_moe", seed: int = 0, *, takes: float = 0.02, **overrides: Any
) -> None:
    """Random weights, of which attention and experts add little to a token's embedding, and a prediction layer that
    takes the embedding nearly alone: the model and its layer then often say the same of a token, and differ in the
    rest. `takes`: how much the layer takes of the hidden state."""
    make_mtp_checkpoint(
        folder, family, seed, apart=family == "qwen3_moe" and overrides.get("layers", 1) == 1, **overrides
    )
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in stored.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.08
        elif name.endswith((".eh_proj.weight", "mtp.fc.weight")):
            width = tensor.shape[0]
            stored[name] = torch.cat((torch.eye(width), takes * tensor[:, width:]), 1)
    save_file(stored, path, metadata={"format": "pt"})
