"""Experts of a trainer's model on a GPU: values of the rollout's kernels, gradients of the library's grouped form.

The backward pass recomputes the library's grouped form (`gradients/recomputed.py`). Knows no batches. Registered with
the library's experts interface; called by MoE layers within `trainer.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from fdasync_transformers.fused.experts_interface import run_experts
from fdasync_transformers.fused.modules import past_modes
from fdasync_transformers.model.moe_layers import fits_grouped_product
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from fdasync_trainer.numerics.gradients.recomputed import recomputed, with_parameters

#: of the library's experts interface
NAME = "fdasync_trainer"


def register() -> None:
    """Make the function known to the library under `NAME`; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, trainer_experts)


def trainer_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    slices: int = 1,
) -> torch.Tensor:
    """The experts of one layer that was described, for the library's interface: [T, H], with gradients. `slices`: that
    the value is joined of; the gradient is that of the sum."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    with past_modes(), torch.no_grad():
        value = run_experts(module, hidden_states, top_k_index, top_k_weights, slices=slices)
        value = value.to(hidden_states.dtype)

    def again(leaves: list[torch.Tensor], kept: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        hidden, weights, *others = leaves
        # the parameters of the forward pass, wherever the module has others by now
        twin: Any = with_parameters(module, dict(zip(parameters, others, strict=True)))
        recompute = grouped_mm_experts_forward if fits_grouped_product(module) else batched_mm_experts_forward
        return [recompute(twin, hidden, kept[0], weights)]

    inputs = (hidden_states, top_k_weights, *parameters.values())
    return recomputed((value,), again, inputs, (top_k_index,))[0]
