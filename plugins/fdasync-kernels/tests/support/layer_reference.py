"""What a library's separate operations give, rounding after each of them, and the same in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fdasync_kernels.layer.qkv import QkvForm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, once: bool = False) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * wide).to(x.dtype) if once else weight * wide.to(x.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: QkvForm) -> torch.Tensor:
    """Heads [T, heads, D] with cosines and sines [T, rotary_dim / 2]."""
    c, s = cos[:, None], sin[:, None]
    turned, passed = x[..., : form.rotary_dim], x[..., form.rotary_dim :]
    if form.interleaved:
        c, s = c.repeat_interleave(2, -1), s.repeat_interleave(2, -1)
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        c, s = torch.cat((c, c), -1), torch.cat((s, s), -1)
        half = form.rotary_dim // 2
        other = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    if form.full_precision:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        turned = (turned.to(wide) * c + other.to(wide) * s).to(x.dtype)
    else:
        turned = turned * c + other * s
    return torch.cat((turned, passed), -1)


def prepared(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    form: QkvForm,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, D] of a merged product."""
    rows = len(qkv)
    query, key, value = (
        part.reshape(rows, -1, form.head_dim)
        for part in qkv.split(
            [form.heads * form.head_dim, form.kv_heads * form.head_dim, form.kv_heads * form.head_dim], 1
        )
    )
    if query_weight is not None and key_weight is not None:
        if form.norm == "row":
            query, key = query.reshape(rows, -1), key.reshape(rows, -1)
        query = rms_norm(query, query_weight, form.eps, form.norm_rounds_once).view(rows, -1, form.head_dim)
        key = rms_norm(key, key_weight, form.eps, form.norm_rounds_once).view(rows, -1, form.head_dim)
    if form.clip:
        query, key, value = (x.clamp(-form.clip, form.clip) for x in (query, key, value))
    return turn(query, cos, sin, form), turn(key, cos, sin, form), value


def even(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values whose squares add up without rounding, in any order."""
    return torch.randint(-16, 17, shape, generator=generator).float() / 8
