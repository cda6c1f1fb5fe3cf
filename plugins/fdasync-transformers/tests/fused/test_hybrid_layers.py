"""Decoder layers whose attention half is the library's own: what is around it is proven, and kept where it differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_transformers.fused.layers.fuse import Layers
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.fused.operations import fuse_operations
from fdasync_transformers.fused.replacement import Replaced, replace
from fdasync_transformers.tiny.checkpoints import make_tiny_model

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def fuse_layers(model: Any, **how: Any) -> Replaced:
    return replace(Layers(model, **how), model)


def opened(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = make_tiny_model(family).to(dtype).to("cuda" if ON_GPU else "cpu").requires_grad_(False)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_whole_layer_is_what_the_library_computes(family: str, dtype: torch.dtype) -> None:
    model, live = opened(family, dtype), LiveRows()
    hidden = torch.randn(1, 7, int(model.config.hidden_size), generator=torch.Generator().manual_seed(4))
    hidden = hidden.to(model.device, dtype)
    layer = model.model.layers[0]
    with torch.inference_mode():
        wanted = layer(hidden, position_embeddings=None)
        fuse_operations(model)
        fused = fuse_layers(model, live=live)
        assert fused.notes == ()
        assert sorted(fused.names) == [str(number) for number in range(len(model.model.layers))]
        # outside of a step it is the library's code
        plain = layer(hidden, position_embeddings=None)
        live.slots = torch.arange(7, device=model.device)
        got = layer(hidden, position_embeddings=None)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(plain, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    if dtype is torch.float32:
        assert not torch.equal(got, hidden)


def test_a_layer_with_another_norm_keeps_the_library_s_code() -> None:
    model = opened("qwen3_next")
    norm = model.model.layers[1].post_attention_layernorm
    norm.forward = lambda x: x * 1.01
    fused = fuse_layers(model, live=LiveRows())
    assert "1" not in fused.names
    assert "decoder layers 1 are the library's own: its norms differ" in fused.notes


def test_a_layer_with_another_second_half_keeps_the_library_s_code() -> None:
    model = opened("qwen3_next")
    block = model.model.layers[0].mlp
    own = block.forward
    block.forward = lambda x: own(x) * 1.5
    assert fuse_layers(model, live=LiveRows()).reasons == {"0": "its second block differs"}


def test_fixed_numerics_keep_the_library_s_code() -> None:
    fused = fuse_layers(opened("qwen3_next"))
    assert fused.names == []
    assert "of no known kind" in fused.notes[0]
