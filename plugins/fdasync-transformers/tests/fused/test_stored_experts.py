"""Fused experts over weights that stay as stored: proven against the library's code on the dequantised ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.experts import fuse_experts
from fdasync_transformers.fused.experts_interface import NAME
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.model.kept.keep import keep_experts
from fdasync_transformers.model.kept.kept import Kept, kept_of
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.tiny.checkpoints import make_tiny_model

if TYPE_CHECKING:
    from fdasync_transformers.model.kept.forms import Form

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# one layer of experts each
FAMILIES: dict[str, tuple[Form, dict[str, Any]]] = {
    "qwen3_moe": (FP8, {"mlp_only_layers": [], "moe_intermediate_size": 128}),
    "gpt_oss": (MXFP4, {"layer_types": ["full_attention"], "hidden_size": 64, "intermediate_size": 64}),
    "nemotron_h": (
        FP8,
        {"num_hidden_layers": None, "layers_block_type": ["attention", "moe"], "moe_intermediate_size": 128},
    ),
    "minimax_m2": (FP8, {"intermediate_size": 128}),
}


def build(family: str) -> tuple[Any, Any, Any]:
    """A model that keeps its experts, the layers, and the experts of its last layer of them."""
    form, overrides = FAMILIES[family]
    sizes = {"num_hidden_layers": 1, **overrides}
    plain = make_tiny_model(family, **{key: value for key, value in sizes.items() if value is not None}).bfloat16()
    state = {name: held.clone() for name, held in plain.state_dict().items()}
    keep_experts(plain, form)
    for path, module in plain.named_modules():
        for name, kept in kept_of(module).items():
            made = Kept.made_of(state[f"{path}.{name}"], form)
            kept.values.copy_(made.values)
            kept.scales.copy_(made.scales)
    model = plain.requires_grad_(False).to(PLACE)
    model.set_experts_implementation("eager")
    layers = find_moe_layers(model)
    assert layers is not None
    return model, layers, model.get_submodule(layers.names[-1])


@pytest.mark.ci
@torch.inference_mode()
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "qwen3_moe" else pytest.mark.nightly) for one in FAMILIES]
)
def test_they_compute_what_the_library_makes_of_the_dequantised_weights(family: str) -> None:
    model, layers, module = build(family)
    make = torch.Generator().manual_seed(5)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    hidden = torch.randn((7, width), generator=make).to(PLACE, torch.bfloat16)
    ids = torch.rand((7, len(module.down_proj)), generator=make).topk(2).indices.to(PLACE)
    weights = torch.rand((7, 2), generator=make).to(PLACE, torch.bfloat16)
    wanted = module(hidden, ids, weights)
    assert fuse_experts(model, layers, LiveRows()).notes == ()
    assert model.config._experts_implementation == NAME
    assert not module.fd_experts.transposed
    found = module(hidden, ids, weights)
    assert float((found - wanted).float().norm()) < 0.02 * float(wanted.float().norm())
    # new values in place are read
    if module.down_proj.form is FP8:
        module.down_proj.scales.mul_(2)
        assert torch.equal(module(hidden, ids, weights), found * 2)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares with what the stored values stand for."""
    model, layers, module = build("qwen3_moe")
    kept: Kept = module.down_proj
    honest = Kept.__getitem__
    monkeypatch.setattr(Kept, "__getitem__", lambda self, index: honest(self, index) * (1.2 if self is kept else 1))
    result = fuse_experts(model, layers, LiveRows())
    assert not result.names
    assert "gives other results" in result.notes[0]
