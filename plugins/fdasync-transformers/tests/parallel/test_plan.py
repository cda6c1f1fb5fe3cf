"""How models are cut by the library's plans, and the models and numbers of ranks that are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.model.kv import LayerSpec
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.parallel.cuts import Cut
from fdasync_transformers.parallel.plan import read_plan
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.start.runner_config import check_device, check_numerics, set_experts
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model, tiny_config
from transformers import AutoModelForCausalLM

from fdasync.cli.main import cli
from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits
from fdasync.runner.group.errors import of_rank

if TYPE_CHECKING:
    from pathlib import Path


def cut(
    family: str, ranks: int, rank: int = 0, plan: dict[str, str] | None = None, **config: Any
) -> tuple[Any, Sharded]:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tiny_config(family, **config))
    if plan is not None:
        model._tp_plan = {**model._tp_plan, **plan}
    return model, Sharded(model, rank, ranks, latent=True)


@pytest.mark.ci
def test_heads_and_widths_are_cut_and_the_rest_is_whole() -> None:
    model, sharded = cut("qwen3_moe", 4, rank=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layer, dense = "model.layers.0.", "model.layers.1.mlp."
    # two KV heads of 16: ranks 2 and 3 have the second
    assert sharded.cuts[f"{layer}self_attn.k_proj.weight"] == Cut(0, 2, 1)
    heads = [cut("qwen3_moe", 4, rank)[1].cuts[f"{layer}self_attn.v_proj.weight"].index for rank in range(4)]
    assert heads == [0, 0, 1, 1]
    assert shapes[f"{layer}self_attn.v_proj.weight"] == (16, 32)
    assert shapes[f"{layer}self_attn.q_proj.weight"] == (16, 32)
    assert shapes[f"{layer}self_attn.o_proj.weight"] == (32, 16)
    assert sharded.cuts[f"{layer}mlp.experts.gate_up_proj"] == Cut(1, 4, 3, 2)
    assert shapes[f"{layer}mlp.experts.gate_up_proj"] == (8, 8, 32)
    assert shapes[f"{layer}mlp.experts.down_proj"] == (8, 32, 4)
    assert shapes[f"{dense}down_proj.weight"] == (32, 12)
    whole = (
        "model.embed_tokens.weight",
        "lm_head.weight",
        f"{layer}mlp.gate.weight",
        f"{layer}self_attn.q_norm.weight",
    )
    assert not sharded.cuts.keys() & set(whole)
    assert model.get_submodule(f"{layer}self_attn").num_key_value_groups == 1
    assert (model.model.layers[0].self_attn.o_proj.in_features, sharded.shares_blocks) == (16, False)


def test_transposed_experts_are_cut_along_their_width() -> None:
    model, sharded = cut("aria_text", 2)
    experts = "model.layers.0.mlp.experts."
    assert sharded.cuts[f"{experts}gate_up_proj"] == Cut(2, 2, 0, 2)
    assert model.get_parameter(f"{experts}down_proj").shape == (8, 24, 32)


@pytest.mark.parametrize("family", ["afmoe", "minimax_m2"])
def test_whole_attention_shares_blocks(family: str) -> None:
    assert cut(family, 2)[1].shares_blocks


@pytest.mark.parametrize(
    ("family", "ranks", "options", "words"),
    [
        ("gpt_oss", 2, {}, "gpt_oss: tensor parallel: the library has no plan for this family"),
        pytest.param("dbrx", 2, {}, "dbrx: tensor parallel: the library has no plan", marks=pytest.mark.ci),
        ("qwen3_moe", 2, {"plan": {"model.layers.*.mlp.gate": "grouped_gemm"}}, "style that is not known: grouped"),
        ("qwen3_moe", 2, {"plan": {"model.layers.*.mlp.experts": "replicate"}}, "down_proj, and sums nothing"),
        ("qwen3_moe", 2, {"plan": {"model.layers.*.mlp.gate": "rowwise"}}, "is no plain linear module"),
        ("mimo_v2_flash", 4, {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, "layers differ in their heads"),
        (
            "qwen3_moe", 2, {"plan": {"lm_head": "colwise"}, "tie_word_embeddings": True},
            "lm_head.weight is tied to another tensor, and cut",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused_by_name(family: str, ranks: int, options: Any, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        cut(family, ranks, **options)


def test_attention_that_is_cut_in_some_layers_only_is_refused() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    layer = LayerSpec(0, 2, 16, 16)
    layers = {"model.layers.0.self_attn": layer, "model.layers.0.input_layernorm": layer}
    with pytest.raises(UnsupportedModel, match="its plan cuts the attention of some layers only"):
        read_plan(model, layers, 0, 2, torch.float32)


def test_a_rank_that_computes_other_heads_than_it_stores_is_refused() -> None:
    _, sharded = cut("qwen3_moe", 2)
    layers = [LayerSpec(index, 1, 16, 16) for index in sharded._layers]
    assert sharded.layout(layers).held_shares == 1
    with pytest.raises(UnsupportedModel, match="computes 2 KV heads of layer 0, and stores 1"):
        sharded.layout([LayerSpec(index, 2, 16, 16) for index in sharded._layers])


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("family", "ranks", "options", "words"),
    [
        ("qwen3_moe", 3, {}, "3 ranks cannot part the 2 KV heads of the model's layers; works with 1, 2, 4"),
        (
            "qwen3_moe", 2, {"moe_intermediate_size": 17},
            "2 ranks cannot part the 17 of model.layers.0.mlp.experts.gate_up_proj; works with 1",
        ),
        ("qwen3_moe", 8, {}, "8 ranks cannot part the 4 query heads of layer 0; works with 1, 2, 4"),
        (
            "laguna", 4, {},
            "4 ranks cannot part the 2 of model.layers.1.self_attn.g_proj.weight; works with 1, 2",
        ),
        # its widths are 24: three ranks would do for them
        (
            "mimo_v2_flash", 3, {"num_key_value_heads": 2, "swa_num_key_value_heads": 4},
            "3 ranks cannot part the 2 and 4 KV heads of the model's layers; works with 1, 2",
        ),
    ],
)  # fmt: skip
def test_sizes_that_the_ranks_do_not_divide_are_refused_with_those_that_do(
    family: str, ranks: int, options: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(family, ranks, **options)
    assert str(caught.value) == f"tensor_parallel: {words}"
    # as it holds for all ranks, none of them is blamed
    assert of_rank(caught.value, 0, ranks) is caught.value
    # what it names is true
    for width in map(int, caught.value.hint.split("with ")[1].split(", ")):
        if width > 1:
            cut(family, width, **options)


@pytest.mark.parametrize(
    ("config", "limits", "device", "words"),
    [
        ({"dtype": "float64"}, {}, "cuda:0", "float64 has no kernels"),
        ({"dtype": "float64", "kernels": "triton"}, {}, "cpu", "float64 has no kernels"),
        ({"collectives": "nccl"}, {}, "cpu", "runner_config.collectives: 'nccl' sums on GPUs, and ranks on cpu sum in"),
        ({}, {"numerics": "fixed"}, "cpu", "fixed numerics over 2 ranks, and sums of 1 slices"),
    ],
)
def test_settings_without_ranks_are_refused(config: Any, limits: Any, device: str, words: str) -> None:
    asked = RunnerLimits(max_running=1, max_step_tokens=8, tensor_parallel=2, **limits)
    settings = TransformersConfig(**config)
    with pytest.raises(ConfigError, match=words):  # noqa: PT012
        check_device(settings, torch.device(device))
        check_numerics(settings, asked, torch.device(device))


def test_float64_has_experts_by_default_and_names_those_that_it_has_not() -> None:
    model: Any = make_tiny_model("qwen3_moe").double()
    layers = find_moe_layers(model)
    set_experts(model, "auto", layers, 8)
    assert model.config._experts_implementation == "eager"
    with pytest.raises(ConfigError, match="'grouped_mm' has no float64; use \"eager\""):
        set_experts(model, "grouped_mm", layers, 8)


@pytest.mark.ci
def test_a_report_tells_the_size_of_a_rank_or_why_there_is_none(tmp_path: Path) -> None:
    def report(family: str, ranks: int) -> Any:
        make_tiny_checkpoint(tmp_path / family, family)
        limits = RunnerLimits(model=str(tmp_path / family), max_running=1, max_step_tokens=8, tensor_parallel=ranks)
        return TransformersRunner(TransformersConfig(device="cpu"), limits).examine()

    whole, cut_ = report("qwen3_moe", 1), report("qwen3_moe", 2)
    assert (whole.tensor_parallel, cut_.tensor_parallel) == (1, 2)
    assert whole.weights_nbytes // 2 < cut_.weights_nbytes < whole.weights_nbytes
    assert cut_.kv_token_nbytes * 2 == whole.kv_token_nbytes
    for family, ranks, reason in (("gpt_oss", 2, "no plan for this family"), ("qwen3_moe", 3, "works with 1, 2, 4")):
        refused = report(family, ranks)
        assert not refused.served
        assert reason in refused.reason


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("family", "ranks", "code", "words"),
    [
        ("qwen3_moe", 2, 0, "would be served"),
        ("qwen3_moe", 9, 2, "9 is out of range (limit: 1 to 8)"),
        ("qwen3_moe", 3, 1, "works with 1, 2, 4"),
        ("gpt_oss", 2, 1, "no plan for this family"),
    ],
)
def test_doctor_tells_by_its_exit_code_whether_so_many_ranks_would_serve(
    tmp_path: Path, family: str, ranks: int, code: int, words: str
) -> None:
    make_tiny_checkpoint(tmp_path, family)
    command = ["doctor", "--model", str(tmp_path), "--device", "cpu", "--tp", str(ranks)]
    found = CliRunner(env={"COLUMNS": "200"}).invoke(cli, command)
    assert (found.exit_code, words in found.output) == (code, True), found.output
