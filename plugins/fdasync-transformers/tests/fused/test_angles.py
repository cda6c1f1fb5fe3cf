"""Tables of angles: the library's bits at every position, and which modules keep the library's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_transformers.fused import angles
from fdasync_transformers.fused.angles import Angles
from fdasync_transformers.fused.operations import fuse_operations
from fdasync_transformers.fused.replacement import Replaced, replace
from fdasync_transformers.tiny.checkpoints import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": LLAMA3,
}


def build(kind: str = "default", dtype: torch.dtype = torch.bfloat16, family: str = "qwen3_moe") -> Any:
    more = {} if kind == "default" else {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}}
    return make_tiny_model(family, **more).to(DEVICE, dtype)


def fuse_angles(model: Any, dtype: torch.dtype = torch.bfloat16) -> Replaced:
    return replace(Angles(dtype, DEVICE), model)


def ask(module: Any, dtype: torch.dtype, positions: torch.Tensor) -> Any:
    with torch.inference_mode():
        return module(torch.empty(1, 1, dtype=dtype, device=DEVICE), positions.to(DEVICE))


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("kind", ["default", "yarn", "llama3", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_position_has_the_librarys_bits(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, dtype)
    module = model.model.rotary_emb
    most = model.config.max_position_embeddings
    positions = torch.randperm(most, generator=torch.Generator().manual_seed(2))[None]
    before = ask(module, dtype, positions)
    replaced = fuse_angles(model, dtype)
    assert replaced.names == ["model.rotary_emb"]
    for ours, library in zip(ask(module, dtype, positions), before, strict=True):
        assert ours.shape == library.shape
        assert torch.equal(ours, library)
    # padding is finite, and nothing is made up past the end
    cos, _ = ask(module, dtype, torch.tensor([[-1, most]]))
    assert cos[0, 0].isfinite().all()
    assert cos[0, 1].isnan().all()


def test_other_dtypes_and_batches_go_the_librarys_way() -> None:
    model = build()
    module = model.model.rotary_emb
    fuse_angles(model)
    assert ask(module, torch.float32, torch.arange(5)[None])[0].dtype is torch.float32
    assert ask(module, torch.bfloat16, torch.arange(10).view(2, 5))[0].shape[:2] == (2, 5)


def test_what_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, reason in (("dynamic", "its kind dynamic"), ("longrope", "its kind longrope")):
        model = build()
        model.model.rotary_emb.rope_type = kind
        assert reason in fuse_angles(model).reasons["Qwen3MoeRotaryEmbedding"]
    model = build()
    monkeypatch.setattr(model.config, "get_text_config", object)
    assert "how many positions" in fuse_angles(model).reasons["Qwen3MoeRotaryEmbedding"]
    monkeypatch.setattr(angles, "_MOST_NBYTES", 100)
    assert "are left for it" in fuse_angles(build()).reasons["Qwen3MoeRotaryEmbedding"]


def test_a_module_that_looks_at_more_than_the_position_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    kind = type(model.model.rotary_emb)
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = own(self, x, position_ids)
        return cos * position_ids.shape[1], sin

    monkeypatch.setattr(kind, "forward", forward)
    replaced = fuse_angles(model)
    assert not replaced.names
    assert "more than the position" in replaced.reasons[kind.__name__]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_logits_have_the_same_bits(family: str) -> None:
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    model = build(family=family, dtype=torch.float32)
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        replaced = fuse_angles(model, torch.float32)
        after = model(ids, use_cache=False).logits
    assert replaced.names
    assert torch.equal(before, after)


def test_the_notes_say_which_tables_there_are() -> None:
    assert fuse_operations(build())[Angles].names == ["model.rotary_emb"]
