"""What is fused at the start, by the options `experts` and `fused_layers`: `start/fuse.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import DEVICE, ON_GPU
from fdasync_kernels import chip
from fdasync_kernels.experts import chain
from fdasync_transformers import TransformersConfig
from fdasync_transformers.fused import norms, rotary, routers
from fdasync_transformers.fused.experts_interface import NAME
from fdasync_transformers.fused.layers.layer import FusedLayer
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.start import fuse as fuse_module
from fdasync_transformers.start import open_model
from fdasync_transformers.start.fuse import Fused, fuse, set_plain_experts
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from step_driver import Driver

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_transformers.model.moe_layers import MoELayers

NO_INTERFACE = "experts are the library's own: layer 0 (DbrxExperts) does not take the library's experts interface"
LIMITS = RunnerLimits(max_running=4, max_step_tokens=16)
FUSED = {**DEVICE, "experts": "fused", "fused_layers": True}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, "auto" tries the fused experts too, as there."""
    if not ON_GPU:
        monkeypatch.setattr(fuse_module, "fuses_experts", lambda *_: True)


def build(family: str, **overrides: Any) -> tuple[Any, MoELayers | None]:
    model = make_tiny_model(family, num_hidden_layers=2, **overrides).to(DEVICE["device"])
    return model, find_moe_layers(model)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(("key", "value"), [("experts", "fused"), ("fused_layers", True)])
async def test_what_needs_kernels_is_refused_without_them(
    tmp_path: Path, kernels: str, key: str, value: object
) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="needs kernels, which cpu has not") as caught:
        await Driver.open(tmp_path, config={"device": "cpu", "kernels": kernels, "self_check": False, key: value})
    assert caught.value.field == f"runner_config.{key}"
    assert caught.value.hint


@pytest.mark.parametrize("self_check", [True, False])
async def test_experts_that_cannot_be_fused_are_refused_by_name(tmp_path: Path, *, self_check: bool) -> None:
    make_tiny_checkpoint(tmp_path, "dbrx", n_layers=2)
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, config={**DEVICE, "experts": "fused", "self_check": self_check})
    error = caught.value
    assert (error.field, error.problem, error.hint) == ("runner_config.experts", NO_INTERFACE, 'use "auto"')


def test_auto_keeps_the_librarys_with_a_note(as_on_a_gpu: None) -> None:
    model, layers = build("dbrx")
    config = TransformersConfig(fused_layers=False, fused_router=False)
    set_plain_experts(model, config, layers, LIMITS)
    assert fuse(model, config, layers, LiveRows(), LIMITS).notes == ("fused: experts of 0 of 2 layers", NO_INTERFACE)
    assert model.config._experts_implementation != NAME


@pytest.mark.ci
def test_auto_fuses_what_can_be(as_on_a_gpu: None) -> None:
    model, layers = build("qwen3_moe")
    config = TransformersConfig(fused_layers=False, fused_router=False)
    set_plain_experts(model, config, layers, LIMITS)
    # the plain passes are the library's code
    assert model.config._experts_implementation != NAME
    live = LiveRows()
    assert fuse(model, config, layers, live, LIMITS).notes == ("fused: experts of 1 of 1 layers",)
    assert model.config._experts_implementation == NAME
    assert layers is not None
    assert model.get_submodule(layers.names[0]).fd_experts.live is live


def test_a_dense_model_has_no_experts_to_fuse() -> None:
    model, layers = build("qwen3_dense")
    assert layers is None
    config = TransformersConfig(kernels="triton", experts="fused", fused_layers=False)
    set_plain_experts(model, config, layers, LIMITS)
    notes = fuse(model, config, layers, LiveRows(), LIMITS).notes
    assert notes == ("experts: this model has none that could be fused",)
    assert model.config._experts_implementation != NAME


@pytest.mark.ci
@pytest.mark.parametrize(
    ("where", "name"),
    [
        # a proof, and the pass in front of proofs
        (norms, "norm_unchecked"),
        (rotary, "_run"),
    ],
)
async def test_memory_that_runs_out_is_no_reason_to_keep_the_librarys_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    monkeypatch.setattr(where, name, fail)
    with pytest.raises(ConfigError, match="do not fit beside what is on the device: no room") as caught:
        await Driver.open(tmp_path, config={**FUSED, "self_check": False})
    assert caught.value.hint == "see fdasync doctor --model"


def test_a_pass_that_fails_keeps_the_librarys_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not on this device")

    model, layers = build("qwen3_moe")
    monkeypatch.setattr(rotary, "_run", fail)
    monkeypatch.setattr(model.model.rotary_emb, "forward", fail)
    config = TransformersConfig(kernels="triton", experts="eager", fused_layers=True, fused_router=False)
    notes = fuse(model, config, layers, LiveRows(), LIMITS).notes
    why = "cannot be compared: RuntimeError: not on this device"
    assert f"rotary embeddings of Qwen3MoeAttention are the library's own: {why}" in notes
    assert f"decoder layers 0, 1 are the library's own: {why}" in notes


def test_fused_layers_of_which_none_is_fused_are_refused_by_name() -> None:
    model, layers = build("qwen3_moe")
    for module in model.modules():
        module.forward = module.forward
    model.model.layers[0].self_attn.k_norm = None
    model.model.layers[1].self_attn.k_norm = None
    config = TransformersConfig(kernels="triton", experts="eager", fused_layers=True, fused_router=False)
    with pytest.raises(ConfigError, match=r"nothing is fused: .*a forward of its own already") as caught:
        fuse(model, config, layers, LiveRows(), LIMITS)
    assert (caught.value.field, caught.value.hint) == ("runner_config.fused_layers", "leave it out")


def test_kernels_that_cannot_run_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layers = build("qwen3_moe")
    monkeypatch.setattr(chip, "runs_on", lambda _: False)
    with pytest.raises(ConfigError, match=f"nothing runs them on {model.device}") as caught:
        fuse(model, TransformersConfig(kernels="triton"), layers, LiveRows(), LIMITS)
    assert (caught.value.field, caught.value.hint) == ("runner_config.kernels", 'use "auto"')


_INTERPRETED = pytest.param("triton", marks=pytest.mark.skipif(ON_GPU, reason="kernels run on the GPU alone there"))


@pytest.mark.parametrize("kernels", ["torch", _INTERPRETED])
def test_nothing_is_fused_on_a_cpu_unless_asked(kernels: Any) -> None:
    model = make_tiny_model("qwen3_moe", num_hidden_layers=2)
    layers = find_moe_layers(model)
    config = TransformersConfig(kernels=kernels, fused_router=False)
    before = model.config._experts_implementation
    set_plain_experts(model, config, layers, LIMITS)
    assert fuse(model, config, layers, LiveRows(), LIMITS).notes == ()
    assert model.config._experts_implementation == before
    assert not any("forward" in module.__dict__ or hasattr(module, "fd_experts") for module in model.modules())


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_experts_of_the_library_by_name(experts: Any) -> None:
    model, layers = build("qwen3_moe")
    config = TransformersConfig(kernels="triton", experts=experts, fused_layers=False, fused_router=False)
    set_plain_experts(model, config, layers, LIMITS)
    assert fuse(model, config, layers, LiveRows(), LIMITS).notes == ()
    assert model.config._experts_implementation == experts


async def test_a_runner_tells_of_its_routers(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "dbrx", n_layers=2)
    config = {**DEVICE, "experts": "eager", "fused_layers": False, "cuda_graphs": False, "self_check": False}
    driver = await Driver.open(tmp_path, config=config)
    await driver.close()
    assert "fused: 0 of 2 routers" in driver.capacity.notes
    why = "DbrxRouter makes logits, and the block around it chooses"
    assert f"routers of layers 0, 1 are the library's own: {why}" in driver.capacity.notes


@pytest.mark.ci
@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"experts": "auto"}, "eager"),
        # the kernels take all widths
        ({**DEVICE, "experts": "fused", "fused_router": False, "fused_layers": False, "cuda_graphs": False}, NAME),
    ],
)
@pytest.mark.parametrize("self_check", [True, False])
async def test_odd_widths_of_experts_are_served(
    tmp_path: Path, config: dict[str, Any], experts: str, *, self_check: bool
) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=13)
    driver = await Driver.open(tmp_path, config={**config, "self_check": self_check})
    await driver.close()
    assert f"experts: {experts}" in driver.capacity.notes


async def test_a_product_that_takes_no_odd_widths_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=13)
    with pytest.raises(ConfigError, match="multiples of 16 bytes") as caught:
        await Driver.open(tmp_path, config={"experts": "grouped_mm"})
    assert (caught.value.field, caught.value.hint) == ("runner_config.experts", 'use "eager"')


async def test_what_fails_while_it_is_fused_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Fused:
        raise RuntimeError("a bug")

    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    monkeypatch.setattr(open_model, "fuse", fail)
    with pytest.raises(UnsupportedModel, match="fusing it fails: RuntimeError: a bug"):
        await Driver.open(tmp_path, config={"self_check": False})


async def play(driver: Driver) -> list[tuple[list[int], Any, list[float]]]:
    """Tokens, rows as sets and log-probs of a sampled and a greedy request that run together."""
    asked = [
        driver.sequence([3, 5, 9, 11, 2], 2, temperature=1.0, seed=4, raw=True),
        driver.sequence([7, 8, 9], 2, raw=True),
    ]
    await driver.run(asked)
    return [(one.tokens, np.sort(driver.rows(one), -1), one.raw) for one in asked]


async def answers_of(folder: Path) -> list[tuple[list[int], Any, list[float]]]:
    driver = await Driver.open(folder, config={"device": "cpu", "num_threads": 1, "self_check": False})
    try:
        return await play(driver)
    finally:
        await driver.close()


def same(got: list[Any], wanted: list[Any]) -> bool:
    return all(
        tokens == right_tokens and np.array_equal(rows, right_rows) and np.allclose(raw, right_raw, atol=2e-4)
        for (tokens, rows, raw), (right_tokens, right_rows, right_raw) in zip(got, wanted, strict=True)
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_moe", {"mlp_only_layers": []}),
        # experts of all tokens beside the others
        pytest.param("qwen2_moe", {"layer_types": ["full_attention"] * 2}, marks=pytest.mark.nightly),
    ],
)
async def test_a_fused_model_answers_as_the_path_of_cpus_before_and_after_new_weights(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        make_tiny_checkpoint(folder, family, seed=seed, num_hidden_layers=2, **overrides)
    wanted = [await answers_of(folder) for folder in (old, new)]
    assert not same(wanted[0], wanted[1])
    driver = await Driver.open(old, config={**FUSED, "self_check": False})
    try:
        assert f"experts: {NAME}" in driver.capacity.notes
        assert any(note.startswith("fused: 2 of 2 decoder layers, experts of 2 of 2") for note in driver.capacity.notes)
        assert not [note for note in driver.capacity.notes if "the library's own" in note]
        runner: Any = driver.runner
        model = runner.opened.model.step_model.model
        assert [type(layer.forward) for layer in model.model.layers] == [FusedLayer] * 2
        assert same(await play(driver), wanted[0])
        await driver.runner.load_folder(str(new))
        assert same(await play(driver), wanted[1])
        assert torch.equal(
            model.model.layers[1].mlp.experts.down_proj.cpu(),
            make_tiny_model(family, seed=1, num_hidden_layers=2, **overrides).model.layers[1].mlp.experts.down_proj,
        )
    finally:
        await driver.close()


@pytest.mark.nightly
async def test_the_self_check_compares_the_fused_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that turn wrong behind their proof are found before anything is served."""
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    honest = chain.experts

    def fuse_and_break(*args: Any) -> Fused:
        fused = fuse(*args)
        monkeypatch.setattr(chain, "experts", lambda *rows, **how: honest(*rows, **how) * 1.5)
        return fused

    monkeypatch.setattr(open_model, "fuse", fuse_and_break)
    with pytest.raises(UnsupportedModel, match="a mixed paged batch differs"):
        await Driver.open(tmp_path, config={**FUSED, "fused_layers": False})


@pytest.mark.ci
@pytest.mark.parametrize("capture", ["auto", False])
async def test_the_self_check_runs_the_routers_that_will_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, capture: Any
) -> None:
    """With and without a capture: each router is proven once, and one that turns wrong behind its proof is found."""
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])
    honest, made = routers.make_forward, []

    def triple(*args: Any) -> Any:
        forward = honest(*args)
        made.append(forward)

        def wrong(*rows: Any) -> Any:
            logits, weights, ids = forward(*rows)
            return logits, weights * 3, ids

        return wrong

    monkeypatch.setattr(routers, "make_forward", triple)
    config = {**DEVICE, "num_threads": 1, "experts": "eager", "cuda_graphs": False, "fused_layers": False}
    with pytest.raises(UnsupportedModel, match="a mixed paged batch differs"):
        await Driver.open(tmp_path, config=config, capture=capture)
    assert len(made) == 2
