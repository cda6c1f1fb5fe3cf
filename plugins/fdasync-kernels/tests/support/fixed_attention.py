"""Calls of the kernels of attention in their fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attention_layers import Shape
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.prefill import attend_prefill, prefill_tiles

if TYPE_CHECKING:
    from attention_reference import Case

SCALE = 0.3
BF16 = torch.bfloat16
# of models that are served
SHAPES = {
    "Qwen3": Shape(heads=32, kv_heads=4, key_dim=128, value_dim=128, dtype=BF16),
    "gpt-oss": Shape(
        heads=64, kv_heads=8, key_dim=64, value_dim=64, reach=("window", 128), sinks=True, dtype=BF16
    ),
    "64, sinks": Shape(heads=8, kv_heads=2, key_dim=64, value_dim=64, sinks=True, dtype=torch.float16),
    "chunk, five a group": Shape(heads=10, kv_heads=2, key_dim=128, value_dim=128, reach=("chunk", 700), dtype=BF16),
    "window over parts": Shape(heads=8, kv_heads=4, key_dim=128, value_dim=128, reach=("window", 1000), dtype=BF16),
    "from": Shape(heads=32, kv_heads=4, key_dim=128, value_dim=128, reach=("from", 1), dtype=BF16),
    "256": Shape(heads=16, kv_heads=8, key_dim=256, value_dim=256, dtype=BF16),
    "256, window": Shape(heads=8, kv_heads=4, key_dim=256, value_dim=256, reach=("window", 512), dtype=BF16),
    "192 and 128": Shape(heads=8, kv_heads=2, key_dim=192, value_dim=128, dtype=BF16),
    "MLA, 16 heads": Shape(heads=16, key_dim=576, value_dim=512, latent=True, dtype=BF16),
    "MLA, 128 heads": Shape(heads=128, key_dim=576, value_dim=512, latent=True, dtype=BF16),
    "float32": Shape(heads=8, kv_heads=2, key_dim=128, value_dim=128),
}  # fmt: skip


def prefill(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, starts: list[int], counts: list[int],
    **more: Any,
) -> torch.Tensor:  # fmt: skip
    device = query.device
    out = torch.full((len(query), shape.heads, shape.value_dim), torch.nan, device=device)
    attend_prefill(
        query, case.keys, case.values, case.tables, case.lanes, torch.tensor(starts, device=device),
        torch.from_numpy(np.cumsum([0, *counts])[:-1]).to(device), torch.tensor(counts, device=device),
        torch.from_numpy(prefill_tiles(counts)).to(device), scale=SCALE, reach_kind=shape.reach[0],
        reach_size=shape.reach[1], sinks=sinks, out=out, value_dim=shape.value_dim, **{"fixed": True, **more},
    )  # fmt: skip
    return out


def decode(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, whose: list[tuple[int, int]], **more: Any
) -> torch.Tensor:
    """Row by row (sequence, position); like `prefill` into float32, which hides no bit."""
    device = query.device
    out = torch.full((len(query), shape.heads, shape.value_dim), torch.nan, device=device)
    workspace = decode_workspace(len(query), shape.heads, shape.value_dim, device)
    workspace.partials.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    lanes = case.lanes[torch.tensor([number for number, _ in whose], device=device)]
    positions = torch.tensor([position for _, position in whose], device=device)
    attend_decode(
        query, case.keys, case.values, case.tables, lanes, positions, scale=SCALE, reach_kind=shape.reach[0],
        reach_size=shape.reach[1], sinks=sinks, out=out, workspace=workspace, value_dim=shape.value_dim,
        **{"fixed": True, **more},
    )  # fmt: skip
    assert not workspace.arrivals.any()
    return out
