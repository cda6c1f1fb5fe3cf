"""Linears whose weights are views of one storage: `fused/layers/merged.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.layers.merged import Merged, merge_linears
from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from live_weights import Live, assert_equal, stored
from torch.nn import Linear

if TYPE_CHECKING:
    from pathlib import Path


def projections(layer: Any) -> list[Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def merge(model: Any) -> list[Merged]:
    return [merge_linears(projections(layer)) for layer in model.model.layers]


def assert_whole(model: Any, merged: list[Merged]) -> None:
    """What the projections have is what the products of the merged weights give."""
    for layer, one in zip(model.model.layers, merged, strict=True):
        parts = projections(layer)
        assert torch.equal(one.weight, torch.cat([part.weight for part in parts]))
        assert (one.bias is None) == (parts[0].bias is None)
        if one.bias is not None:
            assert torch.equal(one.bias, torch.cat([part.bias for part in parts]))


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_updates_by_name_reach_the_whole(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path / "a", family)
    make_tiny_checkpoint(tmp_path / "b", family, seed=1)
    make_tiny_checkpoint(tmp_path / "c", family, seed=2, shards=True)
    live, fresh = Live(tmp_path / "a"), Live(tmp_path / "b")
    before = live.state()
    # at start-up, where the proofs run in inference mode
    with torch.inference_mode():
        merged = merge(live.model)
    assert_equal(live.state(), before)
    assert_whole(live.model, merged)
    addresses = live.now()
    wanted = fresh.weights.load_folder(str(tmp_path / "b"))
    assert live.weights.load_folder(str(tmp_path / "b")) == wanted, "another weights id than of weights apart"
    assert_equal(live.state(), fresh.state())
    assert_whole(live.model, merged)
    # tensor by tensor, from memory
    new = {name: tensor for name, tensor in stored(tmp_path / "a").items() if "_proj" in name and "self_attn" in name}
    live.send((name, "float32", tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in new.items())
    state = live.state()
    assert all(torch.equal(state[name], tensor) for name, tensor in new.items())
    assert_whole(live.model, merged)
    live.weights.load_folder(str(tmp_path / "c"))
    assert_equal(live.state(), Live(tmp_path / "c").state())
    assert_whole(live.model, merged)
    assert live.now() == addresses


def test_merging_again_changes_nothing() -> None:
    linears = [Linear(8, size) for size in (6, 2, 2)]
    first, again = merge_linears(linears), merge_linears(linears)
    assert first.weight.data_ptr() == again.weight.data_ptr()
    assert first.bias is not None
    assert again.bias is not None
    assert first.bias.data_ptr() == again.bias.data_ptr()
    assert again.weight.shape == (10, 8)
    x = torch.randn(3, 8)
    apart = torch.cat([linear(x) for linear in linears], -1)
    torch.testing.assert_close(torch.nn.functional.linear(x, again.weight, again.bias), apart)


def test_what_cannot_be_one_product() -> None:
    class Scaled(Linear):
        pass

    for other, why in (
        (Linear(4, 2), "its projections are not alike"),
        (Linear(8, 2, dtype=torch.bfloat16), "its projections are not alike"),
        (Linear(8, 2, bias=False), "some have none"),
        (Scaled(8, 2), "its projections are not alike"),
    ):
        with pytest.raises(Differs, match=why):
            merge_linears([(type(other))(8, 6), other])
