"""Paged attention of a rollout on a CPU with fixed numerics: gathers blocks so that tiles stand at absolute positions.

Knows blocks and positions; knows no requests. Made for each step by `execution/step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync_transformers.fixed.attention import attend
from fdasync_transformers.model.attention import TorchPaging
from fdasync_transformers.model.kv import gather

if TYPE_CHECKING:
    import torch

    from fdasync_transformers.model.kv import LayerSpec


@dataclass(frozen=True)
class FixedPaging(TorchPaging):
    """See `TorchPaging`; its plan has tiles of `fixed.attention.KEYS`."""

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        keys = self.pool.keys[layer.index]
        values = keys[..., : layer.latent_rank] if layer.latent_rank else self.pool.values[layer.index]
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for group in self.plan.groups(layer.reach):
            assert group.mask is not None
            k = gather(keys, group.table, group.pieces)
            v = k[..., : layer.latent_rank] if layer.latent_rank else gather(values, group.table, group.pieces)
            group.give(attend(group.take(query), k, v, group.mask, scaling, sinks), out)
        return out
