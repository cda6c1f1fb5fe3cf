"""Layers of latent attention, a call of the kernel on them, and what it should give."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attention_reference import Case, make_case, reference
from fdasync_kernels.attention.decode import decode_workspace
from fdasync_kernels.attention.latent import attend_latents

SCALE = 0.3


class Shape(NamedTuple):
    """Of a latent layer."""

    heads: int = 4
    rank: int = 16
    dims: int = 8
    dtype: torch.dtype = torch.float32


def make_latents(shape: Shape, lengths: list[int], device: torch.device, **more: Any) -> Case:
    return make_case(
        device, lengths, key_dim=shape.rank + shape.dims, value_dim=shape.rank, latent=True, dtype=shape.dtype, **more
    )


def make_query(shape: Shape, rows: int, device: torch.device) -> torch.Tensor:
    """[rows, heads, rank + dims], a view of [heads, rows, ...] as products by head leave it."""
    draw = torch.Generator().manual_seed(rows)
    query = torch.randn(shape.heads, rows, shape.rank + shape.dims, generator=draw).to(shape.dtype)
    return (query / (shape.rank + shape.dims) ** 0.25).to(device).transpose(0, 1)


def decode(
    shape: Shape,
    case: Case,
    query: torch.Tensor,
    lanes: torch.Tensor,
    positions: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Of whatever strides: the two parts of the query lie in one tensor or not, the output is a view by head."""
    out = torch.full((shape.heads, len(lanes), shape.rank), torch.nan, dtype=shape.dtype, device=query.device)
    workspace = decode_workspace(len(lanes), shape.heads, shape.rank, query.device)
    workspace.partials.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    attend_latents(
        query[..., : shape.rank], query[..., shape.rank :].contiguous(), case.keys, case.tables, lanes, positions,
        scale=SCALE, out=out.transpose(0, 1), workspace=workspace, **more,
    )  # fmt: skip
    return out.transpose(0, 1)


def expected(case: Case, query: torch.Tensor, whose: list[tuple[int, int]]) -> torch.Tensor:
    """For each row of the query, (sequence, position)."""
    return torch.stack([
        reference(row, at, case.flat_keys[number], case.flat_values[number], SCALE, ("full", 0), None)
        for row, (number, at) in zip(query.cpu(), whose, strict=True)
    ])  # fmt: skip


def last(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lengths, device=device) - 1
