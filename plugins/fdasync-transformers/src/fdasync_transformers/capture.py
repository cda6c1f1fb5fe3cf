"""Expert routing, captured where it takes effect: at the input of each experts module.

A forward pre-hook copies the ids that the experts are about to use into one preallocated buffer
[max_step_tokens, layers, max k], so what is recorded is what was computed - never a recomputation.
Shared experts and dense layers are no routing. Knows no sequences. Called by `runner.py` and `step.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync.cache.aux import AuxSpec
from fdasync.errors import RunnerError, UnsupportedModel
from fdasync_transformers.families import expected_moe_layers, expected_top_k

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle
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


class RoutingCapture:
    """Hooks on a model, and the buffer they fill; one per runner, removed by `close`."""

    def __init__(self, model: PreTrainedModel, layers: MoELayers, max_step_tokens: int) -> None:
        self.layers = layers
        dtype = torch.uint8 if layers.spec.dtype == "uint8" else torch.int16
        shape = (max_step_tokens, *layers.spec.shape)
        # columns past a layer's own k stay zero for ever
        self._buffer = torch.zeros(shape, dtype=dtype, device=model.device)
        self._filled = 0
        self._hooks: list[RemovableHandle] = []
        for row, (name, k) in enumerate(zip(layers.names, layers.top_k, strict=True)):
            self._hooks.append(self._attach(model.get_submodule(name), model, name, row, k))

    def begin(self) -> None:
        """Call before a forward pass."""
        self._filled = 0

    def rows(self, count: int) -> NDArray[np.generic]:
        """Rows of the pass's `count` tokens, [count, layers, max k], as the spec's dtype; valid until the next pass.

        Raises RunnerError if a layer was not captured, or captured twice.
        """
        if self._filled != len(self.layers.ids):
            raise RunnerError(f"routing of {self._filled} layers was captured, {len(self.layers.ids)} were to be")
        host: NDArray[np.generic] = self._buffer[:count].cpu().numpy()
        return host.view(self.layers.spec.dtype)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _attach(self, experts: torch.nn.Module, model: PreTrainedModel, name: str, row: int, k: int) -> RemovableHandle:
        router = model.get_submodule(name.removesuffix("experts") + "router") if _takes_no_ids(experts) else None
        if router is None:

            def before_experts(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
                if len(args) < 2:
                    raise RunnerError(f"{name} was called without expert ids")
                self._put(args[1], row, k)

            return experts.register_forward_pre_hook(before_experts)

        def after_router(_: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            # the very call that the router made on the very same logits: same ids, ties included
            self._put(torch.topk(output[1], k, dim=1).indices, row, k)

        return router.register_forward_hook(after_router)

    def _put(self, ids: torch.Tensor, row: int, k: int) -> None:
        if ids.dim() != 2 or ids.shape[1] != k or ids.shape[0] > len(self._buffer):
            raise RunnerError(f"expert ids of shape {tuple(ids.shape)} where [tokens, {k}] was expected")
        self._buffer[: ids.shape[0], row, :k] = ids
        self._filled += 1


def _takes_no_ids(experts: torch.nn.Module) -> bool:
    """Experts that are dense over all experts (llama 4) are given no ids."""
    return "Llama4" in type(experts).__name__
