"""What fixed numerics set on a model: nothing that others share, and an output head that may be called alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_trainer import fixed_numerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from rollout_bits import served_in

from fdasync.errors import BadInput

IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture(params=["qwen3_moe", "llama4"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Two models of one config object."""
    first = make_tiny_model(request.param)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    second.load_state_dict(first.state_dict())
    return first, second


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def test_a_model_of_the_same_config_stays_as_it_is(pair: tuple[Any, Any]) -> None:
    first, second = pair
    before = vars(first.config).copy()
    plain = logits_of(second)
    with fixed_numerics(first):
        fixed = logits_of(first)
        assert torch.equal(logits_of(second), plain)
        with fixed_numerics(second):
            assert torch.equal(logits_of(second), fixed)
    assert not torch.equal(plain, fixed)
    assert vars(first.config) == before


def test_two_contexts_may_end_in_any_order(pair: tuple[Any, Any]) -> None:
    first, second = pair
    plain = logits_of(second)
    one, two = fixed_numerics(first).apply(), fixed_numerics(second).apply()
    fixed = logits_of(first)
    one.undo()
    assert torch.equal(logits_of(second), fixed)
    assert torch.equal(logits_of(first), plain)
    two.undo()
    assert torch.equal(logits_of(second), plain)
    assert first.config is second.config


def test_parts_of_a_model_keep_having_one_config() -> None:
    model = make_tiny_model("llama4")
    with fixed_numerics(model):
        text = model.language_model.model
        assert model.config.text_config is text.config
        assert {id(layer.self_attn.config) for layer in text.layers} == {id(text.config)}


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_head_alone_has_the_models_logits(dtype: torch.dtype, bias: bool) -> None:
    model = served_in(make_tiny_model("phimoe", lm_head_bias=bias), dtype)
    with torch.no_grad(), fixed_numerics(model):
        hidden = model.model(input_ids=IDS).last_hidden_state
        wanted = logits_of(model)
        assert torch.equal(model.lm_head(hidden), wanted)
        assert torch.equal(model.lm_head(hidden[1, 3:5]), wanted[1, 3:5])
        assert torch.equal(model.lm_head(hidden[1:, 7:8]), wanted[1:, 7:8])


def test_the_output_head_alone_has_gradients_and_is_refused_as_a_pass_is() -> None:
    model = make_tiny_model("qwen3_moe")
    hidden = torch.randn(3, model.config.hidden_size, requires_grad=True)
    with fixed_numerics(model):
        model.lm_head(hidden).sum().backward()
        assert torch.allclose(hidden.grad, model.lm_head.weight.sum(0).expand_as(hidden), atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInput, match="autocast"):
            model.lm_head(hidden)
        for reentrant in (False, True):
            with pytest.raises(BadInput, match="checkpointed"):
                torch.utils.checkpoint.checkpoint(model.lm_head, hidden, use_reentrant=reentrant)
    assert "forward" not in vars(model.lm_head)
