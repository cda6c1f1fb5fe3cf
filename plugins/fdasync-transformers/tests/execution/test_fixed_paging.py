"""Paging in the fixed order: a decode and a chunk of one step have the bits of the whole prompt."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fdasync_kernels.attention import decode, latent, prefill
from fdasync_kernels.attention.fixed import Grain
from fdasync_kernels.attention.prefill import prefill_tiles
from fdasync_transformers.execution.step_shape import DeviceBatch
from fdasync_transformers.execution.triton_paging import TritonPaging, Workspaces
from fdasync_transformers.model.kv import Reach

LENGTH, BLOCK_TOKENS = 70, 4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that were asked for the fixed order. Its parts are of 32 keys, or nothing here would be joined."""
    names: set[str] = set()

    def grain_of(name: str, _dim: int, _dtype: torch.dtype) -> Grain:
        names.add(name)
        return Grain(16, 32)

    for module in (decode, latent, prefill):
        monkeypatch.setattr(module, "grain_of", partial(grain_of, module.__name__.rpartition(".")[2]))
    return names


def paging(pool: Any, starts: list[int], counts: list[int], decodes: int, *, fixed: bool) -> TritonPaging:
    first_rows = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))
    positions = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
    tiles = prefill_tiles([0] * decodes + counts[decodes:])
    batch = DeviceBatch(
        sum(counts), decodes, torch.zeros(len(counts), dtype=torch.int32), torch.tensor(starts), first_rows,
        torch.tensor(counts, dtype=torch.int32), torch.from_numpy(tiles),
    )  # fmt: skip
    tables = torch.arange(pool.blocks, dtype=torch.int32)[None]
    slots = torch.tensor(positions)
    workspaces = Workspaces(8, torch.device("cpu"), fixed=fixed)
    return TritonPaging(pool, tables, batch, slots, slots, workspaces, fixed=fixed)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_step_has_the_bits_of_the_whole_prompt(asked: set[str], fixed: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    blocks = -(-LENGTH // BLOCK_TOKENS)
    # products of a tile are exact, in whatever order numpy adds them up
    keys = torch.nn.functional.one_hot(torch.randint(16, (blocks, BLOCK_TOKENS, 1), generator=draw), 16).half()
    values = torch.randint(-7, 8, (blocks, BLOCK_TOKENS, 1, 16), generator=draw).half()
    query = (torch.randint(-6, 7, (LENGTH, 1, 16), generator=draw) * 0.625).half()
    pool = SimpleNamespace(attended_keys=[keys], attended_values=[values], blocks=blocks)
    layer = cast("Any", SimpleNamespace(
        index=0, latent_rank=0, value_dim=16, reach=Reach()
    ))  # fmt: skip
    whole = paging(pool, [0], [LENGTH], 0, fixed=fixed).attend(layer, query, 0.3, None)
    # two decodes, and a chunk behind them
    at = [40, 69, *range(33, 38)]
    out = paging(pool, [40, 69, 33], [1, 1, 5], 2, fixed=fixed).attend(layer, query[at], 0.3, None)
    assert torch.allclose(out, whole[at], rtol=1e-2, atol=1e-2)
    if fixed:
        assert torch.equal(out, whole[at])
    assert asked == ({"decode", "prefill"} if fixed else set())


@pytest.mark.parametrize("fixed", [True, False])
def test_latents_of_a_step_have_the_bits_of_the_whole_prompt(asked: set[str], fixed: bool) -> None:
    draw = torch.Generator().manual_seed(4)
    blocks, rank = -(-LENGTH // BLOCK_TOKENS), 16
    # as above: a latent and a rotary part with one number each
    parts = [torch.randint(16, (blocks, BLOCK_TOKENS, 1), generator=draw) for _ in range(2)]
    keys = torch.cat([torch.nn.functional.one_hot(part, 16).half() for part in parts], dim=-1)
    query, rotary = ((torch.randint(-6, 7, (LENGTH, 1, 16), generator=draw) * 0.625).half() for _ in range(2))
    pool = SimpleNamespace(keys=[keys], attended_keys=[keys], blocks=blocks)
    layer = cast("Any", SimpleNamespace(index=0, latent_rank=rank, reach=Reach(), query_scale=None))
    whole = paging(pool, [0], [LENGTH], 0, fixed=fixed).attend_latents(layer, query, rotary, 0.3)
    at = [40, 69, *range(33, 38)]
    step = paging(pool, [40, 69, 33], [1, 1, 5], 2, fixed=fixed)
    out = step.attend_latents(layer, query[at], rotary[at], 0.3)
    assert torch.allclose(out, whole[at], rtol=1e-2, atol=1e-2)
    if fixed:
        assert torch.equal(out, whole[at])
    assert asked == ({"latent", "prefill"} if fixed else set())
