"""What a trainer's pass with fixed numerics refuses, by name and with the way out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.segments import HostSegments
from fdasync_trainer.numerics.trainer_attention import PassContext, trainer_attention
from fdasync_trainer.replay.layout import Spans
from fdasync_transformers.model.attention import NOT_DONE
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from rollout_bits import served_in

from fdasync.errors import BadInput, RunnerError, UnsupportedModel

IDS = torch.arange(3, 15).view(2, 6)


@pytest.fixture
def model() -> Any:
    return make_tiny_model("qwen3_moe").train()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"use_cache": True}, "past_key_values"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, r"not \[B, T\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)}, "not in one piece"),
        ({"position_ids": torch.arange(1, 7)[None]}, "do not count up from 0"),
        ({"input_ids": None}, "input_ids"),
    ],
)
def test_arguments_that_tell_no_whole_sequences(model: Any, arguments: dict[str, Any], problem: str) -> None:
    with fixed_numerics(model), pytest.raises(BadInput, match=problem) as error:
        model(**{"input_ids": IDS, **arguments})
    assert "layout=" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"kernels": "cuda"}, {"kernels": None}, {"sum_slices": 3}, {"sum_slices": 2.0}])
def test_ways_to_compute_that_there_are_not(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        fixed_numerics(model, **wrong)


def test_dropout_and_noise_in_training(model: Any) -> None:
    with fixed_numerics(model):
        model.model.layers[1].self_attn.attention_dropout = 0.1
        with pytest.raises(BadInput, match=r"model\.layers\.1\.self_attn: attention_dropout is 0\.1"):
            model(input_ids=IDS)
        model.eval()
        model(input_ids=IDS)
    model.train().model.layers[1].self_attn.attention_dropout = 0.0
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head)
    with fixed_numerics(model):
        with pytest.raises(BadInput, match=r"lm_head\.0: p is 0\.5"):
            model(input_ids=IDS)
        model.lm_head[0].p = 0.0
        model(input_ids=IDS)


def test_random_operations_that_no_attribute_shows(model: Any) -> None:
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: own(torch.nn.functional.dropout(x, 0.5))
    with fixed_numerics(model), pytest.raises(RunnerError, match="is random"):
        model(input_ids=IDS)


def test_attention_that_goes_past_the_librarys_interface(model: Any) -> None:
    own = model.model.layers[0].mlp.forward
    attend = torch.nn.functional.scaled_dot_product_attention
    model.model.layers[0].mlp.forward = lambda x: own(attend(*[x[:, None]] * 3)[:, 0])
    with fixed_numerics(model), pytest.raises(RunnerError, match="library's interface") as error:
        model(input_ids=IDS)
    assert "random" not in str(error.value)


def test_a_model_that_was_cast_whole(model: Any) -> None:
    """Its rotary frequencies are rounded, and a rollout's are not."""
    with pytest.raises(BadInput, match=r"inv_freq is torch\.bfloat16, and .* in torch\.float32; load it"):
        fixed_numerics(copy.deepcopy(model).bfloat16()).apply()
    numerics = fixed_numerics(model)
    with numerics:
        model.bfloat16()
        with pytest.raises(BadInput, match=r"inv_freq is torch\.bfloat16"):
            model(input_ids=IDS)
    with pytest.raises(BadInput, match=r"inv_freq is torch\.bfloat16"):
        numerics.apply()
    assert not numerics.is_open


def test_dtypes_that_no_rollout_has(model: Any) -> None:
    with pytest.raises(BadInput, match=r"is in torch\.float64, as no rollout is.*model\.float\(\)"):
        fixed_numerics(copy.deepcopy(model).double()).apply()
    model.model.layers[1].mlp.to(torch.bfloat16)
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\..* is torch\.bfloat16, and a rollout in torch\.float32"):
        fixed_numerics(model).apply()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_a_width_that_the_librarys_own_do_not_take(dtype: torch.dtype) -> None:
    model = served_in(make_tiny_model("qwen3_moe", moe_intermediate_size=7), dtype)
    with fixed_numerics(model):
        assert model(input_ids=IDS).logits.isfinite().all()


def test_the_probe_of_the_opening_runs_by_the_experts_of_a_pass(model: Any) -> None:
    ran = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: ran.append(model.config._experts_implementation))
    with fixed_numerics(model):
        pass
    assert set(ran) == {"eager"}


@pytest.mark.parametrize("argument", NOT_DONE)
def test_attention_with_arguments_that_would_change_it(model: Any, argument: str) -> None:
    layer = model.model.layers[0].self_attn
    heads = torch.zeros(1, 2, 6, 8)
    context = PassContext({}, HostSegments(Spans(np.array([0]), np.array([6]), 6), torch.device("cpu")), lambda: None)
    with pytest.raises(UnsupportedModel, match=f"layer 0: Qwen3MoeAttention: attention with '{argument}'"):
        trainer_attention(layer, heads, heads, heads, None, scaling=1.0, fd_ctx=context, **{argument: heads})


def test_experts_that_are_sampled_in_training() -> None:
    model = make_tiny_model("phimoe").train()
    with fixed_numerics(model), pytest.raises(BadInput, match=r"router.*jitter.*in training"):
        model(input_ids=IDS)


def test_autocast_has_a_way_out(model: Any) -> None:
    with fixed_numerics(model), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(BadInput, match=r"autocast.*MixedPrecisionPolicy"):
            model(input_ids=IDS)
        with torch.autocast("cpu", enabled=False):
            model(input_ids=IDS)


def test_compiled_models(model: Any) -> None:
    model.model.layers[0]._compiled_call_impl = lambda *_: None  # what `layer.compile()` leaves
    with pytest.raises(BadInput, match=r"torch\.compile"):
        fixed_numerics(model)


@pytest.mark.ci
def test_a_call_within_a_compiled_function(model: Any) -> None:
    with fixed_numerics(model), pytest.raises(BadInput, match=r"torch\.compile"):
        torch.compile(lambda ids: model(input_ids=ids).logits, backend="eager", fullgraph=False)(IDS)


def test_other_devices_by_one_error(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="run on CPUs and CUDA devices"), fixed_numerics(model.to("meta")):
        pass


@pytest.mark.parametrize(("family", "reason"), [("qwen3_next", "recurrent"), ("deepseek_v32", "indexer")])
def test_models_that_are_not_served(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        fixed_numerics(make_tiny_model(family))


def test_what_is_no_transformers_model() -> None:
    with pytest.raises(BadInput, match="no transformers model"):
        fixed_numerics(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_part_of_the_model_a_second_context_and_copies(model: Any) -> None:
    with fixed_numerics(model):
        hidden = torch.randn(1, 5, model.config.hidden_size)
        positions = torch.arange(5)[None]
        turned = model.model.rotary_emb(hidden, positions)
        with pytest.raises(BadInput, match="a part of it was called"):
            model.model.layers[0](hidden, position_embeddings=turned, position_ids=positions)
        with pytest.raises(BadInput, match="already"), fixed_numerics(model):
            pass
        with pytest.raises(BadInput, match="copied or pickled"):
            copy.deepcopy(model)
        with pytest.raises(BadInput, match="copied or pickled"):
            pickle.dumps(model)
    copy.deepcopy(model)


def test_up_projections_of_latents_that_are_more_than_a_weight() -> None:
    model = make_tiny_model("deepseek_v2")

    class Adapted(torch.nn.Linear):
        """As adapters are: its product is not that of its weight alone."""

    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Adapted
    with fixed_numerics(model), pytest.raises(UnsupportedModel, match="kv_b_proj is a Adapted"):
        model(input_ids=IDS)


def test_sequences_beyond_what_a_mended_family_can_have() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
            "short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 4, "factor": 2.0}  # fmt: skip
    model = make_tiny_model("phimoe", rope_parameters=rope)
    with fixed_numerics(model):
        model(input_ids=IDS[:, :4])
        with pytest.raises(BadInput, match="a sequence of 6 tokens"):
            model(input_ids=IDS)
