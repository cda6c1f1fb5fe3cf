"""Attention with sinks: one more logit per head, whose probability is dropped.

Knows no paging and no modules. Called by `attention.py`, `chosen.py` and the trainers' attention in `fdasync_trainer`.
"""

from __future__ import annotations

import torch


def attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Plain attention with one more column per head in the softmax, dropped afterwards."""
    pieces, heads, queries, dim = q.shape
    packed = q.reshape(pieces, k.shape[1], -1, queries, dim)
    scores = torch.matmul(packed, k.unsqueeze(2).transpose(-1, -2)) * scaling
    if mask is not None:
        scores = scores + mask.unsqueeze(2)
    elif queries > 1:
        scores = scores + scores.new_full((queries, k.shape[2]), float("-inf")).triu(1)
    column = sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v.unsqueeze(2)).reshape(pieces, heads, queries, v.shape[-1])
