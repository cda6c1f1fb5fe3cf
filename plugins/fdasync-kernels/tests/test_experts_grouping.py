"""Pairs by expert, stably, and their tiles, in one launch and in three: `experts/grouping.py`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fdasync_kernels.experts import grouping
from fdasync_kernels.experts.grouping import group
from fdasync_kernels.experts.tiles import Tile, Tiles, choose_tiles
from hypothesis import example, given, settings
from hypothesis import strategies as st

E, K = 6, 3
TILE = Tile(16, 16, 4, 2)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def poisoned(size: int | tuple[int, ...], **options: Any) -> torch.Tensor:
    """New memory holds what no index may be."""
    return torch.full(size if isinstance(size, tuple) else (size,), -7, **options)


def check(ids: torch.Tensor, live: torch.Tensor | None, num_experts: int, tiles: Tiles) -> None:
    with mock.patch.object(torch, "empty", poisoned):
        order, table, capacity = group(ids.to(DEVICE), None if live is None else live.to(DEVICE), num_experts, tiles)
    real = (ids >= 0) & (ids < num_experts)
    if live is not None:
        real &= (live >= 0)[:, None]
    flat = torch.where(real, ids, num_experts).flatten().long()
    count = int(real.sum())
    assert order[:count].tolist() == torch.argsort(flat, stable=True)[:count].tolist()
    wanted = []
    before = 0
    for expert, mine in enumerate(torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()):
        wanted += [[expert, before + at, min(tiles.rows, mine - at)] for at in range(0, mine, tiles.rows)]
        before += mine
    entries = table.view(capacity, 4)
    assert entries[: len(wanted), :3].tolist() == wanted
    assert (entries[len(wanted) :, 0] == -1).all()
    assert entries[0, 3] == len(wanted)


@pytest.mark.ci
@settings(max_examples=30, deadline=None)
@given(
    ids=st.integers(1, 40).flatmap(
        lambda tokens: st.lists(st.integers(-1, E), min_size=tokens * K, max_size=tokens * K)
    ),
    rows=st.sampled_from([16, 32]),
    apart=st.booleans(),
    masked=st.booleans(),
    data=st.data(),
)
@example(ids=[2] * 96, rows=16, apart=True, masked=False, data=None)
@example(ids=[-1] * 33, rows=16, apart=True, masked=False, data=None)
def test_it_is_a_stable_sort(ids: list[int], rows: int, apart: bool, masked: bool, data: Any) -> None:
    chosen = torch.tensor(ids).view(-1, K)
    live = None
    if masked:
        live = torch.tensor(data.draw(st.lists(st.integers(-1, 1), min_size=len(chosen), max_size=len(chosen))))
    with mock.patch.object(grouping, "_STRIP", 32):
        check(chosen, live, E, Tiles(rows, TILE, TILE, chunk=32, apart=apart))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_experts", [1, 5, 128])
def test_strips_of_the_true_size(num_experts: int, dtype: torch.dtype) -> None:
    """More experts than strips, and more strips than experts; the last strip is not full."""
    ids = torch.randint(-1, num_experts + 1, (150, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    check(ids, None, num_experts, Tiles(16, TILE, TILE, apart=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1537, 2048, 8192, 20_000])
@pytest.mark.parametrize("skewed", [False, True])
def test_many_pairs_on_a_gpu(device: torch.device, tokens: int, skewed: bool) -> None:
    draw = torch.Generator(device).manual_seed(tokens)
    scores = torch.rand((tokens, 128), generator=draw, device=device)
    if skewed:
        scores += torch.linspace(0, 1, 128, device=device)
    ids = scores.topk(8).indices.to(torch.int32).contiguous()
    live = torch.where(torch.arange(tokens) % 7 == 0, -1, 0)
    tiles = choose_tiles(tokens, 8, 128, torch.bfloat16, large=True, bulk=True)
    assert tiles.apart
    check(ids.cpu(), None, 128, tiles)
    check(ids.cpu(), live, 128, tiles)
