"""Where it can be seen which experts a token gets, with which weights: at the experts, or at routers of dense ones.

Knows the library's modules. The base of the producers of the routing and of its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import BadInput, RunnerError
from fdasync_transformers.capture.aux_producer import AuxProducer, AuxSource, Watched
from fdasync_transformers.model.moe_layers import router_of_dense_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.model.moe_layers import MoELayers


class ExpertCalls(AuxProducer):
    """A producer whose rows have a part for each MoE layer."""

    fixed = True

    def __init__(self, name: str, source: AuxSource) -> None:
        super().__init__(name, source)
        # the experts are handed ids and weights; those that compute all experts (llama 4) are not
        dense = [router_of_dense_experts(source.model, at) for at in self.moe.names]
        self._watched = [Watched(router or at, not router) for router, at in zip(dense, self.moe.names, strict=True)]

    @property
    def moe(self) -> MoELayers:
        """Raises BadInput where no routing is captured."""
        if self.source.moe is None:
            raise BadInput("capture", "without captured routing", hint='leave it out, or set routing to "auto"')
        return self.source.moe

    def watched(self) -> Sequence[Watched]:
        return self._watched

    def ids(self, part: int, seen: tuple[Any, ...]) -> torch.Tensor:
        """Of the chosen experts, [T, k]."""
        name, before = self._watched[part]
        if not before:
            # the router made the same call on the same logits: same ids, ties included
            return torch.topk(seen[1], self.moe.top_k[part], dim=1).indices
        if len(seen) < 2:
            raise RunnerError(f"{name} was called without expert ids")
        ids: torch.Tensor = seen[1]
        return ids

    def weights(self, part: int, seen: tuple[Any, ...]) -> torch.Tensor:
        """Of these experts, [T, k]."""
        (name, before), k = self._watched[part], self.moe.top_k[part]
        if not before:
            scores: torch.Tensor = seen[0]
            return scores.gather(1, self.ids(part, seen))
        if len(seen) < 3 or seen[2].dim() != 2 or seen[2].shape[1] != k:
            raise RunnerError(f"{name} was called without the weights of {k} experts a token")
        weights: torch.Tensor = seen[2]
        return weights
