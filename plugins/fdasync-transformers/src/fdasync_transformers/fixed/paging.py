"""Paged attention of a rollout on a CPU with fixed numerics: gathers blocks so that tiles stand at absolute positions.

Knows blocks and positions; knows no requests. `FixedPaging` is made for each step by `execution/step.py`; `segments.py`
lays the sequences of a trainer's batch out in blocks for `attend_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync_transformers.fixed.attention import attend
from fdasync_transformers.model.attention import TorchPaging
from fdasync_transformers.model.kv import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from fdasync_transformers.model.kv import LayerSpec
    from fdasync_transformers.model.ragged import Group


@dataclass(frozen=True)
class FixedPaging(TorchPaging):
    """See `TorchPaging`; its plan has tiles of `fixed.attention.KEYS`."""

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        keys = self.pool.attended_keys[layer.index]
        values = None if layer.latent_rank else self.pool.attended_values[layer.index]
        out = query.new_empty(*query.shape[:2], layer.latent_rank if values is None else values.shape[-1])
        attend_blocks(self.plan.groups(layer.reach), query, keys, values, scaling, sinks, out)
        return out


def attend_blocks(
    groups: Sequence[Group],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Queries [T, H, Dk] against blocks as `gather` takes them, into `out` [T, H, Dv]: the rows that groups name.

    Without values (latents) they are the leading part of the keys.
    """
    for group in groups:
        assert group.mask is not None
        k = gather(keys, group.table, group.pieces)
        v = k[..., : out.shape[-1]] if values is None else gather(values, group.table, group.pieces)
        group.give(attend(group.take(query), k, v, group.mask, scaling, sinks), out)
