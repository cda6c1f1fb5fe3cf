"""The final hidden state of each token: an aux datum (`final_hidden`) by which prompts are scored over cached blocks.

A forward hook on the decoder takes what it hands on to the head, its bytes as they are. Knows no sequences. Made by
`aux_data.py`; read by `execution/parts/kept_scores.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.cache.aux import FINAL_HIDDEN, AuxSpec
from fdasync.errors import ConfigError
from fdasync.gpu.capture import StepRows
from fdasync_transformers.capture.aux_producer import AuxProducer
from fdasync_transformers.model.head import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FinalHidden(AuxProducer):
    """See the module and `AuxProducer`."""

    def __init__(self, model: PreTrainedModel, max_step_tokens: int) -> None:
        super().__init__(StepRows(max_step_tokens, self.spec_of(model), model.device))
        decoder = decoder_of(model)
        assert decoder is not None
        self._hooks.append(decoder.register_forward_hook(self._after))
        # the head's own calls go through the decoder's hooks, too
        self._in_pass = False

    def begin(self, positions: torch.Tensor | None = None) -> None:
        self._in_pass = True
        super().begin(positions)

    def end(self) -> None:
        self._in_pass = False
        super().end()

    @staticmethod
    def spec_of(model: PreTrainedModel) -> AuxSpec:
        """uint8, the bytes of one state. Raises ConfigError for a model whose decoder is not apart from its head."""
        if decoder_of(model) is None:
            raise ConfigError("runner_config.aux", f"{FINAL_HIDDEN} of a model without a decoder apart from its head")
        return AuxSpec(FINAL_HIDDEN, (1, int(model.config.hidden_size) * model.dtype.itemsize), "uint8")

    def _after(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._in_pass:
            hidden: torch.Tensor = output.last_hidden_state[0]
            self._buffer.write(hidden.contiguous().view(torch.uint8), 0)
