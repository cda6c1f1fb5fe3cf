"""Where a model's MoE layers are, and what a row of their routing is. Called by `runner.py`, `capture.py`, others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.cache.aux import AuxSpec
from fdasync.errors import UnsupportedModel
from fdasync_transformers.families import expected_moe_layers, expected_top_k

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of a model.

    Attributes:
        ids: their hidden-layer numbers, rising.
        names: module name of each one's experts.
        num_experts: ids are below this number.
        top_k: ids per token of each layer.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    num_experts: int
    top_k: tuple[int, ...]

    @property
    def spec(self) -> AuxSpec:
        """Rows of the routing: [layers, max k], as narrow as the ids allow."""
        return AuxSpec("routing", (len(self.ids), max(self.top_k)), "uint8" if self.num_experts <= 256 else "uint16")


def find_moe_layers(model: PreTrainedModel) -> MoELayers | None:
    """The MoE layers, or None for a dense model.

    Raises UnsupportedModel where the modules found and the layers that the config names differ.
    """
    config: PreTrainedConfig = model.config
    name = str(config.model_type)
    expected = expected_moe_layers(config)
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for path, module in model.named_modules():
        if not path.endswith(".experts") or not any(p.dim() == 3 for p in module.parameters(recurse=False)):
            continue
        layer = _LAYER.search(path)
        number = int(layer.group(1)) if layer else -1
        if number < 0 or number in found:
            raise UnsupportedModel(name, f"cannot tell the layer of the experts at {path}")
        found[number] = (path, module)
    if tuple(sorted(found)) != expected:
        raise UnsupportedModel(
            name, f"its config names MoE layers {list(expected)}, experts modules are at {sorted(found)}"
        )
    if not found:
        return None
    modules = [module for _, (_, module) in sorted(found.items())]
    num_experts = max(p.shape[0] for module in modules for p in module.parameters(recurse=False) if p.dim() == 3)
    if num_experts > 2**15:
        raise UnsupportedModel(name, f"{num_experts} experts are more than a row can name")
    return MoELayers(
        ids=expected,
        names=tuple(path for _, (path, _) in sorted(found.items())),
        num_experts=num_experts,
        top_k=expected_top_k(config, expected),
    )
