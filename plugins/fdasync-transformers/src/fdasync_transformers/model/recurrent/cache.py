"""The library's cache, as one mixer sees it for one piece of a step: state that lies where `states.py` keeps it.

The library's code writes new state into the tensors that it finds, so a piece of one sequence needs no copy. Knows no
lanes and no pieces. Called by `steps.py` and `probe.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_transformers.model.recurrent.states import Kind, Part

# more than any layer of the library has
_MOST_STATES = 8


class StateLayer(LinearAttentionLayer):
    """One layer's state; what the library has not made yet it makes as it would, but marks nothing for its compiler."""

    def __init__(self) -> None:
        super().__init__(number_of_states=_MOST_STATES)

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self._set("convolution", state_idx, conv_states.new_zeros((*conv_states.shape[:-1], width)))
        if recurrent_states is not None:
            self._set("recurrent", state_idx, torch.zeros_like(recurrent_states))

    def hold(self, part: Part, state: torch.Tensor, *, fresh: bool) -> None:
        """Take in a tensor of state [sequences, *shape]; `fresh`: nothing was written there yet."""
        self._set(part.kind, part.number, state)
        self.has_previous_state[part.number] = not fresh

    def held(self) -> Iterator[tuple[Kind, int, torch.Tensor]]:
        """Kind, number and tensor of all state."""
        for index, state in self.conv_states.items():
            if state is not None:
                yield "convolution", index, state
        for index, state in self.recurrent_states.items():
            if state is not None:
                yield "recurrent", index, state

    def _set(self, kind: Kind, index: int, state: torch.Tensor) -> None:
        if kind == "convolution":
            self.conv_states[index] = state
            self.is_conv_states_initialized[index] = True
            self.conv_kernel_size[index] = state.shape[-1]
        else:
            self.recurrent_states[index] = state
            self.is_recurrent_states_initialized[index] = True


class StateCache(Cache):
    """A cache that has one layer, under its number in the model."""

    def __init__(self, number: int, layer: StateLayer) -> None:
        super().__init__(layers=[])
        layers: Any = {number: layer}
        self.layers = layers

    # minimax has a cache of its own, with other names
    def get_linear_cache(self, number: int) -> torch.Tensor | None:
        return self.get_recurrent_state(number)

    def set_linear_cache(self, number: int, state: torch.Tensor) -> None:
        self.update_recurrent_state(state, number)
        layer: Any = self.layers[number]
        layer.has_previous_state[0] = True
