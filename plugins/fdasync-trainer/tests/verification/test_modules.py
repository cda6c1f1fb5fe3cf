"""The first module that differs: named exactly, in the order of execution, over passes of any cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_trainer import ModuleTrace, first_difference, traced
from fdasync_trainer.verification.modules import row_digests
from fdasync_trainer.verification.reference import library_model
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = torch.arange(5, 25)[None]
PROMPT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model") / "model"
    make_tiny_checkpoint(folder, "qwen3_moe")
    return library_model(folder, torch.float32)


@torch.no_grad()
def trace(model: Any, tokens: torch.Tensor = TOKENS) -> ModuleTrace:
    with traced(model) as found:
        model(input_ids=tokens, use_cache=False)
    return found


def test_equal_models_have_no_difference_and_no_hooks_stay(model: Any) -> None:
    one, other = trace(model), trace(model)
    assert first_difference(one, other, PROMPT) is None
    assert one.order[0] == "model.embed_tokens"
    assert one.order[-1] == "(model)"
    assert one.order.index("model.layers.0.mlp") < one.order.index("model.layers.0")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.embed_tokens", -1),
        ("model.layers.0.self_attn.k_proj", 0),
        ("model.layers.1.post_attention_layernorm", 1),
        ("model.layers.2.mlp.gate", 2),
        ("model.layers.2.mlp.experts", 2),
        ("lm_head", -1),
    ],
)
def test_the_module_with_a_flipped_bit_is_named(model: Any, name: str, layer: int) -> None:
    before = trace(model)
    weight = next(model.get_submodule(name).parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(torch.int32).reshape(-1)[:] ^= 1
    try:
        found = first_difference(before, trace(model), PROMPT)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert found is not None
    assert (found.module, found.layer, found.inputs_differ) == (name, layer, False)
    assert found.compared > 0


def test_code_between_modules_is_named_by_the_module_that_takes_what_it_made(model: Any) -> None:
    before = trace(model)
    scaling = model.model.layers[1].self_attn.scaling
    model.model.layers[1].self_attn.scaling = float(np.nextafter(np.float32(scaling), np.float32(1)))
    try:
        found = first_difference(before, trace(model), PROMPT)
    finally:
        model.model.layers[1].self_attn.scaling = scaling
    assert found is not None
    assert (found.module, found.layer, found.inputs_differ) == ("model.layers.1.self_attn.o_proj", 1, True)
    # the first key alone has the weight 1 whatever the scale
    assert found.position >= 1


def test_passes_of_parts_join_and_other_values_of_a_later_token_stand_behind(model: Any) -> None:
    whole = trace(model)
    other = TOKENS.clone()
    other[0, 13] = 77
    found = first_difference(whole, trace(model, other), PROMPT)
    assert found is not None
    assert (found.module, found.position, found.positions) == ("model.embed_tokens", 13, 1)
    parts = ModuleTrace()
    for part in TOKENS.split((7, 1, 12), dim=1):
        parts.begin(part.numel())
        parts.ended("model.embed_tokens", (part,), model.model.embed_tokens(part))
    assert parts.tokens == whole.tokens == 20
    assert np.array_equal(parts.given("model.embed_tokens")[0], whole.given("model.embed_tokens")[0])
    assert first_difference(parts, whole, PROMPT) is None


def test_a_head_of_the_sampled_tokens_alone_is_compared_at_their_positions(model: Any) -> None:
    whole, part = trace(model), ModuleTrace()
    # the rollout forwards all but the last token, and its head makes logits from the prompt's last one on
    part.begin(19)
    logits = model(input_ids=TOKENS[:, :19], use_cache=False).logits.detach()[:, PROMPT - 1 :]
    # with the bits of the whole pass
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits[:, PROMPT - 1 : 19].clone()
    part.ended("lm_head", (), logits)
    assert first_difference(part, whole, PROMPT) is None
    logits[0, 2, 5] += 1
    wrong = ModuleTrace()
    wrong.begin(19)
    wrong.ended("lm_head", (), logits)
    found = first_difference(wrong, whole, PROMPT)
    assert found is not None
    assert (found.module, found.position) == ("lm_head", PROMPT + 1)


def test_digests_are_of_values_not_of_dtypes() -> None:
    values = torch.randn(6, 4).bfloat16()
    digests = row_digests(values, 6)
    assert digests is not None
    assert np.array_equal(digests, row_digests(values.float()[None], 6))
    assert np.array_equal(row_digests(torch.arange(6)[:, None].int(), 6), row_digests(torch.arange(6)[:, None], 6))
    changed = values.float()
    changed.view(torch.int32)[3, 1] ^= 1
    assert np.flatnonzero(digests != row_digests(changed, 6)).tolist() == [3]
    some = row_digests(values[4:], 6)
    assert some is not None
    assert np.array_equal(some, digests[4:])
    for other in (torch.zeros(7, 4), torch.zeros(6), torch.zeros(0, 4)):
        assert row_digests(other, 6) is None
