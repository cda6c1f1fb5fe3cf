"""Decoder layers whose attention half is the library's own, recurrent or not, with few kernels around it.

The residual sum behind the first half and the norm of the second are one kernel, and so are the sum of the experts'
parts, the gated shared expert and the residual sum behind it. Layers are known by class: someone read the library's
code and found that structure (transformers 5.23). Each is compared with the library's own before it is replaced. It has
no gradient, and calls the library's code outside of steps. Knows no steps. Made by `fuse.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.layers.feed_forward import BlockKind, make_block
from fdasync_transformers.fused.layers.proof import block_difference, hidden_of, moved
from fdasync_transformers.fused.norms import epsilon
from fdasync_transformers.fused.replaced import refuse_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.live_rows import LiveRows

_ROWS = 16
_BLOCK = BlockKind(shared="shared_expert", shared_gate="shared_expert_gate")
#: decoder layers that norm by 1 + weight, with `linear_attn` or `self_attn`, and experts with a gated shared one
KNOWN = ("Qwen3NextDecoderLayer", "Qwen3_5MoeDecoderLayer")


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
        self.block = make_block(layer.mlp, _BLOCK)
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
        assert eps is not None
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


@torch.inference_mode()
def prove(model: PreTrainedModel, layer: Any, live: LiveRows) -> HybridLayer | str:
    """A layer by few kernels that computes what the library's does; a reason where there is none. Waits for the
    device."""
    made = HybridLayer(layer, live)
    hidden, mixed = hidden_of(model, _ROWS)[0], hidden_of(model, _ROWS, 1)[0]
    if epsilon(layer.post_attention_layernorm) is None:
        return "its norm does not say what is added to the mean"
    stream, normed = made.add(mixed, hidden)
    if not torch.equal(stream, hidden + mixed):
        return "the sum behind its attention differs"
    if moved(normed, layer.post_attention_layernorm(stream)):
        return "its norms differ"
    problem, _ = block_difference(
        SimpleNamespace(layer=layer, block=made.block, norms=made.norms), stream, normed, None
    )
    return problem or made
