"""The published configurations: their values, what is cut of them, and the folders that are made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.weights import loading
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.lib.published_shapes import SHAPES, tiny
from tests.nightly.shapes.folder import fp8_of, write_config, write_shards

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

# parameters in thousands of millions as the publishers name them, without what predicts further tokens
PARAMETERS = {
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "GLM-4.5-Air": 106.9,
    "GLM-4.6": 352.8,
    "DeepSeek-V3": 671.0,
    "Kimi-K2": 1026.4,
    "MiniMax-M2": 228.7,
    "gpt-oss-120b": 116.8,
    "ERNIE-4.5-21B-A3B": 21.8,
    "Mixtral-8x7B": 46.7,
}
# kept in `rope_parameters` by the library, and compared there
_ROPE = {"rope_theta", "rope_scaling", "rotary_dim", "partial_rotary_factor"}
_NAMES = {"architectures", "model_type", "torch_dtype"}


def library_type(name: str) -> str:
    kind = str(SHAPES[name].config["model_type"])
    # its own code is DeepSeek-V3's
    return "deepseek_v3" if kind == "kimi_k2" else kind


def built(config: dict[str, Any], kind: str) -> Any:
    """The library's model on the meta device."""
    parsed = CONFIG_MAPPING[kind].from_dict(dict(config))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    with torch.device("meta"):
        return model_class._from_config(parsed, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
def test_values_are_the_library_s_defaults_where_those_are_of_this_model(name: str) -> None:
    shape = SHAPES[name]
    default = CONFIG_MAPPING[library_type(name)]()
    absent = object()
    compared = {
        key: (value, getattr(default, key))
        for key, value in shape.config.items()
        if key not in _ROPE | _NAMES and getattr(default, key, absent) is not absent
    }
    assert len(compared) > 12
    differ = {key: values for key, values in compared.items() if values[0] != values[1]}
    assert differ.keys() == shape.differs
    rope = CONFIG_MAPPING[library_type(name)].from_dict(dict(shape.config)).rope_parameters
    assert rope["rope_theta"] == shape.config["rope_theta"]
    scaling = shape.config.get("rope_scaling") or {"rope_type": "default"}
    assert rope["rope_type"] == scaling.get("rope_type", scaling.get("type"))
    assert {key: rope[key] for key in scaling} == scaling


@pytest.mark.parametrize("name", SHAPES)
def test_the_whole_model_has_as_many_parameters_as_were_published(name: str) -> None:
    model = built(SHAPES[name].config, library_type(name))
    count = sum(tensor.numel() for tensor in model.parameters())
    assert count / 1e9 == pytest.approx(PARAMETERS[name], abs=0.06)


def test_half_of_each_head_of_glm_is_rotated() -> None:
    model = built(SHAPES["GLM-4.6"].cut(3), "glm4_moe")
    assert model.model.rotary_emb.inv_freq.shape == (32,)


@pytest.mark.parametrize("name", SHAPES)
def test_layers_are_cut_and_widths_are_not(name: str) -> None:
    shape = SHAPES[name]
    config = shape.cut(shape.least_layers)
    changed = {key for key, value in config.items() if value != shape.config[key]}
    lists = {"layer_types", "attn_type_list"}
    assert changed <= {"num_hidden_layers", "first_k_dense_replace", "moe_layer_end_index"} | lists
    assert all(len(config[key]) == shape.least_layers for key in lists & config.keys())
    model = built(config, library_type(name))
    kinds = [any(path.endswith("experts") for path, _ in layer.named_modules()) for layer in model.model.layers]
    assert kinds == [False] * min(shape.dense, 1) + [True] * 2
    for layers in (shape.least_layers - 1, shape.most_layers + 1):
        with pytest.raises(ValueError, match="layers are not from"):
            shape.cut(layers)


def test_both_kinds_of_attention_stay() -> None:
    assert SHAPES["gpt-oss-120b"].cut(2)["layer_types"] == ["sliding_attention", "full_attention"]


def test_as_many_layers_as_there_is_room_for(tmp_path: Path) -> None:
    """And whole periods of them; the fewest where not even those fit."""
    for nbytes, layers in ((1e9, 2), (25e9, 2), (29e9, 4), (300e9, 36)):
        assert write_config(tmp_path / "x", "gpt-oss-120b", int(nbytes), small=False) == layers
        config = json.loads((tmp_path / "x" / "config.json").read_text())
        assert config["num_hidden_layers"] == len(config["layer_types"]) == layers
        if layers > 2:
            model = built(config, "gpt_oss")
            assert sum(tensor.nbytes for tensor in model.parameters()) <= nbytes


def test_fp8_blocks_have_scales_of_their_own_and_may_be_cut_off() -> None:
    tensor = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor[256:, 128:] *= 100
    values, scales = fp8_of(tensor, [128, 128])
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, 2)
    assert scales[2, 1] > 50 * scales[2, 0]
    for i in range(3):
        for j in range(2):
            where = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            assert values[where].float().abs().max() == 448
            # three bits of mantissa
            torch.testing.assert_close(
                values[where].float() * scales[i, j], tensor[where].float(), rtol=1 / 16, atol=float(scales[i, j]) / 64
            )


@pytest.mark.parametrize("name", ["DeepSeek-V3", "MiniMax-M2", "gpt-oss-120b"])
def test_quantised_shards_are_read_as_what_they_stand_for(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, name, 0, small=True, quantised=True)
    sizes = write_shards(tmp_path, torch.device("cpu"))
    stored: dict[str, Any] = {}
    for file in sizes:
        stored |= load_file(tmp_path / file)
    checkpoint = loading.read_checkpoint(str(tmp_path))
    model = loading.build(checkpoint, "bfloat16")
    notes = loading.fill(model, checkpoint, loading.names_of(checkpoint, model), torch.device("cpu"))
    scaled = [key for key in stored if key.endswith(("_scale_inv", "_scales"))]
    assert notes == (f"{'MXFP4' if 'gpt' in name else 'FP8'} dequantised to bfloat16: {len(scaled)} tensors",)
    state = model.state_dict()
    matrix = "model.layers.1.self_attn.o_proj.weight"
    if name == "gpt-oss-120b":
        assert torch.equal(state[matrix], stored[matrix])
        # random codes in blocks of random exponents spread as drawn weights do
        assert 0.01 < float(state["model.layers.1.mlp.experts.down_proj"].float().std()) < 0.05
    else:
        # smaller than a block: one scale
        wide = stored[matrix].float() * stored[f"{matrix}_scale_inv"]
        assert torch.equal(state[matrix], wide.bfloat16())
        assert 0.015 < float(state["model.layers.1.mlp.experts.gate_up_proj"].float().std()) < 0.025
        # routers are not quantised
        assert not [key for key in scaled if ".gate." in key]


@pytest.mark.parametrize("name", SHAPES)
def test_a_tiny_one_is_of_the_same_kind(name: str) -> None:
    shape = SHAPES[name]
    small = tiny(shape.cut(shape.least_layers))
    model = built(small, library_type(name))
    assert sum(tensor.numel() for tensor in model.parameters()) < 1_000_000
    grouped = small["num_key_value_heads"] < small["num_attention_heads"]
    assert grouped == (shape.config["num_key_value_heads"] < shape.config["num_attention_heads"])
    assert (small.get("n_group", 1) > 1) == (shape.config.get("n_group", 1) > 1)
