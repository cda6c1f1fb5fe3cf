"""Puts the fused experts in the place of the library's, through its experts interface.

What a module's experts are is read from the module (gate, bias, layout) and proven (`experts_proof.py`). If one layer
of a model differs, the model keeps the library's experts. Knows no steps. Called at start-up by `start/fuse.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fdasync_transformers.fused.experts_interface import NAME, fused_experts
from fdasync_transformers.fused.experts_proof import compare
from fdasync_transformers.fused.proofs import alone, guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.proofs import Agree
    from fdasync_transformers.model.moe_layers import MoELayers


@dataclass(frozen=True)
class FusedExperts:
    """The result of `fuse_experts`.

    Attributes:
        fused: whether the model has them.
        notes: for people: why it has none, or what falls short of the promise.
    """

    fused: bool
    notes: tuple[str, ...] = ()


def fuse_experts(
    model: PreTrainedModel,
    layers: MoELayers,
    live: LiveRows,
    agree: Agree = alone,
    further: Sequence[torch.nn.Module] = (),
) -> FusedExperts:
    """Make the fused experts the implementation of a model's experts, if they compute what every layer does.

    Runs each layer's experts on a few random rows, by its own code and by the kernels: waits for the device, for
    start-up. Leaves the model as it was where they differ.

    Args:
        model: in inference, its weights in their final place and dtype.
        layers: its MoE layers.
        live: says in each pass which rows count.
        agree: what the ranks of a group make of a reason not to fuse them; each of them proves its parts.
        further: experts of layers behind the model's own, which are as these are.
    """
    try:
        from fdasync_kernels.chip import runs_on
    except ModuleNotFoundError as error:
        return FusedExperts(False, (f"experts are the library's own: no module {error.name}",))
    if not runs_on(model.device):
        return FusedExperts(False, (f"experts are the library's own: no kernels on {model.device}",))
    ALL_EXPERTS_FUNCTIONS.register(NAME, fused_experts)
    modules = [*[model.get_submodule(name) for name in layers.names], *further]
    slots, live.slots = live.slots, None
    told: list[str] = []
    problem = ""
    try:
        numbers = [*layers.ids, *range(layers.ids[-1] + 1, layers.ids[-1] + 1 + len(further))]
        top_k = [*layers.top_k, *[max(layers.top_k)] * len(further)]
        problem = agree(_first_problem(list(zip(modules, numbers, top_k, strict=True)), live, told))
    finally:
        live.slots = slots
        if problem:
            for each in modules:
                each.__dict__.pop("fd_experts", None)
    if problem:
        return FusedExperts(False, (f"experts are the library's own: {problem}",))
    model.set_experts_implementation(NAME)
    return FusedExperts(True, tuple(told))


def _first_problem(modules: list[tuple[Any, int, int]], live: LiveRows, told: list[str]) -> str:
    """Describe and compare all layers, each with its number and experts per token; the first layer that differs, and
    how, or ""."""
    kinds: set[type] = set()
    for module, number, k in modules:
        notes = None if type(module) in kinds else told
        kinds.add(type(module))
        problem = guarded(partial(compare, module, k, live, notes), str)
        if problem:
            return f"layer {number} ({type(module).__name__}) {problem}"
    return ""
