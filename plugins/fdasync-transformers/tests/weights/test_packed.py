"""Checkpoints of compressed-tensors, AWQ, GPTQ and modelopt: loaded as the plain form that numpy says they stand for.

That the forms are those of the packages, and numpy's results theirs, `python -m benchmarks.quantised_packages` (tag
`benchmarks-whole`) showed.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.tiny.packed_forms import FORMS, awq_of, float8_of, gptq_of, int8_of, packed_of
from fdasync_transformers.weights import identity, loading, reading
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import CPU, Live, assert_equal
from quantised import edit, make_form, set_quantization, split
from safetensors.torch import load_file
from structures import in_turn

from fdasync.errors import CheckpointError, UnsupportedModel, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "model.layers.0.self_attn.q_proj"
Q = f"{MODULE}.weight"
EXPERT = "model.layers.2.mlp.experts.3.down_proj"
# one of each layout
SOME = ("float-quantized block", "naive-quantized", "pack-quantized asymmetric", "awq", "gptq desc_act", "modelopt")


def make(
    tmp_path: Path, how: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> tuple[Path, Path]:
    quantised, plain = tmp_path / f"quantised {seed}", tmp_path / f"plain {seed}"
    make_form(quantised, plain, how, seed, dtype, **overrides)
    return quantised, plain


def load(folder: Path, dtype: str = "auto", notes: list[str] | None = None) -> Any:
    checkpoint = loading.read_checkpoint(str(folder))
    model = loading.build(checkpoint, dtype)
    told = loading.fill(model, checkpoint, loading.names_of(checkpoint, model), CPU)
    if notes is not None:
        notes += told
    return model


def matrix(rows: int = 64, columns: int = 32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def replace(folder: Path, module: str, parts: dict[str, torch.Tensor]) -> None:
    """Give a module of a folder other stored parts."""
    stored = load_file(folder / SINGLE_FILE)
    gone = dict.fromkeys(name for name in stored if name.rpartition(".")[0] == module)
    edit(folder, **{**gone, **{f"{module}.{end}": part for end, part in parts.items()}})


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("how", in_turn(FORMS, SOME))
def test_tensors_and_ids_equal_those_of_the_plain_form(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, plain = make(tmp_path, how)
    wanted = load(plain)
    for band in (16 << 20, 3 * 32 * 4):
        # bands of all rows, and of a few that are no whole words
        monkeypatch.setattr(reading, "_BAND_NBYTES", band)
        notes: list[str] = []
        made = load(quantised, notes=notes)
        assert_equal(made.state_dict(), wanted.state_dict())
        assert identity.weights_id(made) == identity.weights_id(wanted)
        assert identity.fingerprint(made) == identity.fingerprint(wanted)
        count = 8 * 3 * 3 if FORMS[how].only else 91
        assert [note.rpartition(" dequantised to ")[2] for note in notes] == [f"bfloat16: {count} tensors"]


@pytest.mark.parametrize("dtype", in_turn(["float32", "float16"], ["float16"]))
@pytest.mark.parametrize("how", in_turn(FORMS, SOME, in_ci=FORMS))
def test_products_are_rounded_to_the_dtype_of_the_scales_first(tmp_path: Path, how: str, dtype: str) -> None:
    # with experts, and without
    quantised, plain = make(tmp_path, how, dtype=getattr(torch, dtype), num_hidden_layers=2)
    assert_equal(load(quantised, dtype).state_dict(), load(plain, dtype).state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMS)
def test_a_gpu_dequantises_to_the_same_bits(tmp_path: Path, how: str) -> None:
    quantised, _ = make(tmp_path, how)
    on_gpu = loading.load(loading.read_checkpoint(str(quantised)), "auto", torch.device("cuda"))
    assert identity.weights_id(on_gpu) == identity.weights_id(load(quantised))


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("int-quantized", ["weight_scale"]),
        ("pack-quantized asymmetric", ["weight_scale", "weight_shape"]),
        ("pack-quantized asymmetric", ["weight_zero_point"]),
        ("awq", ["qzeros"]),
        ("gptq desc_act", ["g_idx", "scales"]),
    ],
)
def test_parts_may_lie_in_different_shards(tmp_path: Path, how: str, ends: list[str]) -> None:
    quantised, plain = make(tmp_path, how)
    split(quantised, ends)
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


@pytest.mark.ci
@pytest.mark.parametrize("how", SOME)
def test_new_weights_come_in_either_form(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old, old_plain = make(tmp_path, how)
    new, new_plain = make(tmp_path, how, seed=1)
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


# -- what tensors decide ----------------------------------------------------------------------------


@pytest.mark.ci
def test_groups_of_several_formats_stand_side_by_side(tmp_path: Path) -> None:
    """Experts in 4 bits, a matrix in 8, one in FP8 by rows, one in FP8 with one scale."""
    quantised, _ = make(tmp_path, "pack-quantized")
    groups = {
        name: dict(FORMS[name].settings["config_groups"]["group_0"], format=name.split()[0])
        for name in FORMS
        if "quantized" in name and "block" not in name and "asymmetric" not in name and name != "naive-quantized"
    }
    set_quantization(quantised, format="mixed-precision", config_groups=groups)
    wanted = {}
    writers = (lambda made: packed_of(made, 8, None), lambda made: float8_of(made, (1, 32)), float8_of, int8_of)
    for name, write in zip("qkvo", writers, strict=True):
        module = MODULE.replace("q_proj", f"{name}_proj")
        rows, columns = load_file(quantised / SINGLE_FILE)[f"{module}.weight"].shape
        parts, wanted[f"{module}.weight"] = write(matrix(rows, columns))
        replace(quantised, module, parts)
    notes: list[str] = []
    made = load(quantised, notes=notes).state_dict()
    for name, plain in wanted.items():
        assert torch.equal(made[name], plain.bfloat16()), name
    names = "float-quantized, int-quantized, pack-quantized"
    assert notes == [f"compressed-tensors ({names}) dequantised to bfloat16: 76 tensors"]


def test_a_matrix_that_fits_two_groups_is_refused(tmp_path: Path) -> None:
    """8 columns of 8 bits with one scale, or 16 columns of 4 bits: the scales do not tell."""
    quantised, _ = make(tmp_path, "pack-quantized 8 bits")
    four = FORMS["pack-quantized"].settings["config_groups"]["group_0"]
    weights = {**four["weights"], "strategy": "channel", "group_size": None}
    eight = FORMS["pack-quantized 8 bits"].settings["config_groups"]["group_0"]
    set_quantization(quantised, config_groups={"a": eight, "b": {**four, "weights": weights}})
    with pytest.raises(CheckpointError, match="may be of several of the config_groups"):
        load(quantised)


def test_blocks_that_scales_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "float-quantized block")
    group = FORMS["float-quantized block"].settings["config_groups"]["group_0"]
    other = {**group, "weights": {**group["weights"], "block_structure": [4, 9]}}
    set_quantization(quantised, config_groups={"a": group, "b": other})
    with pytest.raises(CheckpointError, match=r"may be of blocks of \(4, 8\) or \(4, 9\)"):
        load(quantised)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("how", ["gptq", "gptq 8 bits"])
def test_columns_of_gptq_are_in_the_order_of_their_groups_without_g_idx(tmp_path: Path, how: str) -> None:
    quantised, plain = make(tmp_path, how)
    names = [name for name in load_file(quantised / SINGLE_FILE) if name.endswith("g_idx")]
    edit(quantised, **dict.fromkeys(names))
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


def test_a_matrix_of_gptq_may_have_other_bits_and_groups_than_the_config(tmp_path: Path) -> None:
    """As `dynamic` of a config says."""
    quantised, _ = make(tmp_path, "gptq")
    parts, plain = gptq_of(matrix(), bits=8, group=16)
    replace(quantised, MODULE, parts)
    assert torch.equal(load(quantised).state_dict()[Q], plain.bfloat16())


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_zero_points_of_gptq_that_are_zero_borrow_from_the_next(tmp_path: Path, bits: int, v2: bool) -> None:
    quantised, _ = make(tmp_path, "gptq_v2" if v2 else "gptq asymmetric")
    weights = matrix()
    # every third row has no negative values: its zero points are 0
    weights[::3] = weights[::3].abs() + 0.1
    parts, plain = gptq_of(weights, bits, symmetric=False, v2=v2)
    words = parts["qzeros"].numpy().view(np.uint32) + np.uint32(0 if v2 else 0x11111111 if bits == 4 else 0x01010101)
    assert {int(word) & 2**bits - 1 for word in words[:, 0]} == {0}
    replace(quantised, MODULE, parts)
    assert torch.equal(load(quantised).state_dict()[Q], plain.bfloat16())


@pytest.mark.parametrize("how", ["awq", "gptq"])
def test_one_group_may_hold_all_columns(tmp_path: Path, how: str) -> None:
    quantised, _ = make(tmp_path, how)
    set_quantization(quantised, group_size=-1)
    stored = load_file(quantised / SINGLE_FILE)
    wanted = {}
    for module in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        rows = stored[f"{module}.scales"].shape[1]
        columns = stored[f"{module}.qweight"].shape[0] * (1 if how == "awq" else 8)
        parts, wanted[module] = (awq_of if how == "awq" else gptq_of)(matrix(rows, columns), group=columns)
        parts.pop("g_idx", None)
        stored |= {f"{module}.{end}": part for end, part in parts.items()}
    edit(quantised, **dict.fromkeys(name for name in stored if name.endswith("g_idx")))
    edit(quantised, **{name: part for name, part in stored.items() if not name.endswith("g_idx")})
    assert torch.equal(load(quantised).state_dict()[Q], wanted[MODULE].bfloat16())


def test_scales_of_activations_and_of_the_kv_cache_are_left_out(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "float-quantized tensor")
    attention = MODULE.rpartition(".")[0]
    names = (f"{MODULE}.input_scale", f"{attention}.k_scale", f"{attention}.v_scale")
    edit(quantised, **{name: torch.ones(1) for name in names})
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "modelopt")
    (quantised / "config.json").write_bytes((plain / "config.json").read_bytes())
    beside = quantised / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    assert_equal(load(quantised).state_dict(), load(plain).state_dict())
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(UnsupportedModel, match=r"modelopt \(NVFP4\)"):
        load(quantised)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    beside.rename(plain / beside.name)
    notes: list[str] = []
    load(plain, notes=notes)
    assert notes == []


# -- refused ----------------------------------------------------------------------------------------


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


ASYMMETRIC = "pack-quantized asymmetric"
BROKEN: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no scale": ("int-quantized", {f"{Q}_scale": None}, f"holds {Q}, and no file of the folder holds its scales"),
    "a scale of columns": ("int-quantized", {f"{Q}_scale": torch.ones(1, 32)}, r"needs float scales of .*\(64, 1\)"),
    "a vector of scales": ("int-quantized", {f"{Q}_scale": torch.ones(64)}, r"needs float scales of .*\(64, 1\)"),
    "scales in FP8": (
        "float-quantized",
        {f"{Q}_scale": torch.ones(64, 1).to(torch.float8_e4m3fn)},
        "dtype F8_E4M3: .* needs float scales",
    ),
    "a zero point of a row": ("naive-quantized", {f"{Q}_zero_point": torch.zeros(64, 1).to(torch.int8)}, "zero_point"),
    "a zero point in float": ("naive-quantized", {f"{Q}_zero_point": torch.zeros(64, 4)}, "zero_point .* dtype F32"),
    "a zero point of a plain matrix": (
        "naive-quantized",
        {Q: torch.zeros(64, 32), f"{Q}_scale": None},
        f"no place for: {Q}_zero_point",
    ),
    "no packed scale": (ASYMMETRIC, {f"{Q}_scale": None}, f"{Q}_packed, and no file .* its scales {Q}_scale"),
    "no shape": (ASYMMETRIC, {f"{Q}_shape": None}, f"{Q}_packed, and no file .* its shape {Q}_shape"),
    "no zero point": (ASYMMETRIC, {f"{Q}_zero_point": None}, f"no file .* its zero points {Q}_zero_point"),
    "a zero point that is not packed": (ASYMMETRIC, {f"{Q}_zero_point": words(64, 4)}, r"needs I32 of \(8, 4\)"),
    "a zero point too many": ("pack-quantized", {f"{EXPERT}.weight_zero_point": words(4, 2)}, "there is none"),
    "groups of another size": (ASYMMETRIC, {f"{Q}_scale": torch.ones(64, 2)}, "do not fill"),
    "scales of other rows": (ASYMMETRIC, {f"{Q}_scale": torch.ones(63, 4)}, r"needs float scales of shape \(64, 4\)"),
    "packed in bytes": (ASYMMETRIC, {f"{Q}_packed": torch.zeros(64, 4, dtype=torch.uint8)}, "weight_packed .* U8"),
    "a packed matrix and a plain one": (ASYMMETRIC, {Q: torch.zeros(64, 32)}, f"{Q}_packed, and {SINGLE_FILE} {Q}"),
    "no AWQ scale": ("awq", {f"{MODULE}.scales": None}, f"its scales {MODULE}.scales"),
    "no AWQ zero point": ("awq", {f"{MODULE}.qzeros": None}, f"its zero points {MODULE}.qzeros"),
    "AWQ groups of another size": ("awq", {f"{MODULE}.scales": torch.ones(2, 64)}, r"float scales of shape \(4, 64\)"),
    "AWQ zero points of another shape": ("awq", {f"{MODULE}.qzeros": words(4, 4)}, r"needs I32 of \(4, 8\)"),
    "AWQ in bytes": ("awq", {f"{MODULE}.qweight": torch.zeros(32, 8, dtype=torch.uint8)}, "qweight .* U8"),
    "GPTQ scales of other rows": ("gptq", {f"{MODULE}.scales": torch.ones(4, 32)}, r"scales of shape \(4, 64\)"),
    "GPTQ zero points of another shape": ("gptq", {f"{MODULE}.qzeros": words(2, 8)}, r"needs I32 of \(4, 8\)"),
    "g_idx of other columns": ("gptq", {f"{MODULE}.g_idx": words(20)}, "g_idx .* does not fit"),
    "g_idx in 64 bits": ("gptq", {f"{MODULE}.g_idx": words(32).long()}, "g_idx .* I64: it does not fit"),
    "a matrix of another shape": ("gptq", {f"{MODULE}.{end}": part for end, part in gptq_of(matrix(32, 32))[0].items()},
                                  r"has shape \(32, 32\), the config asks for \(64, 32\)"),
    "modelopt scales in bfloat16": ("modelopt", {f"{Q}_scale": torch.ones(()).bfloat16()}, "needs float scales"),
}  # fmt: skip
# one of each part that may be missing or wrong
_KINDS = (
    "no scale", "a scale of columns", "a zero point in float", "no shape", "a zero point too many", "packed in bytes",
    "a packed matrix and a plain one", "GPTQ zero points of another shape", "g_idx of other columns",
)  # fmt: skip


@pytest.mark.parametrize("name", in_turn(BROKEN, _KINDS, in_ci=BROKEN))
def test_broken_folders_are_refused_by_name_before_memory_is_taken(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, changed, said = BROKEN[name]
    quantised, plain = make(tmp_path, how)
    edit(quantised, **changed)

    def taken(*_: Any, **__: Any) -> None:
        pytest.fail("memory was taken")

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "to_empty", taken)
        with pytest.raises(CheckpointError, match=said):
            load(quantised)
    live = Live(plain)
    before = live.state()
    with pytest.raises(WeightsRejected, match=said):
        live.weights.load_folder(str(quantised))
    assert_equal(live.state(), before)


@pytest.mark.parametrize(
    ("how", "changed", "said"),
    [
        (ASYMMETRIC, {f"{Q}_shape": torch.tensor([64, 31])}, r"weight_shape says \[64, 31\]"),
        ("gptq", {f"{MODULE}.g_idx": words(32) + 4}, "g_idx names groups that are not among the 4 scales"),
        ("gptq", {f"{MODULE}.g_idx": words(32) - 1}, "g_idx names groups that are not among the 4 scales"),
    ],
)
def test_data_that_does_not_fit_is_found_while_it_is_read(
    tmp_path: Path, how: str, changed: dict[str, torch.Tensor], said: str
) -> None:
    quantised, _ = make(tmp_path, how)
    edit(quantised, **changed)
    with pytest.raises(CheckpointError, match=said):
        load(quantised)


def group_of(how: str, **weights: Any) -> dict[str, Any]:
    group = FORMS[how].settings["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"format": "mxfp4-pack-quantized"}, "mxfp4-pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transforms"),
        (group_of("pack-quantized", num_bits=3), "pack-quantized of 3-bit int"),
        (group_of("pack-quantized", actorder="group"), "pack-quantized with columns in an order of their own"),
        (group_of("pack-quantized", strategy="tensor_group"), "pack-quantized by tensor_group"),
        (group_of("pack-quantized", type="float"), "pack-quantized of 4-bit float"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], name: str
) -> None:
    quantised, _ = make(tmp_path, "pack-quantized")
    set_quantization(quantised, **changed)
    said = rf"quantised with compressed-tensors \({name}\); "
    with pytest.raises(UnsupportedModel, match=said):
        loading.read_checkpoint(str(quantised), with_tensors=False)


@pytest.mark.parametrize(
    ("how", "changed", "said"),
    [
        ("pack-quantized", {"config_groups": None}, "TypeError|AttributeError"),
        ("pack-quantized", group_of("pack-quantized", group_size=0), "0 is no number"),
        ("pack-quantized", group_of("pack-quantized", group_size="8"), "'8' is no number"),
        ("float-quantized block", group_of("float-quantized block", block_structure=[4]), "ValueError"),
        ("awq", {"group_size": 0}, "group_size 0"),
        ("gptq", {"group_size": "all"}, "group_size 'all'"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, how: str, changed: dict[str, Any], said: str) -> None:
    quantised, _ = make(tmp_path, how)
    set_quantization(quantised, **changed)
    with pytest.raises(CheckpointError, match=rf"config\.json: its quantization_config cannot be read: .*({said})"):
        load(quantised)
