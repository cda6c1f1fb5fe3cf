"""Finds a model's MoE layers, and the shape of a row of their routing, in the model itself.

Names of config fields differ from family to family. So layers come from the modules found, the number of experts from
their weights, and the experts of a token from the ids that the experts are handed in one plain pass of one token. Knows
modules of the library; knows nothing of steps. Called by `open_model.py`, the
producers of aux data and `replay/force.py`.
"""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fdasync.cache.aux import AuxSpec
from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

#: of torch's grouped product: strides are multiples of this
GROUPED_NBYTES = 16

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
# classes of the library that hold experts or choose among them
_OF_EXPERTS = re.compile(r"(Experts?|MoE|MoeBlock|Router|Gating)$")
# parameters of a forward that is handed ids: itself, hidden states, ids, and maybe weights
_WITH_IDS = 3


class Experts(NamedTuple):
    """The experts of one layer.

    Attributes:
        name: of the module.
        module: is handed hidden states, expert ids and their weights; in llama 4 hidden states alone.
        num_experts: expert ids are below this number.
        dense: computes all experts, and is handed no ids (llama 4).
    """

    name: str
    module: torch.nn.Module
    num_experts: int
    dense: bool


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


def find_experts(model: torch.nn.Module) -> dict[int, Experts]:
    """The experts of every MoE layer, by rising hidden-layer number; empty for a dense model.

    `model` may be on the meta device. Raises UnsupportedModel for experts that are handed no ids, and for those whose
    layer cannot be told.
    """
    kind = _kind_of(model)
    found: dict[int, Experts] = {}
    for path, module in model.named_modules():
        # multi-token prediction layers have no rows
        if path.rpartition(".")[2] != "experts" or path.startswith("mtp."):
            continue
        layer = _LAYER.search(path)
        if layer is None or int(layer.group(1)) in found:
            raise UnsupportedModel(kind, f"cannot tell the layer of the experts at {path}")
        dense = "Llama4" in type(module).__name__
        if not dense and len(inspect.signature(type(module).forward).parameters) < _WITH_IDS:
            raise UnsupportedModel(kind, f"{path} ({type(module).__name__}) is handed no expert ids")
        count = _num_experts(module)
        if not 0 < count <= 2**15:
            raise UnsupportedModel(kind, f"{path} has {count} experts, and a row names 1 to {2**15}")
        found[int(layer.group(1))] = Experts(path, module, count, dense)
    if not found:
        classes = {type(module).__name__ for module in model.modules()}
        others = sorted(name for name in classes if _OF_EXPERTS.search(name))
        if others:
            problem = f"its experts ({', '.join(others)}) are handed no expert ids, so their routing cannot be recorded"
            raise UnsupportedModel(kind, problem)
    return dict(sorted(found.items()))


def find_moe_layers(model: PreTrainedModel, run: Callable[[], object] | None = None) -> MoELayers | None:
    """The MoE layers of a model, or None for a dense one; runs one pass of one token.

    Args:
        model: loaded, or on the meta device.
        run: runs the pass; None: a plain one, which needs a loaded model.

    Raises UnsupportedModel as `find_experts`, and where a layer's experts are not called with ids in that pass.
    """
    experts = find_experts(model)
    if not experts:
        return None
    return MoELayers(
        ids=tuple(experts),
        names=tuple(each.name for each in experts.values()),
        num_experts=max(each.num_experts for each in experts.values()),
        top_k=_top_k(model, experts, run or (lambda: _run_plain(model))),
    )


@contextmanager
def without_experts(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, experts compute nothing and return zeros: a pass that looks at shapes needs no more, and the
    library's code of some experts runs on no meta device."""
    modules: list[Any] = [each.module for each in find_experts(model).values()]
    # some have a forward of their own, past their class
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = lambda hidden_states, *_args, **_kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def router_of_dense_experts(model: PreTrainedModel, experts: str) -> str:
    """The name of the router beside experts that compute all experts and so take no ids (llama 4); "" beside others."""
    dense = "Llama4" in type(model.get_submodule(experts)).__name__
    return experts.removesuffix("experts") + "router" if dense else ""


def experts_taking(experts: Any, argument: str) -> Callable[..., torch.Tensor] | None:
    """The function that computes these experts now, called with the module first; None: it does not take the argument,
    or is the class's own code."""
    name = experts.config._experts_implementation
    function: Any = ALL_EXPERTS_FUNCTIONS.get(name) if name in ALL_EXPERTS_FUNCTIONS else None
    return function if function is not None and argument in _arguments_of(function) else None


# no state: a function's arguments never change
@cache
def _arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def fits_grouped_product(experts: torch.nn.Module) -> bool:
    """Whether torch's grouped product takes the matrices of a module's experts."""
    return all(
        width * parameter.element_size() % GROUPED_NBYTES == 0
        for parameter in experts.parameters(recurse=False)
        if parameter.dim() == 3
        for width in parameter.shape[1:]
    )


def _top_k(model: PreTrainedModel, experts: dict[int, Experts], run: Callable[[], object]) -> tuple[int, ...]:
    """The ids of each layer for one token, counted."""
    seen: dict[str, int] = {}

    def look(name: str, args: tuple[Any, ...]) -> None:
        ids = args[1] if len(args) > 1 else None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            seen[name] = ids.shape[1]

    with ExitStack() as hooks:
        for each in experts.values():
            if each.dense:
                router: Any = model.get_submodule(router_of_dense_experts(model, each.name))
                seen[each.name] = int(router.top_k)
            else:
                hook = each.module.register_forward_pre_hook(lambda _, args, name=each.name: look(name, args))
                hooks.callback(hook.remove)
        hooks.enter_context(without_experts(model))
        run()
    unseen = [each.name for each in experts.values() if not seen.get(each.name)]
    if unseen:
        raise UnsupportedModel(_kind_of(model), f"{unseen[0]} is handed no expert ids in a forward pass")
    return tuple(seen[each.name] for each in experts.values())


def _run_plain(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def _num_experts(module: torch.nn.Module) -> int:
    """Counted by the weights; one family keeps all experts' weights in one matrix, and says how many there are."""
    counts = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return max(counts) if counts else int(getattr(module, "num_experts", 0))


def _kind_of(model: torch.nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
