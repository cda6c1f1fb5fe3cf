"""Decoder layers whose attention half is the library's own, recurrent or not, with few kernels around it.

The residual sum behind the first half and the norm of the second are one kernel, and so are the sum of the experts'
parts, the gated shared expert and the residual sum behind it. Layers are known by class: someone read the library's
code and found that structure (transformers 5.23). Each is compared with the library's own before it is replaced. It has
no gradient, and calls the library's code outside of steps. Knows no steps. Made by `fuse.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.known import HYBRID_LAYERS
from fdasync_transformers.fused.layers.feed_forward import make_block
from fdasync_transformers.fused.layers.proof import check_bits, check_moved, checked_block, hidden_of
from fdasync_transformers.fused.modules import refuse_gradient
from fdasync_transformers.fused.norms import epsilon
from fdasync_transformers.fused.replacement import Differs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.live_rows import LiveRows

_ROWS = 16


class HybridLayer:
    """The forward of one decoder layer; see the module.

    Attributes:
        layer: the library's.
        block: its second half.
        norms: that of the next layer is not handed on.
    """

    def __init__(self, layer: Any, live: LiveRows) -> None:
        from fdasync_kernels.layer.norm import add_rms_norm

        self.layer = layer
        self.block = make_block(layer.mlp, HYBRID_LAYERS[type(layer).__name__])
        self.norms = (None, None, None)
        self._own = layer.forward
        self._live = live
        self._add_norm = add_rms_norm

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own forward: hidden states [1, T, H] -> the same. Raises RunnerError where a gradient is asked
        for within a step."""
        if self._live.slots is None or args:
            own: torch.Tensor = self._own(hidden_states, *args, **kwargs)
            return own
        if torch.is_grad_enabled():
            refuse_gradient(hidden_states, *self.layer.parameters())
        return self._halves(hidden_states, self._live.slots, **kwargs)

    def add(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream behind the first half, and its norm."""
        norm = self.layer.post_attention_layernorm
        eps = epsilon(norm)
        if eps is None:
            raise Differs("its norm does not say what is added to the mean")
        return self._add_norm(residual, mixed, norm.weight, eps, rounding="one_plus")

    def _halves(self, hidden: torch.Tensor, slots: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        layer = self.layer
        turns, positions = kwargs.pop("position_embeddings", None), kwargs.pop("position_ids", None)
        mask, cache = kwargs.pop("attention_mask", None), kwargs.pop("past_key_values", None)
        normed = layer.input_layernorm(hidden)
        if hasattr(layer, "linear_attn"):
            mixed = layer.linear_attn(hidden_states=normed, cache_params=cache, attention_mask=mask, **kwargs)
        else:
            mixed, _ = layer.self_attn(
                hidden_states=normed, position_embeddings=turns, position_ids=positions, attention_mask=mask,
                past_key_values=cache, **kwargs,
            )  # fmt: skip
        stream, normed = self.add(mixed[0], hidden[0])
        return self.block(normed, stream, None, slots)[0].unsqueeze(0)


def check_hybrid(model: PreTrainedModel, made: HybridLayer) -> None:
    """Raise Differs unless a layer by few kernels computes what the library's does. Waits for the device."""
    hidden, mixed = hidden_of(model, _ROWS)[0], hidden_of(model, _ROWS, 1)[0]
    stream, normed = made.add(mixed, hidden)
    check_bits(stream, hidden + mixed, "the sum behind its attention differs")
    check_moved(normed, made.layer.post_attention_layernorm(stream), "its norms differ")
    checked_block(made, stream, normed, None)
