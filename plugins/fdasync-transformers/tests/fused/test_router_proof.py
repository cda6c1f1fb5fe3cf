"""The proof of a fused router refuses kinds that are wrong: `fused/router_proof.py`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from fdasync_kernels.router import product
from fdasync_transformers.fused.known import kind_of
from fdasync_transformers.fused.replacement import prove
from fdasync_transformers.fused.router_proof import RouterForm
from fdasync_transformers.fused.routers import Record, Routers
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.tiny.checkpoints import make_tiny_model

if TYPE_CHECKING:
    from fdasync_transformers.fused.router_kinds import RouterKind

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def router_of(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, RouterKind, int]:
    model = make_tiny_model(family).to(DEVICE, dtype)
    name = next(reversed(find_experts(model).values())).name
    block = model.get_submodule(name.rpartition(".")[0])
    module = getattr(block, "gate", None) or block.router
    kind = kind_of(module)
    assert not isinstance(kind, str)
    return module, kind, int(getattr(module, "top_k", None) or module.config.top_k_experts)


def proven(module: Any, kind: RouterKind, k: int, dtype: torch.dtype = torch.float32) -> object:
    """What a router is proven to return by a kind, or why not."""
    routers = Routers(dtype, Record())
    return prove(routers, routers.place(module, k)._replace(given=(kind, k, 0)))


def passes(module: Any, kind: RouterKind, k: int, dtype: torch.dtype) -> bool:
    return isinstance(proven(module, kind, k, dtype), RouterForm)


def test_a_tensor_of_no_known_use_is_refused():
    module, kind, k = router_of("mixtral")
    module.register_buffer("more", torch.zeros(2))
    assert str(proven(module, kind, k)) == "has tensors of no known use: more"


SOFTMAX: list[dict[str, Any]] = [
    {"score": "sigmoid"},
    {"renormalise": False},
    {"scale": 1.02},
    {"groups": 2, "by_logits": False},
]
SIGMOID: list[dict[str, Any]] = [
    {"score": "softmax"}, {"score": "sqrtsoftplus"}, {"renormalise": False}, {"scale": 1.02}, {"by_logits": True},
]  # fmt: skip
GROUPED: list[dict[str, Any]] = [
    {"score": "softmax"}, {"renormalise": False}, {"scale": 1.02}, {"group_score": "largest"}, {"open_groups": 3},
    {"groups": 2, "open_groups": 1}, {"groups": 1, "open_groups": 1}, {"closed": "zero"}, {"least_sum": 0.0},
    {"least_sum": 1e-12}, {"clamp_sum": True},
]  # fmt: skip
WRONG: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": SOFTMAX,
    "granitemoe": [{"score": "softmax"}, {"score": "sigmoid", "renormalise": True}],
    "axk2": [{"scale": 1.02}, {"least_sum": 1e-12}],
    "deepseek_v2": [{"group_score": "two_largest"}, {"open_groups": 3}, {"renormalise": True}, {"groups": 2}],
    "cohere2_moe_sigmoid": [{"score": "softmax"}, {"scale": 1.02}],
    "longcat_flash": [{"renormalise": True}, {"by_logits": True}, {"score": "sigmoid"}],
    "kolibri1": [{"by_logits": False}, {"score": "softmax"}, {"renormalise": True}],
    "deepseek_v3": GROUPED,
    "beam": GROUPED,
    "mistral4": [{"score": "sigmoid"}, {"renormalise": False}],
    "ernie4_5_moe": [{"clamp_sum": False}, {"least_sum": 1e-9}, {"by_logits": True}, {"score": "sigmoid"}],
    "minimax_m2": [*SIGMOID, {"least_sum": 1e-20}],
    "hy_v3": [*SIGMOID, {"least_sum": 0.0}, {"least_sum": 1e-6}],
}


@pytest.mark.ci(after=10)
@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_rule_does_not_pass(family):
    module, kind, k = router_of(family)
    assert passes(module, kind, k, torch.float32)
    for change in WRONG[family]:
        wrong = dataclasses.replace(kind, rule=msgspec.structs.replace(kind.rule, **change))
        assert not passes(module, wrong, k, torch.float32), change


@pytest.mark.parametrize("family", ["deepseek_v4", "lfm2_moe"])
def test_roundings_are_told_apart_in_bfloat16(family):
    module, kind, k = router_of(family, torch.bfloat16)
    assert passes(module, kind, k, torch.bfloat16)
    wrong = dataclasses.replace(kind, rule=msgspec.structs.replace(kind.rule, scale=kind.rule.scale * 1.05))
    assert not passes(module, wrong, k, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("deepseek_v3", {"selection_bias": ""}),
        ("ernie4_5_moe", {"selection_bias": ""}),
        ("gpt_oss", {"bias": ""}),
        ("gemma4_text", {"expert_scale": ""}),
        ("gemma4_text", {"prepare": None}),
        ("gemma4_text", {"probabilities": False}),
        ("phimoe", {"near": 0.03}),
        ("phimoe", {"near": None}),
    ],
)
def test_tensors_that_a_kind_leaves_out_are_missed(family, change):
    module, kind, k = router_of(family)
    # values that change nothing hide nothing
    for tensor in (getattr(module, "bias", None), getattr(module, "e_score_correction_bias", None)):
        if isinstance(tensor, torch.Tensor):
            with torch.no_grad():
                tensor.zero_()
    assert passes(module, kind, k, torch.float32)
    assert not passes(module, dataclasses.replace(kind, **change), k, torch.float32)


def test_biases_come_back_when_a_proof_fails():
    module, kind, k = router_of("deepseek_v3")
    before = module.e_score_correction_bias.clone()
    wrong = dataclasses.replace(kind, rule=msgspec.structs.replace(kind.rule, scale=9.0))
    assert not passes(module, wrong, k, torch.float32)
    assert torch.equal(module.e_score_correction_bias, before)


def test_other_products_are_seen(monkeypatch):
    module, kind, k = router_of("qwen3_moe")
    honest = product.router_logits
    monkeypatch.setattr(product, "router_logits", lambda *rows, **how: honest(*rows, **how) * (1 + 1e-4))
    assert str(proven(module, kind, k)) == "makes other logits than its weight does"


def test_a_class_of_the_table_that_changed_has_no_kind():
    module, _, k = router_of("deepseek_v3")
    del module.weight
    assert "is not built as it was" in Routers(torch.float32, Record()).place(module, k).refusal
    del module.num_group
    assert "is not built as it was" in str(kind_of(module))
    assert kind_of(torch.nn.Linear(2, 2)) == "is of no known kind"
