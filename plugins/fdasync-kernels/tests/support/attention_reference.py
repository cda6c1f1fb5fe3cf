"""Attention written down once more, one query at a time in float64, and the paged cases that kernels are tried on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


def reference(
    query: torch.Tensor,
    position: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    reach: tuple[str, int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query [H, Dk] at `position` over a sequence's keys [n, KH, Dk] and values [n, KH, Dv]: [H, Dv] in float64."""
    kind, size = reach
    seen = [
        number
        for number in range(position + 1)
        if kind == "full"
        or (kind == "window" and number > position - size)
        or (kind == "chunk" and number // size == position // size)
        or (kind == "from" and number >= min(size, position))
    ]
    group = query.shape[0] // keys.shape[1]
    keys = keys[seen].double().repeat_interleave(group, dim=1)
    values = values[seen].double().repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,nhd->hn", query.double(), keys) * scale
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
    weights = torch.softmax(logits, dim=1)[:, : len(seen)]
    return torch.einsum("hn,nhd->hd", weights, values)


@dataclass
class Case:
    """Sequences in a pool that holds NaN wherever nothing was stored; one of several layers' strided views of it.

    Attributes:
        keys, values: the layer's views, of 4 dimensions where shares have one head; values None where it is latent.
        tables, lanes: int32; sequence s has row lanes[s], the other rows name blocks that nothing may read.
        flat_keys, flat_values: by sequence, what was stored, [length, KH, D] on the CPU.
        slots: by sequence, where, int64.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    tables: torch.Tensor
    lanes: torch.Tensor
    flat_keys: list[torch.Tensor]
    flat_values: list[torch.Tensor]
    slots: list[torch.Tensor]
    value_dim: int


def make_case(
    device: torch.device,
    lengths: list[int],
    *,
    kv_heads: int = 1,
    key_dim: int = 16,
    value_dim: int = 16,
    latent: bool = False,
    block_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shares: int = 0,
) -> Case:
    """`shares` of a block, each with as many of the heads; 0: one for each head."""
    draw = torch.Generator().manual_seed(seed)
    order = np.random.default_rng(seed)
    need = [-(-length // block_tokens) for length in lengths]
    num_blocks, width = sum(need) + 3, max(need) + 2
    shares = shares or kv_heads
    heads = kv_heads // shares
    # two layers before this one and one behind: blocks and shares lie far apart
    elements = block_tokens * heads * (key_dim + (0 if latent else value_dim))
    blocks = torch.full((num_blocks, shares * 4 * elements), torch.nan, dtype=dtype, device=device)
    views = [
        blocks.as_strided(
            (num_blocks, block_tokens, shares, heads, dim),
            (blocks.stride(0), heads * dim, 4 * elements, dim, 1),
            2 * elements + offset,
        )
        for dim, offset in ((key_dim, 0), (0 if latent else value_dim, block_tokens * heads * key_dim))
    ]
    if heads == 1:
        views = [view.squeeze(3) for view in views]
    keys, values = views[0], None if latent else views[1]
    free = order.permutation(num_blocks)
    lanes = order.permutation(len(lengths) + 2)[: len(lengths)]
    # entries that nothing may follow: far outside the pool
    tables = torch.full((len(lengths) + 2, width), 1 << 28, dtype=torch.int32)
    flat_keys, flat_values, slots = [], [], []
    for lane, length, count in zip(lanes, lengths, need, strict=True):
        mine, free = free[:count], free[count:]
        tables[lane, :count] = torch.from_numpy(mine.astype(np.int32))
        at = torch.from_numpy(np.repeat(mine, block_tokens) * block_tokens + np.tile(np.arange(block_tokens), count))
        slots.append(at[:length].to(device))
        flat_keys.append(torch.randn(length, kv_heads, key_dim, generator=draw).to(dtype))
        if latent:
            flat_values.append(flat_keys[-1][..., :value_dim])
        else:
            flat_values.append(torch.randn(length, kv_heads, value_dim, generator=draw).to(dtype))
        where = (slots[-1] // block_tokens, slots[-1] % block_tokens)
        for view, flat in ((keys, flat_keys[-1]), (values, flat_values[-1])):
            if view is not None:
                view[where] = flat.to(device).view(length, *view.shape[2:])
    return Case(
        keys, values, tables.to(device), torch.from_numpy(lanes.astype(np.int32)).to(device),
        flat_keys, flat_values, slots, value_dim,
    )  # fmt: skip


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within what the dtype allows, of the expected values' scale."""
    assert out.isfinite().all()
    # float32: sums of up to 576 products of a key and thousands of weights, each rounded once
    limit = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    error = (out.cpu().double() - expected).abs().max().item() / max(expected.abs().max().item(), 1e-3)
    assert error < limit, f"error {error:.2e} of the scale, {math.log10(error / limit):.1f} orders over the limit"
