"""A trainer's fingerprint equals the server's exactly where its rounded weights are the server's, tensor by tensor."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import named_tensors, weights_fingerprint
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights import identity
from live_weights import Live

from fdasync import Engine, EngineConfig, SamplingParams, WeightsFingerprint
from fdasync.errors import BadInput, WeightsDiffer, WeightsRejected
from fdasync.request import first_difference

if TYPE_CHECKING:
    from pathlib import Path

# per-expert tensors, tied embeddings, float32 parts, fused and transposed, latent, recurrent
SOME = ("qwen3_moe", "gpt_oss", "jamba", "deepseek_v3", "ernie4_5_moe", "glm4_moe")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def trainer(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The library's model, as a trainer has it."""
    library: Any = import_module("transformers")
    return library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def stepped(model: Any) -> Any:
    """A step of an optimiser that changes every float by less than bfloat16 keeps, and some by more."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) * 1e-3 * tensor.abs())
    return model


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", SOME)
def test_float32_masters_sent_and_rounded_have_the_trainers_fingerprint(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path / "model", family)
    live, model = Live(tmp_path / "model", "bfloat16"), stepped(trainer(tmp_path / "model"))
    live.send(named_tensors(model), piece=1 << 16)
    assert live.weights.fingerprint_weights(True) == weights_fingerprint(model, dtype="bfloat16")
    assert live.weights.fingerprint_weights(False) == WeightsFingerprint(identity.weights_id(live.model))


def test_the_served_dtype_is_part_of_it(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "glm4_moe")
    model = stepped(trainer(tmp_path / "model"))
    ids = {weights_fingerprint(model, dtype=dtype).weights_id for dtype in ("float32", "bfloat16", torch.float16)}
    assert len(ids) == 3
    live = Live(tmp_path / "model", "float32")
    live.send(named_tensors(model), piece=1 << 16)
    assert live.weights.fingerprint_weights(True) == weights_fingerprint(model, dtype="float32")


def test_one_flipped_bit_has_a_name(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    model = trainer(tmp_path / "model", torch.bfloat16)
    before = weights_fingerprint(model, dtype="bfloat16")
    name = "model.layers.1.self_attn.k_proj.weight"
    model.state_dict()[name].view(torch.int16)[3, 5] ^= 1
    after = weights_fingerprint(model, dtype="bfloat16")
    assert after.weights_id != before.weights_id
    assert first_difference(before, after) == name
    assert [one for one in before.tensors if before.tensors[one] != after.tensors[one]] == [name]


def test_a_bit_below_the_served_dtype_changes_nothing(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    model = trainer(tmp_path / "model", torch.bfloat16).float()
    before = weights_fingerprint(model, dtype="bfloat16")
    model.state_dict()["model.norm.weight"].view(torch.int32)[0] ^= 1
    assert weights_fingerprint(model, dtype="bfloat16") == before
    assert weights_fingerprint(model, dtype="float32") != before


def test_a_tied_head_counts_under_both_names(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "ernie4_5_moe")
    model = trainer(tmp_path / "model")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    live = Live(tmp_path / "model", "bfloat16")
    with torch.no_grad():
        model.lm_head.weight[7] += 1.0
    live.send(named_tensors(model), piece=1 << 16)
    made = weights_fingerprint(model, dtype="bfloat16")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= made.tensors.keys()
    assert live.weights.fingerprint_weights(True) == made
    # a trainer whose head came apart from the embeddings has other weights than a server with one memory
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.lm_head.weight[7] -= 1.0
    assert first_difference(weights_fingerprint(model, dtype="bfloat16"), live.weights.fingerprint_weights(True)) == (
        "lm_head.weight"
    )


def test_a_changed_buffer_counts_in_float32(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "glm4_moe")
    model, live = trainer(tmp_path / "model"), Live(tmp_path / "model", "bfloat16")
    # a step that bfloat16 could not hold
    model.state_dict()[BIAS][0] = 1.0 + 2.0**-20
    assert (
        first_difference(weights_fingerprint(model, dtype="bfloat16"), live.weights.fingerprint_weights(True)) == BIAS
    )
    live.send(named_tensors({BIAS: model.state_dict()[BIAS]}))
    assert live.state()[BIAS][0] == 1.0 + 2.0**-20
    assert live.weights.fingerprint_weights(True) == weights_fingerprint(model, dtype="bfloat16")


def test_a_model_that_was_cast_whole_reads_other_frequencies_and_is_refused(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    with pytest.raises(WeightsRejected, match="inv_freq is computed"):
        weights_fingerprint(trainer(tmp_path / "model").to(torch.bfloat16), dtype="bfloat16")


def test_a_loaded_buffer_of_another_dtype_counts_as_the_server_gets_it(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "glm4_moe")
    model, live = trainer(tmp_path / "model"), Live(tmp_path / "model", "bfloat16")
    gate = model.get_submodule(BIAS.rpartition(".")[0])
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    live.send(named_tensors(model), piece=1 << 16)
    assert live.weights.fingerprint_weights(True) == weights_fingerprint(model, dtype="bfloat16")


def test_what_is_no_model_or_no_whole_state_is_refused(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    model = trainer(tmp_path / "model")
    state = dict(model.state_dict())
    with pytest.raises(BadInput, match="float8"):
        weights_fingerprint(model, dtype="float8")
    with pytest.raises(BadInput, match="no model of the library"):
        weights_fingerprint(torch.nn.Sequential(model), dtype="bfloat16")
    norm = state.pop("model.norm.weight")
    for bad, problem in (
        (state, r"model\.norm\.weight is missing"),
        ({**state, "model.norm.weight": norm, "x": norm}, "x has no place"),
        ({**state, "model.norm.weight": norm[:3]}, r"model\.norm\.weight has shape"),
        ({**state, "model.norm.weight": norm.int()}, r"model\.norm\.weight is torch.int32"),
        ({**state, "model.norm.weight": norm.to("meta")}, "no whole data"),
    ):
        with pytest.raises(WeightsRejected, match=problem):
            weights_fingerprint(model, dtype="bfloat16", state=bad)
    state["model.norm.weight"] = norm
    assert weights_fingerprint(model, dtype="float32", state=state) == weights_fingerprint(model, dtype="float32")


async def test_an_engine_takes_what_it_expects_and_names_what_differs(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", "glm4_moe")
    model = stepped(trainer(tmp_path / "model"))
    config = EngineConfig(
        model=str(tmp_path / "model"),
        runner_config={"dtype": "bfloat16", "device": "cpu", "num_threads": 1, "self_check": False},
        process="inline",
        num_blocks=16,
        max_running=4,
        max_step_tokens=64,
    )
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    async with Engine(config) as engine:
        expected = weights_fingerprint(model, dtype=engine.facts().dtype)
        await engine.update_weights(1, named_tensors(model), expected=expected)
        assert engine.capacity.weights_id == expected.weights_id
        await engine.complete([1, 2, 3], params)
        # the trainer steps on after it made its fingerprint
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[2, 3, 4] += 1.0
        with pytest.raises(WeightsDiffer) as caught:
            await engine.update_weights(2, named_tensors(model), expected=expected)
        assert caught.value.tensor == "model.layers.1.mlp.experts.down_proj"
        await engine.update_weights(
            2, named_tensors(model), expected=weights_fingerprint(model, dtype="bfloat16").weights_id
        )
        await engine.complete([1, 2, 3], params)
