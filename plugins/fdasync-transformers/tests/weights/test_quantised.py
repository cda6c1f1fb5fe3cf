"""Quantised checkpoints: loaded as the library dequantises them and as their plain form, refused by their true name."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from fdasync_transformers.tiny.quantised import fp8_of, plain_of_fp8
from fdasync_transformers.weights import identity, loading, reading
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import CPU, Live, assert_equal
from quantised import edit, make_fp8, make_mxfp4, set_quantization, split
from safetensors.torch import load_file, save_file
from transformers.quantizers import quantizer_finegrained_fp8

from fdasync.errors import CheckpointError, UnsupportedModel, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path

# matrices with scales: the attention's 4, and 3 of 8 experts or of the dense layer, in 4 layers
FP8_TENSORS = {"qwen3_moe": 4 * 4 + 3 * 8 * 3 + 3}
KINDS = ("qwen3_moe", "mxfp4", "deepseek_v3", "minimax_m2")
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.2.mlp.experts.down_proj"


def make(tmp_path: Path, kind: str, seed: int = 0) -> tuple[Path, Path]:
    quantised, plain = tmp_path / f"quantised {seed}", tmp_path / f"plain {seed}"
    if kind == "mxfp4":
        make_mxfp4(quantised, plain, seed)
    else:
        make_fp8(quantised, plain, kind, seed)
    return quantised, plain


def load(folder: Path, dtype: str = "auto", notes: list[str] | None = None) -> Any:
    checkpoint = loading.read_checkpoint(str(folder))
    model = loading.build(checkpoint, dtype)
    told = loading.fill(model, checkpoint, loading.names_of(checkpoint, model), CPU)
    if notes is not None:
        notes += told
    return model


def by_library(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as the library loads it, dequantised."""
    # the library asks for accelerate before it dequantises, and does not use it
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    settings = loading.read_json(folder / "config.json")["quantization_config"]
    known: Any = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    config = known[settings.pop("quant_method")](**settings, dequantize=True)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=getattr(torch, dtype), quantization_config=config)


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_those_of_the_library(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = make(tmp_path, kind)
    # bands of a few rows
    monkeypatch.setattr(reading, "_BAND_NBYTES", 3 * 32 * 4)
    ours, theirs = load(quantised, dtype).state_dict(), by_library(quantised, dtype, monkeypatch).state_dict()
    # a model that the library dequantises to float32 keeps its plain tensors as they are stored
    assert_equal(ours, {name: tensor.to(ours[name].dtype) for name, tensor in theirs.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_dequantises_to_the_same_bits(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = make(tmp_path, kind)
    # the id is made of pieces
    monkeypatch.setattr(identity, "_STAGED_NBYTES", 100)
    on_gpu = loading.load(loading.read_checkpoint(str(quantised)), "auto", torch.device("cuda"))
    assert identity.weights_id(on_gpu) == identity.weights_id(load(quantised))


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_ids_and_facts_equal_those_of_the_plain_form(tmp_path: Path, kind: str) -> None:
    quantised, plain = make(tmp_path, kind)
    one, other = load(quantised), load(plain)
    assert one.dtype == torch.bfloat16
    assert_equal(one.state_dict(), other.state_dict())
    assert identity.weights_id(one) == identity.weights_id(other)
    assert identity.fingerprint(one) == identity.fingerprint(other)


def test_the_dtype_is_bfloat16_unless_the_config_names_one(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "qwen3_moe")
    path = quantised / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"dtype": "bfloat16"', '"dtype": null'))
    edit(quantised, **{"lm_head.weight": load_file(quantised / SINGLE_FILE)["lm_head.weight"].float()})
    assert load(quantised).dtype == torch.bfloat16
    path.write_text(text.replace('"dtype": "bfloat16"', '"dtype": "float16"'))
    assert load(quantised).dtype == torch.float16


@pytest.mark.parametrize(
    ("kind", "count", "note"),
    [
        ("qwen3_moe", FP8_TENSORS["qwen3_moe"], "FP8 dequantised to bfloat16: 91 tensors"),
        ("mxfp4", 2 * 4, "MXFP4 dequantised to bfloat16: 8 tensors"),
    ],
)
def test_a_note_counts_what_was_dequantised(tmp_path: Path, kind: str, count: int, note: str) -> None:
    quantised, plain = make(tmp_path, kind)
    stored = load_file(quantised / SINGLE_FILE)
    assert sum(name.endswith(("_scale_inv", "_scales")) for name in stored) == count
    notes: list[str] = []
    load(quantised, notes=notes)
    load(plain, notes=notes)
    assert notes == [note]


def test_layers_that_the_library_leaves_out_are_not_counted(tmp_path: Path) -> None:
    """DeepSeek-V3's layer 61, which predicts a further token, has scales too."""
    quantised, plain = make(tmp_path, "deepseek_v3")
    values, scales = fp8_of(torch.ones(8, 8), (4, 8))
    left_out = "model.layers.61.self_attn.o_proj.weight"
    notes: list[str] = []
    wanted = identity.weights_id(load(quantised, notes=notes))
    edit(quantised, **{left_out: values, f"{left_out}_scale_inv": scales})
    assert identity.weights_id(load(quantised, notes=notes)) == wanted == identity.weights_id(load(plain))
    assert notes == ["FP8 dequantised to bfloat16: 104 tensors"] * 2


@pytest.mark.parametrize(
    ("kind", "apart"), [("qwen3_moe", ["_scale_inv"]), ("mxfp4", ["_scales"]), ("qwen3_moe", ["q_proj.weight"])]
)
def test_values_and_scales_may_lie_in_different_shards(tmp_path: Path, kind: str, apart: list[str]) -> None:
    quantised, plain = make(tmp_path, kind)
    split(quantised, apart)
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


# -- other forms of scales --------------------------------------------------------------------------


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("band", [1 << 20, 5 * 32 * 4, 32 * 4])
def test_the_last_blocks_may_be_cut_off(tmp_path: Path, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek-V3's `kv_a_proj_with_mqa`: 576 rows in blocks of 128. The library refuses such a grid, or takes
    blocks of another size."""
    monkeypatch.setattr(reading, "_BAND_NBYTES", band)
    make_fp8(tmp_path / "quantised", tmp_path / "plain", "deepseek_v3", block=(13, 7))
    assert_equal(load(tmp_path / "quantised").state_dict(), load(tmp_path / "plain").state_dict())


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("form", ["float32", "e8m0", "scalar", "e5m2", "bfloat16", "exponents", "per matrix"])
def test_forms_of_scales(tmp_path: Path, form: str) -> None:
    quantised, plain = make(tmp_path, "qwen3_moe")
    values, scales = fp8_of(torch.randn(64, 32, generator=torch.Generator().manual_seed(5)), (4, 8))
    factors = scales
    if form == "bfloat16":
        scales = factors = scales.bfloat16()
    elif form in ("exponents", "e8m0"):
        exponents = scales.log2().round() + 127
        scales, factors = exponents.to(torch.uint8), (exponents - 127).exp2()
        if form == "e8m0":
            scales = scales.view(torch.float8_e8m0fnu)
    elif form in ("per matrix", "scalar"):
        # all matrices of the folder have one scale each
        stored = load_file(quantised / SINGLE_FILE)
        largest = {name: tensor.max() for name, tensor in stored.items() if name.endswith("_scale_inv")}
        edit(quantised, **{name: one.reshape(1) if form == "per matrix" else one for name, one in largest.items()})
        set_quantization(quantised, weight_block_size=None, activation_scheme="static")
        edit(quantised, **{Q.replace("weight", "activation_scale"): torch.tensor(0.5)})
        scales = factors = torch.full((1, 1) if form == "per matrix" else (), 0.0137)
        factors = factors.reshape(1, 1).expand(16, 4)
    elif form == "e5m2":
        values = values.float().to(torch.float8_e5m2)
    edit(quantised, **{Q: values, f"{Q}_scale_inv": scales})
    made = load(quantised).state_dict()[Q]
    assert not torch.equal(made, load(plain).state_dict()[Q])
    assert torch.equal(made, plain_of_fp8(values, factors, (4, 8)).bfloat16())


def test_experts_may_be_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library saves fused experts: one tensor and one grid for all."""
    quantised, plain = make(tmp_path, "qwen3_moe")
    monkeypatch.setattr(reading, "_BAND_NBYTES", 3 * 32 * 16 * 4)
    stored = load_file(quantised / SINGLE_FILE)
    names = [EXPERTS.replace("down_proj", f"{expert}.down_proj.weight") for expert in range(8)]
    values = torch.stack([stored[name].view(torch.uint8) for name in names]).view(torch.float8_e4m3fn)
    scales = torch.stack([stored[f"{name}_scale_inv"] for name in names])
    gone = {name: None for stem in names for name in (stem, f"{stem}_scale_inv")}
    edit(quantised, **gone, **{EXPERTS: values, f"{EXPERTS}_scale_inv": scales})
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


def test_scales_may_have_the_name_of_deepseeks_own_files(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "deepseek_v3")
    stored = load_file(quantised / SINGLE_FILE)
    scales = [name for name in stored if name.endswith("_scale_inv")]
    named = {name.replace("weight_scale_inv", "scale"): stored[name] for name in scales}
    edit(quantised, **dict.fromkeys(scales), **named)
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


@pytest.mark.ci
def test_tied_heads_are_compared_dequantised(tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    make_fp8(quantised, plain, "ernie4_5_moe")
    embeddings = "model.embed_tokens.weight"
    values, scales = fp8_of(load_file(plain / SINGLE_FILE)[embeddings], (4, 8))
    dequantised = plain_of_fp8(values, scales, (4, 8)).bfloat16()
    edit(plain, **{embeddings: dequantised})
    edit(quantised, **{embeddings: values, f"{embeddings}_scale_inv": scales, "lm_head.weight": dequantised})
    live = Live(plain)
    assert live.weights.load_folder(str(quantised)) == identity.weights_id(load(plain))
    dequantised[-1, -1] += 1.0
    edit(quantised, **{"lm_head.weight": dequantised})
    with pytest.raises(WeightsRejected, match=r"lm_head\.weight differs"):
        live.weights.load_folder(str(quantised))


# -- new weights ------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_come_in_either_form(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old, old_plain = make(tmp_path, kind)
    new, new_plain = make(tmp_path, kind, seed=1)
    live, fresh = Live(old), Live(new_plain)
    wanted = identity.weights_id(fresh.model)
    for folder, says in ((new, "dequantised to bfloat16"), (new_plain, "stored plain")):
        live.weights.load_folder(str(old_plain))
        caplog.clear()
        assert live.weights.read_weights_id(str(folder)) == wanted
        assert live.weights.load_folder(str(folder)) == wanted
        assert_equal(live.state(), fresh.state())
        assert [says in message and str(folder) in message for message in caplog.messages] == [True]
    assert live.now() == live.addresses


def test_a_quantised_folder_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "qwen3_moe")
    live = Live(plain)
    before = live.state()
    edit(quantised, **{f"{Q}_scale_inv": None})
    with pytest.raises(WeightsRejected, match=r"q_proj\.weight_scale_inv"):
        live.weights.load_folder(str(quantised))
    assert_equal(live.state(), before)
    assert not live.weights.broken


# -- refused ----------------------------------------------------------------------------------------


BROKEN: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no scales": ("qwen3_moe", {f"{Q}_scale_inv": None}, rf"holds {Q}, and no file of the folder holds its scales"),
    "no values": ("qwen3_moe", {Q: None}, f"tensors are missing: {Q}"),
    "plain values with scales": ("qwen3_moe", {Q: torch.ones(64, 32)}, f"no place for: {Q}_scale_inv"),
    "scales of another grid": ("qwen3_moe", {f"{Q}_scale_inv": torch.ones(16, 3)}, r"needs float scales of .*16, 4"),
    "one scale for a grid": ("qwen3_moe", {f"{Q}_scale_inv": torch.ones(())}, r"needs float scales of .*16, 4"),
    "integer scales": ("qwen3_moe", {f"{Q}_scale_inv": torch.ones(16, 4, dtype=torch.int32)}, "I32"),
    "a vector of FP8": (
        "qwen3_moe",
        {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": torch.ones(1)},
        "need rows and columns",
    ),
    "values of another shape": (
        "qwen3_moe",
        {Q: torch.ones(32, 32).to(torch.float8_e4m3fn), f"{Q}_scale_inv": torch.ones(8, 4)},
        rf"{Q} has shape \(32, 32\), the config asks for \(64, 32\)",
    ),
    "no MXFP4 scales": ("mxfp4", {f"{EXPERTS}_scales": None}, f"{EXPERTS}_blocks, and no file .*{EXPERTS}_scales"),
    "MXFP4 scales of another shape": (
        "mxfp4",
        {f"{EXPERTS}_scales": torch.ones(8, 64, 1, dtype=torch.uint8)},
        r"needs U8 of \(8, 64, 2\)",
    ),
    "MXFP4 blocks of another size": (
        "mxfp4",
        {f"{EXPERTS}_blocks": torch.ones(8, 64, 4, 8, dtype=torch.uint8)},
        r"not \(experts, rows, blocks, 16\)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused_by_name_before_memory_is_taken(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed, words = BROKEN[name]
    quantised, _ = make(tmp_path, kind)
    edit(quantised, **changed)

    def taken(*_: Any, **__: Any) -> None:
        pytest.fail("memory was taken")

    monkeypatch.setattr(torch.nn.Module, "to_empty", taken)
    with pytest.raises(CheckpointError, match=words):
        load(quantised)


@pytest.mark.parametrize("last", ["weight_scale", "weight.scale"])
def test_scales_of_another_layout_are_told(tmp_path: Path, last: str) -> None:
    quantised, _ = make(tmp_path, "qwen3_moe")
    tensors = load_file(quantised / SINGLE_FILE)
    renamed = {name.replace("weight_scale_inv", last): tensor for name, tensor in tensors.items()}
    save_file(renamed, quantised / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=rf"it has \S+\.{last}, of a layout that this loader does not know"):
        load(quantised)


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [128, 128.0]])
def test_bad_block_sizes_are_refused(tmp_path: Path, block: object) -> None:
    quantised, _ = make(tmp_path, "qwen3_moe")
    set_quantization(quantised, weight_block_size=block)
    with pytest.raises(CheckpointError, match="weight_block_size"):
        load(quantised)


@pytest.mark.ci(after=9)
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "novel"}, "novel"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 with experts in fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(NVFP4\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"awq \(gemv\)"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, r"awq \(llm-awq\)"),
        ({"quant_method": "awq", "bits": 8}, "awq of 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"gptq \(marlin\)"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, r"gptq \(marlin\)"),
        ({"bits": 3}, "a method that config.json does not name"),
    ],
)
def test_other_quantisations_are_refused_by_their_name(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    _, plain = make(tmp_path, "qwen3_moe")
    live = Live(plain)
    set_quantization(plain, **settings)
    said = f"quantised with {name}; .* and not {name}: give the checkpoint that it was quantised from"
    with pytest.raises(UnsupportedModel, match=said) as caught:
        loading.read_checkpoint(str(plain), with_tensors=False)
    assert caught.value.model == "qwen3_moe"
    with pytest.raises(WeightsRejected, match=said):
        live.weights.load_folder(str(plain))


def test_drawn_weights_need_no_scales(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "qwen3_moe")
    one, other = (
        loading.draw(loading.read_checkpoint(str(folder), with_tensors=False), "auto", CPU)
        for folder in (quantised, plain)
    )
    assert_equal(one.state_dict(), other.state_dict())


def test_a_plain_folder_may_keep_the_words_of_a_quantised_one(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "qwen3_moe")
    notes: list[str] = []
    shutil.copy(quantised / "config.json", plain / "config.json")
    assert identity.weights_id(load(plain, notes=notes)) == identity.weights_id(load(quantised))
    assert notes == []
