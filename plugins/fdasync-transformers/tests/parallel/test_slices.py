"""Sums in slices: one process, two ranks and four give the same bits, and so does a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checks.slices import BF16, BY_DAY, F32, SEQUENCES, the_same_bits_at_any_width, trainers_logits
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.verification.reference import library_model
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.parallel import collectives, slices
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from made import Made
from rank_models import sliced_logits
from rank_play import PROMPTS, play

from fdasync.errors import BadInput, ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# takes seconds: the other three wait for `make test-ci`
FIRST = ("deepseek_v2", F32)
PLAYED = [pytest.param(*one, marks=() if one == FIRST else pytest.mark.ci) for one in BY_DAY]


@pytest.mark.ci
@pytest.mark.parametrize(("family", "dtype"), PLAYED)
def test_logits_have_the_same_bits_at_any_width(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    the_same_bits_at_any_width(Made(family, tmp_path), [dtype])


@pytest.mark.ci
def test_rows_and_log_probs_are_those_of_a_runner_alone_and_of_a_trainer(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    options: dict[str, Any] = {"config": {"dtype": "bfloat16"}, "numerics": "fixed", "sum_slices": 4}
    (one,), many = play(tmp_path, **options), play(tmp_path, 2, **options)
    assert many[0].tokens == many[1].tokens == one.tokens
    assert many[0].raw == one.raw
    assert all(np.array_equal(mine, other) for mine, other in zip(many[0].rows, one.rows, strict=True))
    capacity = many[0].capacity
    assert capacity.fingerprint == one.capacity.fingerprint
    assert (capacity.sum_slices, capacity.numerics, capacity.tensor_parallel) == (4, "fixed", 2)
    model: Any = library_model(tmp_path, BF16, alone=True)
    with torch.no_grad(), fixed_numerics(model, sum_slices=4):
        for prompt, sampled, wanted in zip(PROMPTS, one.tokens, one.raw, strict=True):
            ids = torch.tensor([[*prompt, *sampled]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            assert logprobs_of_logits(logits, ids[0, len(prompt) :]).tolist() == wanted


# -- what a test must notice ------------------------------------------------------------------------


def one_after_the_other(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def rounded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return JOINED(parts).bfloat16()


JOINED = slices.joined


@pytest.mark.ci
@pytest.mark.parametrize(
    ("breaking", "dtype", "ranks"), [(one_after_the_other, F32, 4), (rounded, BF16, 2)], ids=["order", "rounding"]
)
def test_another_order_and_another_rounding_are_noticed(
    breaking: Any, dtype: torch.dtype, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((one,),) = sliced_logits("qwen3_moe", [dtype], SEQUENCES, 1)
    monkeypatch.setattr(slices, "joined", breaking)
    monkeypatch.setattr(collectives, "joined", breaking)
    assert not torch.equal(sliced_logits("qwen3_moe", [dtype], SEQUENCES, ranks)[0][0], one)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_another_number_of_slices_has_other_bits(dtype: torch.dtype) -> None:
    found = [trainers_logits(make_tiny_model("qwen3_moe"), dtype, sum_slices=count) for count in slices.COUNTS]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.ci
def test_sizes_and_families_without_slices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks cannot part the 17 of .*experts.gate_up_proj") as caught:
        fixed_numerics(make_tiny_model("qwen3_moe", moe_intermediate_size=17), sum_slices=4).apply()
    assert caught.value.field == "sum_slices"
    with pytest.raises(UnsupportedModel, match="no plan for this family"):
        fixed_numerics(make_tiny_model("gpt_oss"), sum_slices=2).apply()
    model = make_tiny_model("qwen3_moe")
    for count in (0, 3, 8):
        with pytest.raises(BadInput, match="sum_slices"):
            fixed_numerics(model, sum_slices=count)


class Other(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + 1


def test_adapters_of_what_is_sliced_are_refused_by_name() -> None:
    model: Any = make_tiny_model("qwen3_moe")
    attention = model.model.layers[0].self_attn
    attention.o_proj.__class__ = Other
    with pytest.raises(UnsupportedModel, match=r"layers.0.self_attn.o_proj \(Other\) is no plain linear"):
        fixed_numerics(model, sum_slices=4).apply()
    model = make_tiny_model("qwen3_moe")
    torch.nn.utils.parametrize.register_parametrization(
        model.model.layers[0].mlp.experts, "down_proj", torch.nn.Softplus()
    )
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.experts.down_proj is no parameter of its own"):
        fixed_numerics(model, sum_slices=4).apply()
    assert not hasattr(vars(model.model.layers[0].self_attn.o_proj), "forward")


@pytest.mark.ci
def test_a_report_refuses_what_a_start_would(tmp_path: Path) -> None:
    def report(family: str, **limits: Any) -> Any:
        make_tiny_checkpoint(tmp_path / family, family)
        asked = {"max_running": 1, "max_step_tokens": 8, "numerics": "fixed", **limits}
        limits_ = RunnerLimits(model=str(tmp_path / family), **asked)
        return TransformersRunner(TransformersConfig(device="cpu"), limits_).examine()

    found = report("qwen3_moe", sum_slices=4, tensor_parallel=2)
    assert (found.served, found.sum_slices, found.numerics) == (True, 4, "fixed")
    assert "no plan for this family" in report("gpt_oss", sum_slices=2).reason
    with pytest.raises(ConfigError, match="2 ranks, and sums of 1 slices"):
        report("qwen3_moe", tensor_parallel=2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("held", [1, 2, 4])
def test_columns_are_computed_in_the_shapes_that_ranks_have(
    monkeypatch: pytest.MonkeyPatch, held: int, bias: bool
) -> None:
    # on CPUs a product of other columns may have the same bits: its shape is what is promised
    module = torch.nn.Linear(6, 8, bias=bias)
    asked: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    own = slices.linear

    def linear(hidden: torch.Tensor, weight: torch.Tensor, one: torch.Tensor | None) -> torch.Tensor:
        asked.append((hidden, weight, one))
        return own(hidden, weight, one)

    monkeypatch.setattr(slices, "linear", linear)
    hidden = torch.randn(3, 6)
    found = slices._Columns(module, held)(hidden)
    assert [tuple(weight.shape) for _, weight, _ in asked] == [(8 // held, 6)] * held
    assert all(given is hidden for given, _, _ in asked)
    assert torch.equal(torch.cat([weight for _, weight, _ in asked]), module.weight)
    if bias:
        assert torch.equal(torch.cat([one for _, _, one in asked if one is not None]), module.bias)
    assert torch.allclose(found, module(hidden))


@pytest.mark.ci
def test_a_model_gets_columns_where_ranks_would_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    own = slices._Columns.__init__

    def init(self: Any, module: torch.nn.Linear, held: int) -> None:
        made.append(held)
        own(self, module, held)

    monkeypatch.setattr(slices._Columns, "__init__", init)
    for ranks, held in ((1, 4), (2, 2), (4, 1)):
        made.clear()
        sliced_logits("llama4_text", [F32], SEQUENCES, ranks, 4)
        # queries; keys and values of fewer heads are cut into fewer parts
        assert max(made, default=1) == held, (ranks, made)
