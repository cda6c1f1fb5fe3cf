"""Proofs behind the first comparison: tiles of every regime, and whole layers: `fused/experts.py`, `fused/dense.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_kernels.experts import chain
from fdasync_transformers.fused.dense import fuse_dense
from fdasync_transformers.fused.experts import fuse_experts
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.tiny.checkpoints import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.ci
def test_tiles_of_a_regime_that_differ_leave_the_librarys_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first comparisons run is right."""
    model = make_tiny_model("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[]).to(DEVICE, torch.bfloat16)
    layers = find_moe_layers(model)
    assert layers is not None
    honest = chain.experts

    def experts(*args: Any, tiles: Any = None, **kwargs: Any) -> torch.Tensor:
        found = honest(*args, tiles=tiles, **kwargs)
        return found if tiles is None else found * 1.1

    monkeypatch.setattr(chain, "experts", experts)
    before = model.config._experts_implementation
    result = fuse_experts(model, layers, LiveRows())
    assert not result.fused
    assert model.config._experts_implementation == before
    (note,) = result.notes
    assert "gives other results with Tiles(rows=" in note


@pytest.mark.parametrize("wrong", [1, 5])
def test_dense_layers_that_differ_as_a_whole_are_the_librarys(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """The activation is a known one; for rows of one number the library goes another way."""
    model = make_tiny_model("qwen3_moe", num_hidden_layers=2).to(DEVICE)
    kind = type(model.model.layers[1].mlp)
    plain = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = plain(self, x)
        return found * 1.01 if found.shape[-2] == wrong else found

    monkeypatch.setattr(kind, "forward", forward)
    replaced = fuse_dense(model, torch.float32, DEVICE)
    assert replaced.names == []
    assert replaced.reasons == {"Qwen3MoeMLP": "whole layers differ"}
    assert not any("forward" in vars(module) for module in model.modules())
