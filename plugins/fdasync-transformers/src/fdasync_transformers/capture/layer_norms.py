"""The norm of each decoder layer's output: an aux datum (`layer_norms`) that dense models have too.

A forward hook on each decoder layer takes the Euclidean norm of every token's hidden state, summed in float32. Knows no
sequences. Made by `aux_data.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.cache.aux import AuxSpec
from fdasync.gpu.capture import StepRows
from fdasync_transformers.capture.aux_producer import AuxProducer
from fdasync_transformers.model.families import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerNorms(AuxProducer):
    """See the module and `AuxProducer`."""

    def __init__(self, model: PreTrainedModel, max_step_tokens: int) -> None:
        super().__init__(StepRows(max_step_tokens, self.spec_of(model), model.device))
        for row, layer in enumerate(decoder_layers(model)):
            self._hooks.append(layer.register_forward_hook(self._after(row)))

    @staticmethod
    def spec_of(model: PreTrainedModel) -> AuxSpec:
        """float32, one number for each decoder layer."""
        return AuxSpec("layer_norms", (len(decoder_layers(model)),), "float32")

    def _after(self, row: int) -> Any:
        def after_layer(_: torch.nn.Module, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            tokens = hidden.reshape(-1, hidden.shape[-1])
            self._buffer.write(torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float32), row)

        return after_layer
