"""The fused experts of one layer, as the library's experts interface calls them.

What a module's experts are stands in its `Description`; the weights stay the module's own parameters, so new weights
need no change here. No gradient. Knows no steps. The function is registered by `experts.py`; every MoE layer of a fused
model calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import RunnerError
from fdasync_transformers.fused.modules import refuse_gradient
from fdasync_transformers.model.kept.kept import Kept

if TYPE_CHECKING:
    from fdasync_kernels.experts.activation import Activation
    from fdasync_kernels.experts.stored import StoredWeights
    from fdasync_kernels.experts.tiles import Tiles

    from fdasync_transformers.fused.live_rows import LiveRows

NAME = "fdasync"


@dataclass(frozen=True)
class Description:
    """How the experts of a module are computed: arguments of `experts` of the kernels.

    Attributes:
        activation: found by trying.
        gated, biased, transposed, interleaved: as the library's decorator says; weights that are kept as stored are
            never transposed.
        live: of the model.
    """

    activation: Activation
    gated: bool
    biased: bool
    transposed: bool
    interleaved: bool
    live: LiveRows


def fused_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    parts: bool = False,
    slices: int = 1,
) -> torch.Tensor:
    """The experts of one layer, for the library's interface: [T, H], or with `parts` the weighted results [T, k, H].
    With `slices` [T, H] in float32, not rounded.

    See `fdasync_kernels.experts.chain.experts`. Raises RunnerError for a module that was not described, and where a
    gradient is asked for.
    """
    if getattr(module, "fd_experts", None) is None:
        raise RunnerError(f"{type(module).__name__} was never described: its model was not fused")
    if torch.is_grad_enabled():
        refuse_gradient(hidden_states, top_k_weights, *module.parameters())
    return run_experts(module, hidden_states, top_k_index, top_k_weights, parts=parts, slices=slices)


def run_experts(
    module: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    parts: bool = False,
    slices: int = 1,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """As `fused_experts`, for a module that was described; `tiles`: None chooses them."""
    from fdasync_kernels.experts.chain import experts

    described: Description = module.fd_experts
    return experts(
        hidden,
        ids.contiguous(),
        weights.contiguous(),
        _weights(module.gate_up_proj if described.gated else module.up_proj),
        _weights(module.down_proj),
        activation=described.activation,
        gated=described.gated,
        up_bias=(module.gate_up_proj_bias if described.gated else module.up_proj_bias) if described.biased else None,
        down_bias=module.down_proj_bias if described.biased else None,
        transposed=described.transposed,
        interleaved=described.interleaved,
        live=described.live.slots,
        parts=parts,
        slices=slices,
        tiles=tiles,
    )


def _weights(held: torch.Tensor | Kept) -> torch.Tensor | StoredWeights:
    return held.stored if isinstance(held, Kept) else held
