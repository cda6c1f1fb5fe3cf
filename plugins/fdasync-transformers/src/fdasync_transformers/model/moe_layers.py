"""Finds a model's MoE layers, and the shape of a row of their routing.

Knows configs and modules of the library; knows nothing of steps. Called by `runner.py`, `runner_config.py` and the
producers of aux data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.cache.aux import AuxSpec
from fdasync.errors import UnsupportedModel
from fdasync_transformers.model.families import expected_moe_layers, expected_top_k

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of a model.

    Attributes:
        ids: hidden-layer numbers, rising.
        names: module name of each layer's experts.
        num_experts: expert ids are below this number.
        top_k: experts per token of each layer.
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

    Raises UnsupportedModel where the layers of the modules and of the config differ.
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


def router_of_dense_experts(model: PreTrainedModel, experts: str) -> torch.nn.Module | None:
    """The router beside experts that compute all experts and so take no ids (llama 4); None beside other experts."""
    if "Llama4" not in type(model.get_submodule(experts)).__name__:
        return None
    return model.get_submodule(experts.removesuffix("experts") + "router")
