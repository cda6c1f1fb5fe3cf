"""The norm of each decoder layer's output: an aux datum (`layer_norms`) that dense models have too.

The Euclidean norm of every token's hidden state, summed in float32. Knows no sequences. Found by its entry point
(`aux_producer.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.capture.aux_producer import AuxProducer, Watched
from fdasync_transformers.model.families import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Sequence


class LayerNorms(AuxProducer):
    """See the module and `AuxProducer`."""

    fixed = True

    def row(self) -> tuple[tuple[int, ...], str]:
        """float32, one number for each decoder layer."""
        return (len(decoder_layers(self.source.model)),), "float32"

    def watched(self) -> Sequence[Watched]:
        names = {module: name for name, module in self.source.model.named_modules()}
        return [Watched(names[layer]) for layer in decoder_layers(self.source.model)]

    def record(self, _part: int, seen: Any, /) -> torch.Tensor:
        hidden: torch.Tensor = seen if isinstance(seen, torch.Tensor) else seen[0]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        norms: torch.Tensor = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float32)
        return norms
