"""What a start refuses where weights are to stay as stored, and what a report says of them: `start/stored.py`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.experts import Experts
from fdasync_transformers.fused.replacement import Replaced
from fdasync_transformers.parallel.cuts import Cut
from fdasync_transformers.start import fuse as fusing
from fdasync_transformers.start import runner_config, stored
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from fdasync_transformers.weights import loading
from quantised import make_fp8, make_mxfp4, set_quantization

from fdasync.engine.config import EngineConfig
from fdasync.errors import ConfigError
from fdasync.runner.plugins import make_runner

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0], "moe_intermediate_size": 128, "num_experts": 4}
STORED = {"quantised_weights": "stored", "kernels": "triton", "experts": "fused"}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def runner(folder: Path, config: dict[str, Any], **limits: Any) -> Any:
    made = EngineConfig(model=str(folder), **limits)
    return make_runner("transformers", {"device": "cpu", **STORED, **config}, made.runner_limits())


def make(folder: Path, kind: str = "fp8", **overrides: Any) -> Path:
    if kind == "mxfp4":
        make_mxfp4(folder / "q", folder / "p")
    else:
        make_fp8(folder / "q", folder / "p", "qwen3_moe", 0, (128, 128), **{**SIZES, **overrides})
    return folder / "q"


def refused(folder: Path, config: dict[str, Any], **limits: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        runner(folder, config, **limits).examine()
    return error.value


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "no kernels": ({"kernels": "auto", "experts": "auto"}, {}, "needs kernels, which cpu has not", '"dequantised"'),
    "experts": ({"experts": "eager"}, {}, "experts are 'eager'", "experts"),
    "dtype": ({"dtype": "float32"}, {}, "computed in bfloat16, and dtype is 'float32'", '"dequantised"'),
    "fixed": ({}, {"numerics": "fixed"}, "no fixed numerics|no fixed numerics on a CPU", ""),
    "slices": ({}, {"sum_slices": 2}, "no sums of 2 slices", "sum_slices=1"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_stored_weights_do_not_go_with(tmp_path: Path, what: str) -> None:
    config, limits, why, hint = SETTINGS[what]
    error = refused(make(tmp_path), config, **limits)
    assert error.field.startswith("runner_config.")
    if what != "fixed":
        assert error.field == "runner_config.quantised_weights"
    assert hint in str(error.hint)
    assert any(one in str(error) for one in why.split("|"))


def test_fixed_numerics_on_a_gpu_are_refused() -> None:
    config = runner_config.TransformersConfig(quantised_weights="stored")
    limits = EngineConfig(model="x", numerics="fixed").runner_limits()
    with pytest.raises(ConfigError, match="no fixed numerics: a trainer has plain weights"):
        stored.check_stored(config, limits, torch.device("cuda"))
    stored.check_stored(config, EngineConfig(model="x").runner_limits(), torch.device("cuda"))
    plain = runner_config.TransformersConfig(experts="eager")
    stored.check_stored(plain, limits, torch.device("cpu"))


FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"moe_intermediate_size": 64}, "gate_up_proj cannot stay FP8: it has matrices of 64 rows each, which"),
    "inner": ({"hidden_size": 40}, "cannot stay FP8: it has matrices with rows of 40, no multiple of 16"),
    "dense": ({"mlp_only_layers": [0, 1]}, "this model has no experts"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_shapes_that_the_kernels_do_not_read(tmp_path: Path, what: str) -> None:
    overrides, why = FOLDERS[what]
    error = refused(make(tmp_path, **overrides), {})
    assert (error.field, error.hint) == ("runner_config.quantised_weights", 'use "dequantised"')
    assert why in str(error)


@pytest.mark.ci
def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "plain", "qwen3_moe")
    assert "is not quantised" in str(refused(tmp_path / "plain", {}))
    make_tiny_checkpoint(tmp_path / "int4", "kimi_k2_int4")
    assert "compressed-tensors (pack-quantized) is not read as stored" in str(refused(tmp_path / "int4", {}))
    make_fp8(tmp_path / "blocks", tmp_path / "p", "qwen3_moe")
    assert "FP8 in blocks of 4 x 8 is not read as stored" in str(refused(tmp_path / "blocks", {}))
    folder = make(tmp_path)
    set_quantization(folder, weight_block_size=None)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    assert "is not read as stored" in str(refused(folder, {"weights": "random"}))
    wide = make(tmp_path / "wide")
    path = wide / "config.json"
    path.write_text(path.read_text().replace('"dtype": "bfloat16"', '"dtype": "float16"'))
    assert "this model is float16" in str(refused(wide, {}))


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path)
    error = refused(folder, {}, tensor_parallel=2)
    assert "of 64 rows each, which blocks of 128 cross" in str(error)
    wide = make(tmp_path / "wide", moe_intermediate_size=256)
    report = runner(wide, {}, tensor_parallel=2).examine()
    assert report.served
    whole = runner(wide, {}).examine()
    assert report.weights_nbytes < 0.7 * whole.weights_nbytes


@pytest.mark.ci
def test_linear_layers_stay_where_ranks_do_not_cut_a_block(tmp_path: Path) -> None:
    linears = {"quantised_weights": "stored_linears"}
    folder = make(tmp_path, moe_intermediate_size=256, intermediate_size=256)
    sizes = [runner(folder, each).examine().weights_nbytes for each in ({}, linears)]
    # of 2 layers: q, k, v and o of 32 x 64 or so, and a dense layer of 256
    assert sizes[0] - sizes[1] == pytest.approx(0.5 * 2 * (2 * (64 + 32 + 32 + 64) * 32 + 3 * 256 * 32), rel=0.1)
    report = runner(folder, linears, tensor_parallel=2).examine()
    assert report.served
    assert report.notes[0].startswith("FP8 kept as stored")
    # attention is cut within blocks, the dense layer is not
    assert any("dequantised" in note for note in report.notes)
    packed = make(tmp_path / "packed", "mxfp4")
    error = refused(packed, linears)
    assert "linear layers of MXFP4 checkpoints are plain" in str(error)
    assert error.hint == 'use "stored"'
    dense = runner(make(tmp_path / "dense", mlp_only_layers=[0, 1]), linears).examine()
    assert dense.served


def test_no_cut_of_mxfp4_is_taken(tmp_path: Path) -> None:
    """The library plans none for gpt-oss as yet."""
    checkpoint = loading.read_checkpoint(str(make(tmp_path, "mxfp4")))
    config = runner_config.TransformersConfig(quantised_weights="stored")
    model = loading.build(checkpoint, "auto")
    names = loading.names_of(checkpoint, model)
    names.cuts = {"model.layers.0.mlp.experts.down_proj": Cut(1, 2, 0)}
    with pytest.raises(ConfigError, match="MXFP4 experts are not cut over ranks"):
        stored.keep_stored(model, checkpoint, config, names)


@pytest.mark.parametrize(("kind", "share"), [("fp8", 0.52), ("mxfp4", 0.28)])
def test_a_report_counts_the_bytes_that_stay(tmp_path: Path, kind: str, share: float) -> None:
    folder = make(tmp_path, kind)
    kept = runner(folder, {}).examine()
    plain = runner(folder, {"quantised_weights": "dequantised"}).examine()
    overrides = {} if kind == "mxfp4" else SIZES
    model = make_tiny_model("gpt_oss_mxfp4" if kind == "mxfp4" else "qwen3_moe", **overrides)
    experts = sum(
        2 * each.numel()
        for name, each in model.named_parameters()
        if name.endswith(("gate_up_proj", "experts.down_proj"))
    )
    assert experts > 0
    saved = plain.weights_nbytes - kept.weights_nbytes
    assert saved == pytest.approx((1 - share) * experts, rel=0.05)
    word = {"fp8": "FP8", "mxfp4": "MXFP4"}[kind]
    assert any(note.startswith(f"{word} kept as stored") for note in kept.notes)
    assert not any("kept" in note for note in plain.notes)


async def test_experts_that_cannot_be_fused_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing else that reads such weights."""
    monkeypatch.setattr(fusing, "fuse_experts", lambda *_: Replaced(Experts, reasons={"": "layer 0 has no gate"}))
    opened = runner(make(tmp_path), {"self_check": False, "num_threads": 1}, max_context_tokens=64, num_blocks=8)
    with pytest.raises(ConfigError, match="layer 0 has no gate") as error:
        await opened.open()
    assert (error.value.field, error.value.hint) == ("runner_config.quantised_weights", 'use "dequantised"')
    await opened.aclose()
