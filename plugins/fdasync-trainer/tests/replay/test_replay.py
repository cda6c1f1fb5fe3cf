"""Forcing routing rows: identity for the rows a model chose itself, and really in force for any others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fdasync_trainer.replay.force import find_routers, forced_routing, observed_routing
from structures import by_structure
from transformers import AutoConfig, AutoModelForCausalLM

from fdasync.errors import BadInput, UnsupportedModel

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "num_experts_per_tok": None},
    "glm4_moe": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 8,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v2": {**MLA, "topk_method": "group_limited_greedy", "head_dim": 8},
    "deepseek_v3": MLA,
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "granitemoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8, "head_dim": 8, "rotary_dim": 4},
    "phimoe": {"num_local_experts": 8},
}
# forcing ids outside the jitter threshold gives them weight 0, by the family's own rule
RANDOM_IDS = [name for name in FAMILIES if name != "phimoe"]


def build(family: str, **changes: Any) -> Any:
    options = {k: v for k, v in (BASE | FAMILIES.get(family, {}) | changes).items() if v is not None}
    config = AutoConfig.for_model(family, **options)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, value in model.state_dict().items():
            if value.ndim > 1:
                value.normal_(0.0, 0.3)
            elif name.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.1)
    return model


def tokens(count: int = 21) -> torch.Tensor:
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(1))


def loss_and_grads(model: Any, ids: torch.Tensor) -> tuple[float, dict[int, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {}
    for layer, site in find_routers(model).items():
        parameter = next(p for p in site.router.parameters() if p.requires_grad and p.ndim == 2)
        assert parameter.grad is not None
        grads[layer] = parameter.grad.clone()
    return float(loss.detach()), grads


def observe(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    with torch.no_grad(), observed_routing(model, seen):
        model(input_ids=ids, use_cache=False)
    return {layer: rows.clone() for layer, rows in seen.items()}


def random_rows(model: Any, count: int, seed: int = 7) -> dict[int, torch.Tensor]:
    """Random pairs; the families with groups here keep two groups open, so any pair is possible."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: torch.stack([torch.randperm(site.num_experts, generator=generator)[:2] for _ in range(count)])
        for layer, site in find_routers(model).items()
    }


@pytest.mark.parametrize("family", by_structure(FAMILIES))
def test_forcing_the_live_rows_changes_nothing(family: str) -> None:
    model, ids = build(family), tokens()
    live = observe(model, ids)
    assert sorted(live) == sorted(find_routers(model))
    assert live[max(live)].shape == (21, 2)
    before, grads = loss_and_grads(model, ids)
    # phimoe gives slots a meaning, so its rows keep their order
    rows = {layer: r if family == "phimoe" else r.flip(-1) for layer, r in live.items()}
    looked: dict[int, Any] = {}
    with forced_routing(model, rows, live=looked):
        after, forced_grads = loss_and_grads(model, ids)
    assert after == pytest.approx(before, abs=5e-6)
    for layer, grad in grads.items():
        torch.testing.assert_close(forced_grads[layer], grad, rtol=1e-4, atol=1e-6 + 1e-5 * float(grad.abs().max()))
    for layer, selection in looked.items():
        # what is recorded as the live choice is the live choice, and the scores explain it
        assert torch.equal(selection.ids.sort(-1).values, live[layer].sort(-1).values)
        if selection.group_scores is None:
            best = selection.scores.topk(2, dim=-1).indices
            assert torch.equal(best.sort(-1).values, live[layer].sort(-1).values)


@pytest.mark.parametrize("family", by_structure(FAMILIES))
def test_live_scores_are_in_the_documented_space(family: str) -> None:
    model, ids = build(family), tokens()
    looked: dict[int, Any] = {}
    logits: dict[int, torch.Tensor] = {}
    sites = find_routers(model)
    with torch.no_grad(), forced_routing(model, random_rows(model, 21), live=looked):
        hooks = [
            site.router.register_forward_hook(lambda _m, _a, out, layer=layer: logits.update({layer: out[0].float()}))
            for layer, site in sites.items()
        ]
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    biases = {n: b for n, b in model.state_dict().items() if n.endswith("e_score_correction_bias")}
    for layer, selection in looked.items():
        bias = [value for name, value in biases.items() if f"layers.{layer}." in name]
        expected = logits[layer]
        if family == "ernie4_5_moe":
            expected = torch.softmax(expected, dim=-1) + bias[0].float()
        elif bias:
            expected = torch.sigmoid(expected) + bias[0].float()
        torch.testing.assert_close(selection.scores, expected, rtol=1e-6, atol=1e-6)
        assert (selection.group_scores is not None) == (sites[layer].num_groups > 1)
        if selection.group_scores is not None:
            assert selection.group_scores.shape == (21, 4)
            assert selection.groups_kept == 2
    assert bool(biases) == (family in ("ernie4_5_moe", "glm4_moe", "deepseek_v3", "minimax_m2"))


@pytest.mark.parametrize("family", by_structure(FAMILIES))
def test_forced_random_rows_reach_the_experts(family: str) -> None:
    model, ids = build(family), tokens()
    rows = random_rows(model, 21)
    live = observe(model, ids)
    assert any(not torch.equal(live[layer], rows[layer]) for layer in rows)
    with forced_routing(model, rows):
        reached = observe(model, ids)
    for layer, wanted in rows.items():
        assert torch.equal(reached[layer], wanted)
    assert all(torch.equal(after, live[layer]) for layer, after in observe(model, ids).items()), "hooks stayed"


@pytest.mark.parametrize("family", by_structure(RANDOM_IDS))
def test_weights_of_forced_experts_come_from_live_logits(family: str) -> None:
    """Against the family's formula, written out from its paper or source."""
    model, ids = build(family), tokens()
    rows = random_rows(model, 21)
    got: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sites = find_routers(model)
    with torch.no_grad(), forced_routing(model, rows):
        hooks = [
            site.router.register_forward_hook(lambda _m, _a, out, layer=layer: got.update({layer: (out[0], out[1])}))
            for layer, site in sites.items()
        ]
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, (logits, weights) in got.items():
        chosen = logits.float().gather(-1, rows[layer])
        softmax = torch.softmax(logits.float(), dim=-1).gather(-1, rows[layer])
        config = model.config
        if family in ("gpt_oss", "granitemoe"):
            expected = torch.softmax(chosen, dim=-1)
        elif family in ("glm4_moe", "deepseek_v3", "minimax_m2"):
            expected = torch.sigmoid(chosen) / torch.sigmoid(chosen).sum(-1, keepdim=True)
            expected = expected * getattr(config, "routed_scaling_factor", 1.0)
        elif family == "deepseek_v2":
            expected = softmax * config.routed_scaling_factor
        elif family in ("ernie4_5_moe", "mixtral") or config.norm_topk_prob:
            expected = softmax / softmax.sum(-1, keepdim=True)
        else:
            expected = softmax
        torch.testing.assert_close(weights.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_generation_is_the_same_with_the_live_rows_forced(family: str) -> None:
    model, ids = build(family), tokens()
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        with forced_routing(model, {k: v.numpy().astype(np.uint8) for k, v in observe(model, ids).items()}):
            after = model(input_ids=ids, use_cache=False).logits
        with forced_routing(model, random_rows(model, 21)):
            other = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, before, atol=1e-2)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v2", "phimoe"])
def test_a_negative_id_leaves_the_row_to_the_router(family: str) -> None:
    model, ids = build(family), tokens()
    rows = random_rows(model, 21)
    for table in rows.values():
        table[::2] = -1
    with forced_routing(model, rows):
        reached = observe(model, ids)
    first = min(rows)  # the later layers see other inputs
    live = observe(model, ids)
    assert torch.equal(reached[first][::2], live[first][::2])
    for layer, wanted in rows.items():
        assert torch.equal(reached[layer][1::2], wanted[1::2])


def test_gradient_checkpointing_within_the_context() -> None:
    model, ids = build("qwen3_moe"), tokens()
    rows = random_rows(model, 21)
    with forced_routing(model, rows):
        plain = loss_and_grads(model, ids)
        model.train()
        model.activation_checkpointing_enable()
        recomputed = loss_and_grads(model, ids)
    assert recomputed[0] == plain[0]
    for layer, grad in plain[1].items():
        torch.testing.assert_close(recomputed[1][layer], grad)
    # nothing stays intercepted after an early-stopped recomputation
    assert torch.overrides._get_current_function_mode() is None


def test_an_error_within_leaves_no_hook_and_no_mode() -> None:
    model, ids = build("qwen3_moe"), tokens()
    live = observe(model, ids)
    with pytest.raises(BadInput, match="tokens"), forced_routing(model, random_rows(model, 20)):
        model(input_ids=ids, use_cache=False)
    assert torch.overrides._get_current_function_mode() is None
    assert all(torch.equal(rows, live[layer]) for layer, rows in observe(model, ids).items())


def test_an_interrupt_within_a_router_leaves_no_mode() -> None:
    model, ids = build("qwen3_moe"), tokens()
    router = find_routers(model)[1].router

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    router.forward = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), forced_routing(model, random_rows(model, 21)):
        model(input_ids=ids, use_cache=False)
    assert torch.overrides._get_current_function_mode() is None
    assert (torch.topk(torch.arange(8.0).repeat(21, 1), 2).indices == torch.tensor([7, 6])).all()


def test_bad_rows_are_refused() -> None:
    model = build("qwen3_moe")
    for rows, problem in [
        ({9: np.zeros((3, 2), int)}, "no experts"),
        ({0: np.zeros((3, 2))}, "float"),
        ({0: np.zeros(3, int)}, "shape"),
        ({0: np.full((3, 2), 8)}, "does not exist"),
    ]:
        with pytest.raises(BadInput, match=problem), forced_routing(model, rows):
            pass


def test_llama4_is_refused_by_name() -> None:
    model = build("llama4_text", num_local_experts=8, intermediate_size_mlp=48, head_dim=8, interleave_moe_layer_step=1)
    assert observe(model, tokens())[0].shape == (21, 2)
    with pytest.raises(UnsupportedModel, match="llama4"), forced_routing(model, random_rows(model, 21)):
        pass


def test_phimoe_in_training_is_refused() -> None:
    model = build("phimoe").train()
    with pytest.raises(UnsupportedModel, match="samples"), forced_routing(model, random_rows(model, 21)):
        model(input_ids=tokens(), use_cache=False)
    assert torch.overrides._get_current_function_mode() is None


def test_a_dense_model_has_no_routers() -> None:
    config = AutoConfig.for_model("qwen3", **{k: v for k, v in BASE.items() if k != "num_experts_per_tok"}, head_dim=8)
    assert find_routers(AutoModelForCausalLM.from_config(config)) == {}
