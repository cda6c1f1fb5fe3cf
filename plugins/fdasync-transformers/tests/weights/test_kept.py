"""Experts that stay as their checkpoint stores them: loaded, named and replaced: `model/kept/`, `weights/kept/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import named_tensors, weights_fingerprint
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.model.kept.kept import Kept, kept_forms, logical_state
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.deltas.delta import write_delta
from live_weights import CPU, Live, assert_equal, stored
from quantised import edit, make_form, make_fp8, make_mxfp4
from safetensors.torch import load_file

from fdasync.errors import CheckpointError, ConfigError, WeightsBroken, WeightsRejected
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0], "moe_intermediate_size": 128, "num_experts": 4}
FORMS = {"fp8": FP8, "fp8_linears": FP8, "mxfp4": MXFP4}
EXPERTS = "model.layers.1.mlp.experts"
GATE = f"{EXPERTS}.2.gate_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
FUSED = f"{EXPERTS}.gate_up_proj"


def make(tmp_path: Path, kind: str, seed: int = 0) -> tuple[Path, Path]:
    quantised, plain = tmp_path / f"quantised {seed}", tmp_path / f"plain {seed}"
    if kind == "mxfp4":
        make_mxfp4(quantised, plain, seed)
    else:
        make_fp8(quantised, plain, "qwen3_moe", seed, (128, 128), **SIZES)
    return quantised, plain


def make_trained(tmp_path: Path, kind: str) -> Path:
    """A plain folder whose experts no quantised form has."""
    _, plain = make(tmp_path, kind, 1)
    noise = torch.Generator().manual_seed(4)
    changed = {
        name: (held * (1 + 0.3 * torch.randn(held.shape, generator=noise))).to(held.dtype)
        for name, held in stored(plain).items()
        if held.dim() > 1
    }
    edit(plain, **changed)
    return plain


@pytest.fixture(params=list(FORMS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def keep(folder: Path, kind: str) -> Live:
    return Live(folder, form=FORMS[kind], linears=kind == "fp8_linears")


def requantised(live: Live, plain: Path) -> dict[str, torch.Tensor]:
    """What the state of a model must be that gets the tensors of a plain folder."""
    wanted = dict(Live(plain).model.state_dict())
    for name, form in kept_forms(live.model).items():
        made = Kept.made_of(wanted[name], form)
        wanted[name], wanted[name + form.scales_end] = made.values, made.scales
    return wanted


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert_equal(*({name: _bytes(held) for name, held in each.items()} for each in (one, other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # torch compares no FP8
    return tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()


# -- loading ----------------------------------------------------------------------------------------


def test_bytes_stay_and_stand_for_the_plain_form(tmp_path: Path, kind: str) -> None:
    quantised, plain = make(tmp_path, kind)
    live, whole = keep(quantised, kind), Live(plain)
    assert (
        identity.weights_id(live.model)
        == identity.weights_id(whole.model)
        == identity.weights_id(Live(quantised).model)
    )
    assert live.weights.fingerprint_weights(True) == whole.weights.fingerprint_weights(True)
    state = logical_state(live.model)
    assert list(state) == list(whole.model.state_dict())
    kept = {name: held for name, held in state.items() if isinstance(held, Kept)}
    assert len(kept) == {"fp8": 2, "fp8_linears": 13, "mxfp4": 8}[kind]
    for name, held in kept.items():
        assert torch.equal(held[0 : len(held)], whole.model.state_dict()[name])
        assert held.nbytes < (0.3 if kind == "mxfp4" else 0.6) * whole.model.state_dict()[name].nbytes
    assert not [name for name, each in live.model.named_parameters() if each.requires_grad]
    if kind != "mxfp4":
        files = stored(quantised)
        assert torch.equal(_bytes(kept[FUSED].values[2, :128]), _bytes(files[GATE]))
        assert torch.equal(kept[FUSED].scales[2, :1], files[f"{GATE}_scale_inv"])
        apart = ("FP8 kept as stored: 12 tensors", "FP8 dequantised to bfloat16: 11 tensors")
        assert live.notes == (apart if kind == "fp8" else ("FP8 kept as stored: 23 tensors",))
    else:
        assert live.notes == ("MXFP4 kept as stored: 8 tensors",)


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "fp8")
    name = f"{GATE}_scale_inv"
    edit(quantised, **{name: torch.full_like(stored(quantised)[name], 120, dtype=torch.uint8)})
    live, whole = keep(quantised, "fp8"), Live(quantised)
    assert float(logical_state(live.model)[FUSED].scales[2, 0, 0]) == 2.0**-7  # type: ignore[union-attr]
    assert identity.weights_id(live.model) == identity.weights_id(whole.model)


def test_a_tensor_that_is_stored_otherwise_is_refused(tmp_path: Path) -> None:
    quantised, plain = make(tmp_path, "fp8")
    edit(quantised, **{GATE: stored(plain)[GATE], f"{GATE}_scale_inv": None})
    with pytest.raises(ConfigError, match=f"{GATE} is not stored as FP8"):
        keep(quantised, "fp8")


def test_exponents_that_no_weight_has_are_refused(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "mxfp4")
    name = next(name for name in stored(quantised) if name.endswith("_scales"))
    edit(quantised, **{name: stored(quantised)[name] + 20})
    with pytest.raises(CheckpointError, match="too large"):
        keep(quantised, "mxfp4")


def test_drawn_weights_are_those_of_a_model_that_keeps_nothing_quantised(tmp_path: Path, kind: str) -> None:
    quantised, _ = make(tmp_path, kind)
    checkpoint = loading.read_checkpoint(str(quantised), with_tensors=False)
    plain = loading.draw(checkpoint, "auto", CPU).state_dict()
    live = keep(quantised, kind)
    loading.draw_weights(live.names)
    for name, held in logical_state(live.model).items():
        if isinstance(held, Kept):
            made = Kept.made_of(plain[name], held.form)
            assert torch.equal(_bytes(held.values), _bytes(made.values))
            assert torch.equal(held.scales, made.scales)
        else:
            assert torch.equal(held, plain[name])


# -- new weights ------------------------------------------------------------------------------------


@pytest.mark.ci(after=1)
def test_a_folder_of_the_same_form(tmp_path: Path, kind: str) -> None:
    (old, _), (new, _) = make(tmp_path, kind), make(tmp_path, kind, 1)
    live, fresh = keep(old, kind), keep(new, kind)
    assert live.weights.read_weights_id(str(new)) == identity.weights_id(fresh.model)
    same(live.state(), keep(old, kind).state())
    assert (
        live.weights.load_folder(str(new)) == identity.weights_id(fresh.model) == identity.weights_id(Live(new).model)
    )
    same(live.state(), fresh.state())
    assert live.now() == live.addresses


@pytest.mark.ci(after=2)
def test_a_plain_folder_is_quantised_by_the_recipe(tmp_path: Path, kind: str) -> None:
    old, new = make(tmp_path, kind)[0], make_trained(tmp_path, kind)
    live = keep(old, kind)
    wanted = requantised(live, new)
    read = live.weights.read_weights_id(str(new))
    assert live.weights.load_folder(str(new)) == read == identity.weights_id(live.model)
    same(live.state(), wanted)
    assert live.now() == live.addresses


def test_a_folder_of_another_form_is_quantised_anew(tmp_path: Path) -> None:
    old, _ = make(tmp_path, "fp8")
    new, plain = tmp_path / "packed", tmp_path / "plain"
    make_form(new, plain, "pack-quantized", 1, **SIZES)
    live = keep(old, "fp8")
    wanted = requantised(live, plain)
    live.weights.load_folder(str(new))
    same(live.state(), wanted)


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("piece", [640, 1 << 20])
@pytest.mark.parametrize("wide", [False, True])
def test_plain_tensors_are_quantised_by_the_recipe(tmp_path: Path, kind: str, wide: bool, piece: int) -> None:
    old, new = make(tmp_path, kind)[0], make_trained(tmp_path, kind)
    live, trainer = keep(old, kind), Live(new).model
    wanted = requantised(live, new)
    if wide:
        # as masters are, between the values of bfloat16, which they are rounded to
        trainer = trainer.float()
        for parameter in trainer.parameters():
            parameter.mul_(1 + 1e-4)
    live.send(named_tensors(trainer), piece)
    same(live.state(), wanted)
    assert live.now() == live.addresses
    expected = weights_fingerprint(trainer, dtype="bfloat16", stored=kind)  # type: ignore[arg-type]
    assert live.weights.fingerprint_weights(True) == expected
    assert expected != weights_fingerprint(trainer, dtype="bfloat16")


def as_stored(folder: Path) -> list[tuple[str, str, tuple[int, ...], Any]]:
    return named_tensors(load_file(folder / "model.safetensors"))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("piece", [4, 640, 1 << 20])
@pytest.mark.parametrize("backwards", [False, True])
def test_quantised_tensors_come_as_a_checkpoint_has_them(
    tmp_path: Path, kind: str, piece: int, backwards: bool
) -> None:
    """Those of places that are kept byte by byte, others dequantised when both parts are there."""
    (old, _), (new, _) = make(tmp_path, kind), make(tmp_path, kind, 1)
    live = keep(old, kind)
    tensors = as_stored(new)
    live.send(tensors[::-1] if backwards else tensors, piece)
    same(live.state(), keep(new, kind).state())
    assert live.now() == live.addresses


def test_a_dequantised_model_takes_quantised_tensors_too(tmp_path: Path, kind: str) -> None:
    (old, _), (new, _) = make(tmp_path, kind), make(tmp_path, kind, 1)
    live = Live(old)
    live.send(as_stored(new))
    same(live.state(), Live(new).state())


def test_fused_tensors_come_quantised(tmp_path: Path) -> None:
    """Under the names of the state dict, as the library's quantised model has them."""
    (old, _), (new, _) = make(tmp_path, "fp8"), make(tmp_path, "fp8", 1)
    live, fresh = keep(old, "fp8"), keep(new, "fp8")
    live.send(named_tensors(dict(fresh.model.state_dict().items())))
    same(live.state(), fresh.state())


def metas(tensors: list[tuple[str, str, tuple[int, ...], Any]]) -> list[TensorMeta]:
    return [TensorMeta(name, dtype, shape) for name, dtype, shape, _ in tensors]


REJECTED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (lambda t: t.pop(f"{GATE}_scale_inv"), f"{GATE} comes in float8_e4m3fn without {GATE}_scale_inv"),
    "no values": (lambda t: t.pop(GATE), f"{GATE}_scale_inv comes without {GATE}, whose scales it has"),
    "plain values": (lambda t: t.update({GATE: t[GATE].bfloat16()}), f"{GATE} is bfloat16 .* float8_e4m3fn with"),
    "another block": (
        lambda t: t.update({f"{GATE}_scale_inv": torch.ones(2, 1)}),
        r"_scale_inv has shape \(2, 1\), and .* needs \(1, 1\) for blocks of 128 x 128",
    ),
    "both": (
        lambda t: t.update({FUSED: torch.zeros(4, 256, 32, dtype=torch.bfloat16)}),
        "are the same memory of the model: give one of them",
    ),
    "shape": (
        lambda t: t.update({GATE: t[GATE][:64].clone()}),
        f"{GATE} has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REJECTED)
def test_parts_that_do_not_fit_are_rejected(tmp_path: Path, what: str) -> None:
    quantised, _ = make(tmp_path, "fp8")
    live = keep(quantised, "fp8")
    tensors = stored(quantised)
    change, why = REJECTED[what]
    change(tensors)
    with pytest.raises(WeightsRejected, match=why):
        live.weights.begin_tensors(metas(named_tensors(tensors)))
    assert not live.weights.broken


@pytest.mark.parametrize("first", ["values", "scales"])
def test_what_a_torn_update_left_is_forgotten(tmp_path: Path, first: str) -> None:
    """Parts of a tensor that waits for the other one among them."""
    (old, _), (new, _) = make(tmp_path, "fp8"), make(tmp_path, "fp8", 1)
    live = keep(old, "fp8")
    tensors = [each for each in as_stored(new) if each[0].startswith((Q, GATE))]
    torn = next(
        number for number, each in enumerate(tensors) if each[0] == (Q if first == "values" else f"{Q}_scale_inv")
    )
    live.weights.begin_tensors(metas(tensors))
    live.weights.write_tensor(torn, 0, memoryview(tensors[torn][3])[::1])
    with pytest.raises(WeightsBroken):
        live.weights.end_tensors()
    other = [each for each in as_stored(old) if each[0].startswith((Q, GATE))]
    live.send(other if first == "scales" else other[::-1])
    same(live.state(), keep(old, "fp8").state())
    assert not live.weights.broken


def test_a_delta_of_plain_tensors_is_quantised(tmp_path: Path) -> None:
    """Both its ids are those of what the recipe makes of the trainer's weights."""
    quantised, _ = make(tmp_path, "fp8")
    live, trainer = keep(quantised, "fp8"), Live(make_trained(tmp_path, "fp8")).model
    live.send(named_tensors(trainer))
    base = weights_fingerprint(trainer, dtype="bfloat16", stored="fp8").weights_id
    trainer.state_dict()[FUSED].mul_(0.7)
    result = weights_fingerprint(trainer, dtype="bfloat16", stored="fp8").weights_id
    write_delta(tmp_path / "delta", {FUSED: trainer.state_dict()[FUSED]}, base=base, result=result)
    assert live.weights.load_folder(str(tmp_path / "delta")) == result
    assert live.now() == live.addresses
