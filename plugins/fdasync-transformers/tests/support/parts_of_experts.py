"""Experts that give their parts, by plain torch: the contract of fused experts, for tests of what sums the parts."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "fdasync_test_parts"


def experts_with_parts(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, parts: bool = False
) -> torch.Tensor:
    """The weighted results [T, k, H] of each slot, NaN where the id names no expert; or their sum in slot order. A
    graph can capture it: it gathers the weights of every slot."""
    ours = ((ids >= 0) & (ids < module.num_experts))[..., None]
    chosen = ids.clamp(0, module.num_experts - 1)
    up, down = module.gate_up_proj[chosen], module.down_proj[chosen]
    if not module.is_transposed:
        up, down = up.transpose(-1, -2), down.transpose(-1, -2)
    both = (hidden[:, None, None] @ up)[:, :, 0]
    if module.has_bias:
        both = both + module.gate_up_proj_bias[chosen]
    out = (module._apply_gate(both)[:, :, None] @ down)[:, :, 0]
    if module.has_bias:
        out = out + module.down_proj_bias[chosen]
    found = torch.where(ours, (out * weights[..., None]).to(hidden.dtype), float("nan"))
    if parts:
        return found
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for slot in range(ids.shape[1]):
        total += torch.where(ours[:, slot], found[:, slot].float(), 0.0)
    return total.to(hidden.dtype)


def use_parts(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_with_parts)
    model.set_experts_implementation(NAME)
