"""Attention of queries that read chosen positions alone, for CPUs.

A single query reads the keys at its positions and no others; of several queries of one sequence, which choose each for
itself, the keys of the whole context are read once and masked. Knows no indexers. Called by `attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from fdasync_transformers.model.kv import gather
from fdasync_transformers.model.sinks import attend_with_sinks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.model.ragged import Group


def attend_chosen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: Sequence[Group],
    chosen: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, H, Dk] against views of a pool, each at its positions `chosen` int [T, k] (-1: none), in `out`
    [T, H, Dv], which is returned.

    All groups begin at position 0. No position is chosen twice, and at least one is.
    """
    for group in groups:
        q = group.take(query)
        picked = group.take(chosen[:, None].long())[:, 0]
        if group.queries == 1 and group.keys > picked.shape[-1]:
            places = picked[:, 0]
            k = _at(keys, group, places)
            v = k if values is keys else _at(values, group, places)
            unseen = (places < 0)[:, None, None]
        else:
            k = gather(keys, group.table, group.pieces)[:, :, : group.keys]
            v = k if values is keys else gather(values, group.table, group.pieces)[:, :, : group.keys]
            # one column more takes what is none
            unseen = torch.ones(*picked.shape[:2], group.keys + 1, dtype=torch.bool, device=picked.device)
            unseen = unseen.scatter_(-1, picked.where(picked >= 0, group.keys), False)[:, None, :, : group.keys]
        mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, float("-inf"))
        if sinks is None:
            grouped = q.shape[1] != k.shape[1]
            result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        else:
            result = attend_with_sinks(q, k, v, mask, scaling, sinks)
        group.give(result, out)
    return out


def _at(view: torch.Tensor, group: Group, places: torch.Tensor) -> torch.Tensor:
    """Keys at positions [P, k] of a view whose blocks have one share: [P, heads, k, D]; for -1 some other keys."""
    size = view.shape[1]
    at = places.clamp_min(0)
    blocks = group.table.view(group.pieces, -1).gather(1, at // size)
    return view[blocks, at % size].squeeze(2).transpose(1, 2)
