"""Attention on a CPU whose bits depend on a query and its keys alone.

Keys stand in tiles of `KEYS` at absolute positions. All products have one shape, sums over keys go tile by tile in
order, and a tile in which a query sees nothing adds zeros: neither the sequences beside one, nor where its prefill was
cut, nor padding changes a bit. In float32, rounded once. Knows blocks and positions; knows no requests. `FixedPaging`
is made for each step by `execution/step.py`; `segments.py` lays the sequences of a trainer's batch out in blocks for
`attend_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fdasync_transformers.fixed.products import ROWS
from fdasync_transformers.model.attention import TorchPaging
from fdasync_transformers.model.kv import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.model.kv import LayerSpec
    from fdasync_transformers.model.ragged import Group

#: keys of a tile; the first key that is handed over stands at a multiple of it
KEYS = 64
# where a padded query sees nothing
_LOWEST = -1e30


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [P, H, C, Dk] against keys [P, KH, L, Dk] and values [P, KH, L, Dv]: [P, H, C, Dv] in the query's dtype.

    Args:
        query: of P pieces with C queries each.
        key: L is a multiple of `KEYS`; finite, also where no query sees it, as is `value`.
        mask: [P, 1, C, L], 0 where seen and -inf elsewhere.
        scaling: of the scores.
        sinks: [H]: one more logit per head, whose probability is dropped.
    """
    pieces, heads, queries, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    shared = heads // kv_heads
    # heads that share keys are rows of one product
    rows = shared * queries
    tiles = -(-rows // ROWS)
    q = query.float().reshape(pieces, kv_heads, rows, width)
    q = torch.nn.functional.pad(q, (0, 0, 0, tiles * ROWS - rows)).reshape(-1, ROWS, width)
    seen = mask.float().expand(pieces, shared, queries, length).reshape(pieces, 1, rows, length)
    seen = torch.nn.functional.pad(seen, (0, 0, 0, tiles * ROWS - rows)).expand(-1, kv_heads, -1, -1)
    seen = seen.reshape(-1, ROWS, length)
    starts = range(0, length, KEYS)
    scores = [
        torch.bmm(q, _tile(key, first, tiles).transpose(1, 2)) * scaling + seen[:, :, first : first + KEYS]
        for first in starts
    ]
    peak = torch.stack([part.amax(-1, keepdim=True) for part in scores]).amax(0).clamp_min(_LOWEST)
    if sinks is not None:
        column = (
            sinks.float().view(1, kv_heads, shared, 1).expand(pieces, -1, -1, queries).reshape(pieces, kv_heads, -1)
        )
        column = torch.nn.functional.pad(column, (0, tiles * ROWS - rows)).reshape(-1, ROWS, 1)
        peak = torch.maximum(peak, column)
    total = torch.zeros_like(peak)
    out = q.new_zeros(*q.shape[:2], value.shape[3])
    for first, part in zip(starts, scores, strict=True):
        weights = torch.exp(part - peak)
        total = total + weights.sum(-1, keepdim=True)
        out = out + torch.bmm(weights, _tile(value, first, tiles))
    if sinks is not None:
        total = total + torch.exp(column - peak)
    out = (out / total).reshape(pieces, kv_heads, tiles * ROWS, -1)[:, :, :rows]
    return out.reshape(pieces, heads, queries, -1).to(query.dtype)


def _tile(keys: torch.Tensor, first: int, tiles: int) -> torch.Tensor:
    """A tile of each piece and head, for each of its tiles of rows: [P * KH * tiles, KEYS, D] in float32."""
    part = keys[:, :, first : first + KEYS].float()
    return part.unsqueeze(2).expand(-1, -1, tiles, -1, -1).reshape(-1, KEYS, keys.shape[3])


@dataclass(frozen=True)
class FixedPaging(TorchPaging):
    """See `TorchPaging`; its plan has tiles of `fixed.attention.KEYS`."""

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        keys = self.pool.attended_keys[layer.index]
        values = None if layer.latent_rank else self.pool.attended_values[layer.index]
        out = self.empty(query, layer.latent_rank if values is None else values.shape[-1])
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
    # no `linear` is here, for which a function mode would look at each call: a tenth of a small model's step
    with torch._C.DisableTorchFunction():
        for group in groups:
            assert group.mask is not None
            k = gather(keys, group.table, group.pieces)
            v = k[..., : out.shape[-1]] if values is None else gather(values, group.table, group.pieces)
            group.give(attend(group.take(query), k, v, group.mask, scaling, sinks), out)
