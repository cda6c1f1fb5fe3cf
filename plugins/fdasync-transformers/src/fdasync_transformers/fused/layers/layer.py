"""The forward of one fused decoder layer, and the norm that it hands on to the next one.

A layer's last kernel norms the next layer's input too (or the model's last hidden states). That norm is handed on with
the hidden states (`Carry`), and holds for that very tensor: for any other it is computed. A fused layer runs where a
kernel can write a step's KV, and calls the library's code in any other pass. It has no gradient. Knows no families and
no steps. Made by `fuse.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.modules import linear_of_mode, past_modes, refuse_gradient
from fdasync_transformers.model.attention import StepContext

if TYPE_CHECKING:
    from fdasync_kernels.layer.finish import Norm

    from fdasync_transformers.fused.layers.attention import FusedAttention
    from fdasync_transformers.fused.layers.feed_forward import DenseBlock, ExpertsBlock
    from fdasync_transformers.parallel.sums import Sums


class Carry:
    """The norm of the hidden states that a fused layer has just handed on, until the next one takes it.

    It is found by the identity of that tensor, so nothing may change the tensor in place.
    """

    def __init__(self) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def give(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, T, H] of a stream [T, H] whose norm is `normed`."""
        whole = hidden.unsqueeze(0)
        self._held = (whole, hidden, normed)
        return whole

    def take(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The stream [T, H] and its norm, if they were given for this very tensor. Holds nothing afterwards."""
        held, self._held = self._held, None
        return held[1:] if held is not None and held[0] is whole else None


class FusedLayer:
    """The forward of one decoder layer.

    Attributes:
        layer: the library's.
        attention, block: its halves.
        norms: of the inputs of both; then the norm of the next layer's input, None where it is not fused.
        carry: of the model.

    Args:
        sums: of the ranks of a group; None: of no group.
    """

    def __init__(
        self,
        layer: Any,
        attention: FusedAttention,
        block: DenseBlock | ExpertsBlock,
        norms: tuple[Norm, Norm, Norm | None],
        carry: Carry,
        sums: Sums | None = None,
    ) -> None:
        from fdasync_kernels.layer.finish import add_norm, norm_rows

        self.layer = layer
        self.attention = attention
        self.block = block
        self.norms = norms
        self.carry = carry
        self._sums = sums
        self._own = layer.forward
        self._index = int(layer.self_attn.layer_idx)
        self._add_norm = add_norm
        self._norm_rows = norm_rows

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own forward: hidden states [1, T, H] -> the same. Raises RunnerError where a gradient is asked
        for, and the library's code would not run."""
        context: Any = kwargs.get("fd_ctx")
        places = None
        if isinstance(context, StepContext) and not args:
            spec = context.layers[self._index]
            places = context.paging.places(spec)
        if places is None:
            own: torch.Tensor = self._own(hidden_states, *args, **kwargs)
            return own
        if torch.is_grad_enabled():
            refuse_gradient(hidden_states, *self.layer.parameters())
        first, second, third = self.norms
        held = self.carry.take(hidden_states)
        linear = linear_of_mode() if self.attention.plain else None
        with nullcontext() if linear is None else past_modes():
            if held is None:
                stream = hidden_states[0]
                normed = self._norm_rows(stream, first)
            else:
                stream, normed = held
            qkv = self.attention.product(normed, linear)
            turns: tuple[torch.Tensor, torch.Tensor] = kwargs["position_embeddings"]
            peers = None if self._sums is None else self._sums.peers(stream, self.attention.module.o_proj)
            with nullcontext() if peers is None or self._sums is None else self._sums.collectives.apart():
                block = self.attention.attend(qkv, turns, spec, context.paging, places, linear)
            stream, normed = self._add_norm(block, stream, second, peers=peers)
        stream, following = self.block(normed, stream, third, places.slots)
        return stream.unsqueeze(0) if following is None else self.carry.give(stream, following)


class LastNorm:
    """The forward of the norm behind the last layer."""

    def __init__(self, module: Any, carry: Carry) -> None:
        self._own = module.forward
        self._carry = carry

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        held = self._carry.take(hidden_states)
        normed: torch.Tensor = self._own(hidden_states) if held is None else held[1].unsqueeze(0)
        return normed
