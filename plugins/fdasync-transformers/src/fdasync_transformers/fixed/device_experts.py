"""Experts of a trainer's model on a GPU: values of the rollout's kernels, gradients of the library's grouped form.

The forward pass keeps its inputs alone; the backward pass recomputes the library's grouped form from them. Knows no
batches. Registered with the library's experts interface; called by MoE layers within `trainer.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from fdasync_transformers.fused.experts_interface import run_experts
from fdasync_transformers.fused.replaced import twin_of
from fdasync_transformers.model.moe_layers import fits_grouped_product

#: of the library's experts interface
NAME = "fdasync_trainer"


def register() -> None:
    """Make the function known to the library under `NAME`; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, trainer_experts)


def trainer_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of one layer that was described, for the library's interface: [T, H], with gradients."""
    parameters = dict(module.named_parameters(recurse=False))
    out: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        module, tuple(parameters), top_k_index, hidden_states, top_k_weights, *parameters.values()
    )
    return out


class _Experts(torch.autograd.Function):
    """`run_experts`, whose backward pass recomputes them by the library's products."""

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        names: tuple[str, ...],
        ids: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, hidden, weights, *parameters)
        ctx.given = module, names
        return run_experts(module, hidden, ids, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ids, *inputs = ctx.saved_tensors
        module, names = ctx.given
        needed = ctx.needs_input_grad[3:]
        leaves = [one.detach().requires_grad_(need) for one, need in zip(inputs, needed, strict=True)]
        hidden, weights, *parameters = leaves
        # the parameters of the forward pass, wherever the module has others by now
        twin: Any = twin_of(module, dict(zip(names, parameters, strict=True)))
        recompute = grouped_mm_experts_forward if fits_grouped_product(module) else batched_mm_experts_forward
        with torch.enable_grad():
            out = recompute(twin, hidden, ids, weights)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)
