"""Makes tiny checkpoints with multi-token prediction (MTP) layers, named as the hub's are.

The library writes no such layers, so they are added to a checkpoint of `checkpoints.py`. Knows nothing of engines.
Called by tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from fdasync_transformers.mtp.head import MtpHead, attach
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, randomise

if TYPE_CHECKING:
    import os

_FILE = "model.safetensors"
# the first layer's parts, where they are stored apart
_APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}


def make_mtp_checkpoint(
    folder: str | os.PathLike[str],
    family: str,
    seed: int = 0,
    *,
    layers: int = 1,
    told: bool = True,
    apart: bool = False,
    **overrides: Any,
) -> Any:
    """As `make_tiny_checkpoint`, with MTP layers, which the returned model has as `mtp`.

    Args:
        folder, family, seed, overrides: as there.
        layers: how many.
        told: the config tells how many.
        apart: store them under `mtp.` in place of numbering them on; one layer alone.
    """
    values = {"num_nextn_predict_layers": layers, **overrides} if told else overrides
    model = make_tiny_checkpoint(folder, family, seed, **values)
    attach(model, layers, torch.float32)
    head: MtpHead = model.mtp.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in sorted(head.state_dict(keep_vars=True).items()):
            # norms begin at 1
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            randomise(name, tensor, torch.randn(tensor.shape, generator=generator))
    path = Path(folder) / _FILE
    stored = load_file(path)
    for name, tensor in head.state_dict().items():
        for key, part in _parts(name, tensor):
            stored[_stored_name(key, int(model.config.num_hidden_layers), apart)] = part.clone()
    if not apart:
        for number in range(layers):
            place = f"model.layers.{model.config.num_hidden_layers + number}"
            stored[f"{place}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
            stored[f"{place}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(stored, path, metadata={"format": "pt"})
    return model


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a tensor is stored as: one for each expert and projection."""
    place, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        return [
            (f"{place}.{expert}.{part}.weight", half)
            for expert, both in enumerate(tensor)
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
        ]
    if last == "down_proj":
        return [(f"{place}.{expert}.down_proj.weight", one) for expert, one in enumerate(tensor)]
    return [(name, tensor)]


def _stored_name(name: str, hidden_layers: int, apart: bool) -> str:
    _, number, rest = name.split(".", 2)
    if apart:
        part = rest.partition(".")[0]
        if part in _APART:
            return rest.replace(part, _APART[part], 1)
        return f"mtp.layers.{number}.{rest.removeprefix('mtp_block.')}"
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", 1)
    return f"model.layers.{hidden_layers + int(number)}.{rest}"
