"""Which class is built for a config.json: aliases, classes that the library's table lacks, text halves, odd numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, tiny_config
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.architecture import ALIASES, read_architecture

from fdasync.errors import CheckpointError, UnsupportedModel

HERE = Path("config.json")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config(family).to_json_string()), **changes}


def test_another_name_is_built_as_the_architecture_that_it_is() -> None:
    found = read_architecture(config_of("deepseek_v3", model_type="kimi_k2"), HERE)
    assert found.model_class is transformers.DeepseekV3ForCausalLM
    assert found.config.model_type == "deepseek_v3"
    assert found.notes == (f"kimi_k2 is built as deepseek_v3: {ALIASES['kimi_k2'].reason}",)
    assert found.renamed


def test_an_alias_computes_by_the_values_of_its_own_type() -> None:
    text = read_architecture(config_of("qwen3_vl_moe"), HERE).config
    # its router always normalises, and its config has no word for that
    assert (text.model_type, text.norm_topk_prob) == ("qwen3_moe", True)


def test_every_alias_names_a_type_of_the_library_and_a_reason() -> None:
    for name, alias in ALIASES.items():
        assert alias.model_type in transformers.CONFIG_MAPPING
        assert name != alias.model_type
        assert len(alias.reason.split()) > 4


def test_a_class_that_the_librarys_table_lacks_is_found() -> None:
    config = transformers.AutoConfig.for_model("mistral4")
    assert type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = read_architecture({**json.loads(config.to_json_string()), "architectures": None}, HERE)
    assert found.model_class.__name__ == "Mistral4ForCausalLM"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "nobody_knows"}, "transformers does not know this model type$"),
        ({"model_type": "nobody_knows", "auto_map": {}}, "the code that the checkpoint brings is not run$"),
        ({"model_type": "vit"}, "no causal language model of this type$"),
        (config_of("qwen3_moe", architectures=["Qwen3MoeForTokenClassification"]), "not a causal language model$"),
    ],
)
def test_other_types_are_refused_by_name(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_architecture(raw, HERE)
    assert caught.value.model == raw["model_type"]


@pytest.mark.parametrize("raw", [{}, {"model_type": 3}, config_of("qwen3_moe", hidden_size="wide")])
def test_a_config_that_makes_no_sense_is_told_by_its_file(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_architecture(raw, HERE)


def test_infinity_is_read_as_the_library_writes_it(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "nemotron_h")
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    config = loading.read_checkpoint(str(tmp_path)).config
    assert config.time_step_limit[1] == math.inf


def test_a_text_half_says_that_images_are_not_served() -> None:
    found = read_architecture(config_of("llama4"), HERE)
    assert found.model_class is transformers.Llama4ForCausalLM
    assert found.whole is not None
    assert found.whole[1] is transformers.Llama4ForConditionalGeneration
    assert found.notes == ("the text half of llama4: images, sound and video are not served",)


@pytest.mark.parametrize("wrapped", [False, True])
def test_quantisation_is_no_fact_of_the_model(wrapped: bool) -> None:
    words = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    raw = config_of("llama4" if wrapped else "qwen3_moe")
    place = raw["text_config"] if wrapped else raw
    plain = identity.config_facts(read_architecture(raw, HERE).config)
    place["quantization_config"] = words
    assert identity.config_facts(read_architecture(raw, HERE).config) == plain


def test_rotary_dim_is_read() -> None:
    raw = config_of("minimax_m2", rotary_dim=4)
    raw["rope_parameters"].pop("partial_rotary_factor", None)
    config: Any = read_architecture(raw, HERE).config
    assert config.rope_parameters["partial_rotary_factor"] == 4 / config.head_dim


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_the_attention_that_a_config_asks_for_need_not_be_installed(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    asked = {"_attn_implementation": "flash_attention_2", "attn_implementation": "flash_attention_2"}
    raw |= {**asked, **({"text_config": {**raw["text_config"], **asked}} if "text_config" in raw else {})}
    path.write_text(json.dumps(raw))
    checkpoint = loading.read_checkpoint(str(tmp_path))
    model = loading.build(checkpoint, "auto")
    assert loading.names_of(checkpoint, model).model is model


def test_more_layers_than_any_model_has_are_not_built(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1_000_000}))
    with pytest.raises(CheckpointError, match="asks for 1,000,000 layers"):
        loading.build(loading.read_checkpoint(str(tmp_path)), "auto")


@pytest.mark.parametrize("family", ["qwen3_moe_fp8", "gpt_oss_mxfp4"])
def test_a_config_without_its_quantisation_is_told_as_that(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["quantization_config"]
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"has no quantization_config, and the folder holds .*, which is part of"):
        loading.read_checkpoint(str(tmp_path))
