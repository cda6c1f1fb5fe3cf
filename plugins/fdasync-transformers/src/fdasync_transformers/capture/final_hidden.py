"""The final hidden state of each token: an aux datum (`final_hidden`) by which prompts are scored over cached blocks.

What the decoder hands on to the head, its bytes as they are. Knows no sequences. Found by its entry point
(`aux_producer.py`); its rows are read by `execution/parts/kept_scores.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import BadInput
from fdasync_transformers.capture.aux_producer import AuxProducer, Watched
from fdasync_transformers.model.head import decoder_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class FinalHidden(AuxProducer):
    """See the module and `AuxProducer`."""

    fixed = True
    # kept for the head, 4 KB a token of a large model
    by_name = True

    def row(self) -> tuple[tuple[int, ...], str]:
        """uint8, the bytes of one state."""
        model = self.source.model
        if decoder_of(model) is None:
            raise BadInput("model", "the model has no decoder apart from its head")
        return (1, int(model.config.hidden_size) * model.dtype.itemsize), "uint8"

    def watched(self) -> Sequence[Watched]:
        model = self.source.model
        return [Watched(name) for name, module in model.named_modules() if module is decoder_of(model)]

    def record(self, _part: int, seen: Any, /) -> torch.Tensor:
        hidden: torch.Tensor = seen.last_hidden_state[0]
        return hidden.contiguous().view(torch.uint8)
