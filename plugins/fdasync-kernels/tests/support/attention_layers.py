"""Layers of attention of all kinds, calls of the kernels on them, and what these should give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from attention_reference import Case, make_case, reference
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.prefill import attend_prefill, prefill_tiles

if TYPE_CHECKING:
    from fdasync_kernels.attention.tile import Launch

Reaches = tuple[Any, int]


class Shape(NamedTuple):
    """Heads of a layer and what its queries see."""

    heads: int = 2
    kv_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    reach: Reaches = ("full", 0)
    sinks: bool = False
    latent: bool = False
    dtype: torch.dtype = torch.float32
    shares: int = 0


SHAPES = {
    "one head a group": Shape(heads=2, kv_heads=2),
    "eight heads a group, two parts": Shape(heads=8, key_dim=24, value_dim=16),
    "window": Shape(reach=("window", 6)),
    "chunk": Shape(reach=("chunk", 8)),
    "sinks": Shape(heads=4, kv_heads=2, sinks=True),
    "latent": Shape(heads=20, key_dim=24, value_dim=16, latent=True),
    "bf16": Shape(heads=4, kv_heads=2, key_dim=32, value_dim=32, dtype=torch.bfloat16),
    "from": Shape(heads=2, reach=("from", 3)),
    "latent, value not a part": Shape(heads=4, key_dim=24, value_dim=20, latent=True),
    "two heads a share": Shape(heads=12, kv_heads=6, key_dim=24, value_dim=12, shares=3),
    "four heads a group": Shape(heads=8, kv_heads=2, key_dim=32, value_dim=32),
    "three heads a group, small dims": Shape(heads=6, kv_heads=2, key_dim=8, value_dim=12),
    "all heads in one share": Shape(heads=6, kv_heads=3, value_dim=8, shares=1),
    "window of one": Shape(reach=("window", 1)),
    "from, latent": Shape(heads=20, key_dim=24, value_dim=16, latent=True, reach=("from", 1)),
    "window and sinks": Shape(heads=3, reach=("window", 5), sinks=True),
    "fp16, sinks": Shape(heads=4, kv_heads=2, key_dim=24, value_dim=24, dtype=torch.float16, sinks=True),
}


def make_layer(shape: Shape, lengths: list[int], device: torch.device, **more: Any) -> tuple[Case, torch.Tensor | None]:
    case = make_case(
        device, lengths, kv_heads=shape.kv_heads, key_dim=shape.key_dim, value_dim=shape.value_dim,
        latent=shape.latent, dtype=shape.dtype, shares=shape.shares, **more,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(5)
    return case, torch.randn(shape.heads, generator=draw).to(device) if shape.sinks else None


def make_query(shape: Shape, rows: int, device: torch.device) -> torch.Tensor:
    """[rows, heads, key_dim] as models make it: a view of [heads, rows, key_dim]."""
    draw = torch.Generator().manual_seed(rows)
    query = torch.randn(shape.heads, rows, shape.key_dim, generator=draw).to(shape.dtype)
    return query.to(device).transpose(0, 1)


def decode(
    shape: Shape,
    case: Case,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    *,
    splits: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    out = torch.full((len(lanes), shape.heads, shape.value_dim), torch.nan, dtype=shape.dtype, device=query.device)
    workspace = decode_workspace(len(lanes), shape.heads, shape.value_dim, query.device)
    workspace.partials.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    attend_decode(
        query, case.keys, case.values, case.tables, lanes, positions, scale=0.3, reach_kind=shape.reach[0],
        reach_size=shape.reach[1], sinks=sinks, out=out, workspace=workspace, value_dim=shape.value_dim,
        splits=splits, launch=launch,
    )  # fmt: skip
    return out


def prefill(
    shape: Shape,
    case: Case,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
    starts: list[int],
    counts: list[int],
    *,
    gap: int = 0,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`gap` rows before each sequence's belong to no sequence."""
    device = query.device
    out = torch.full((len(query), shape.heads, shape.value_dim), torch.nan, dtype=shape.dtype, device=device)
    first_rows = np.cumsum([0, *counts])[:-1] + gap * np.arange(1, len(counts) + 1)
    attend_prefill(
        query, case.keys, case.values, case.tables, case.lanes, torch.tensor(starts, device=device),
        torch.from_numpy(first_rows).to(device), torch.tensor(counts, device=device),
        torch.from_numpy(prefill_tiles(counts)).to(device), scale=0.3, reach_kind=shape.reach[0],
        reach_size=shape.reach[1], sinks=sinks, out=out, value_dim=shape.value_dim, launch=launch,
    )  # fmt: skip
    return out


def expected(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, whose: list[tuple[int, int]]
) -> torch.Tensor:
    """For each row of the query, (sequence, position)."""
    shown = None if sinks is None else sinks.cpu()
    return torch.stack([
        reference(row, at, case.flat_keys[number], case.flat_values[number], 0.3, shape.reach, shown)
        for row, (number, at) in zip(query.cpu(), whose, strict=True)
    ])  # fmt: skip


def dense(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, number: int, start: int
) -> torch.Tensor:
    """All of a sequence's queries at once, in float64 on the device."""
    group = shape.heads // shape.kv_heads
    keys = case.flat_keys[number].to(query.device).double().repeat_interleave(group, dim=1)
    values = case.flat_values[number].to(query.device).double().repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,nhd->hqn", query.double(), keys) * 0.3
    at = torch.arange(start, start + len(query), device=query.device)[:, None]
    key_at = torch.arange(len(keys), device=query.device)[None, :]
    kind, size = shape.reach
    seen = key_at <= at
    if kind == "window":
        seen &= key_at > at - size
    elif kind == "chunk":
        seen &= key_at // size == at // size
    elif kind == "from":
        seen &= key_at >= at.clamp(max=size)
    logits.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=2)
    weights = torch.softmax(logits, dim=2)[..., : len(keys)]
    return torch.einsum("hqn,nhd->qhd", weights, values).cpu()
