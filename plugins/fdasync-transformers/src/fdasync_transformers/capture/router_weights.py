"""The router's weights of the chosen experts: an aux datum (`routing_weights`).

They are what the experts are about to use: after the family's renormalisation and scaling factor, whether the router is
the library's or a fused one. They are rounded once, to float16. Slot for slot they belong to the ids of the routing.
Knows no sequences. Found by its entry point (`aux_producer.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_transformers.capture.expert_calls import ExpertCalls

if TYPE_CHECKING:
    import torch


class RouterWeights(ExpertCalls):
    """See the module and `AuxProducer`."""

    def row(self) -> tuple[tuple[int, ...], str]:
        """float16, of the shape of the ids."""
        return self.moe.spec.shape, "float16"

    def record(self, part: int, seen: Any, /) -> torch.Tensor:
        return self.weights(part, seen)
