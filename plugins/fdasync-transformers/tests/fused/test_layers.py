"""Fused decoder layers against the library's own: `fused/layers/fuse.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import DEVICE, ON_GPU, answers, assert_same
from fdasync_kernels.layer import finish, qkv
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.fused.layers import proof as layer_proof
from fdasync_transformers.fused.layers.fuse import Layers
from fdasync_transformers.fused.operations import fuse_operations
from fdasync_transformers.fused.replacement import Replaced, replace
from fdasync_transformers.start import open_model
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from parts_of_experts import use_parts
from step_driver import Driver
from structures import by_structure
from torch.utils._python_dispatch import TorchDispatchMode
from written import write_tiny_checkpoint

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_transformers.fused.layers.layer import FusedLayer

PLACE = torch.device("cuda" if ON_GPU else "cpu")
# norms of heads or of all of them, clipped or with biases, gates of shared experts, a part rotated, sinks
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "gpt_oss"]
# Triton's interpreter takes seconds for each
# whole engines: `start/test_fuse.py` plays one in `make test`
SOME = [pytest.param(one, marks=pytest.mark.nightly) for one in FAMILIES]


def fuse_layers(model: Any, **how: Any) -> Replaced:
    return replace(Layers(model, **how), model)


def build(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = make_tiny_model(family, **overrides).to(PLACE, dtype)
    use_parts(model)
    return model


@torch.inference_mode()
def run(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(3)).to(PLACE)
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> list[Replaced]:
    """Runners with kernels fuse the layers of their models; gets what was fused."""
    found: list[Replaced] = []
    make = open_model.make_step_model

    def fuse_first(config: Any, limits: Any, live: Any, collectives: Any, state: Any, model: Any, layout: Any) -> Any:
        if config.kernels == "triton":
            use_parts(model)
            found.append(fuse_layers(model))
        return make(config, limits, live, collectives, state, model, layout)

    monkeypatch.setattr(open_model, "make_step_model", fuse_first)
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(torch.float16, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("family", by_structure(FAMILIES, also=("olmoe", "qwen2_moe")))
def test_every_layer_is_proven(family: str, dtype: torch.dtype) -> None:
    # two layers: with and without one behind it, dense and of experts
    model = build(family, dtype, **_two_layers(family))
    before = run(model)
    fused = fuse_layers(model)
    assert fused.notes == ()
    assert fused.names == ["1", "0"]
    # a pass without paging is the library's own
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("family", SOME)
async def test_a_fused_model_answers_as_the_path_of_cpus(tmp_path: Path, family: str, fusing: list[Replaced]) -> None:
    """Tokens and rows: decodes, chunks, late arrivals."""
    write_tiny_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE), wanted)
    assert [sorted(one.names) for one in fusing] == [[*"0123"]]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
async def test_padding_and_chunks_as_decodes(tmp_path: Path, family: str, fusing: list[Replaced]) -> None:
    write_tiny_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE, tiled_tokens=(6, 16)), wanted)
    assert_same(await answers(tmp_path, DEVICE, flat_tokens=16), wanted)
    assert [sorted(one.names) for one in fusing] == [[*"0123"]] * 2


@pytest.mark.nightly
async def test_rows_of_layers_are_the_same(tmp_path: Path, fusing: list[Replaced]) -> None:
    write_tiny_checkpoint(tmp_path, "glm4_moe")
    aux = {"aux": ("layer_norms", "routing_weights"), "self_check": False}
    seen = []
    for config in ({"device": "cpu", **aux}, {**DEVICE, **aux}):
        driver = await Driver.open(tmp_path, config=config)
        try:
            one = driver.sequence([1, 9, 4, 7, 3], 3)
            await driver.run([one])
            seen.append({name: driver.rows(one, name) for name in ("routing", "layer_norms", "routing_weights")})
        finally:
            await driver.close()
    assert sorted(fusing[0].names) == [*"0123"]
    # the library leaves the order of the slots open in this family
    order = [one["routing"].argsort(-1) for one in seen]
    for name in ("routing", "routing_weights"):
        ours, library = (np.take_along_axis(one[name], at, -1) for one, at in zip(seen, order, strict=True))
        assert abs(ours.astype("float64") - library).max() < 2e-3
    assert abs(seen[0]["layer_norms"].astype("float64") - seen[1]["layer_norms"]).max() < 2e-3


@pytest.mark.nightly
async def test_hidden_states_that_are_changed_between_layers(tmp_path: Path, fusing: list[Replaced]) -> None:
    """A hook hands on another tensor: its norm is computed, and not the one that was handed on."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    tokens = []
    for config in ({"device": "cpu"}, DEVICE):
        driver = await Driver.open(tmp_path, config={**config, "self_check": False})
        try:
            layers = driver.runner.opened.model.step_model.model.model.layers
            layers[1].register_forward_hook(lambda _module, _args, out: out * -1.5)
            layers[3].register_forward_hook(lambda _module, _args, out: out + 0.5)
            one = driver.sequence([1, 9, 4, 7, 3], 3)
            await driver.run([one])
            tokens.append(one.tokens)
        finally:
            await driver.close()
    assert sorted(fusing[0].names) == [*"0123"]
    assert tokens[0] == tokens[1]


class _Launches(TorchDispatchMode):
    """Names of the operations that are a kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.name().removeprefix("aten::"))
        return found


@pytest.mark.ci
def test_launches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products and three kernels beside attention, router and experts."""
    model = build("qwen3_moe", **_two_layers("qwen3_moe"))
    fuse_layers(model)
    layer: Any = model.model.layers[0]
    one: FusedLayer = layer.forward
    form = one.attention.form
    hidden = layer_proof.hidden_of(model, 3)
    # what these compute is counted with the experts' own kernels
    ids = torch.zeros((3, 3), dtype=torch.int64, device=PLACE)
    parts, out = torch.zeros((3, 3, 32), device=PLACE), torch.zeros((3, 4, form.head_dim), device=PLACE)
    layer.mlp.gate.forward = lambda _: (None, None, ids)
    layer.mlp.experts.forward = lambda *_args, **_parts: parts
    monkeypatch.setattr(layer_proof._Catch, "attend", lambda *_: out)
    monkeypatch.setattr(layer_proof, "_ROWS", 3)
    context = layer_proof._context(one, hidden, torch.arange(3, device=PLACE)[None], pooled=True)
    turns = model.model.rotary_emb(hidden, position_ids=torch.arange(3, device=PLACE)[None])
    launched: list[str] = []
    for module, name in ((finish, "_finish"), (qkv, "_prepare")):
        monkeypatch.setattr(module, name, _Counted(name, launched))
    one.carry.give(hidden[0], one._norm_rows(hidden[0], one.norms[0]))
    whole = one.carry._held[0]  # type: ignore[index]
    launched.clear()
    with torch.inference_mode(), _Launches() as operations:
        layer(whole, position_embeddings=turns, fd_ctx=context)
    assert launched == ["_prepare", "_finish", "_finish"]
    # in inference mode a product is not taken apart
    assert operations.names == ["linear", "linear"]


class _Seen(FixedNumerics):  # type: ignore[no-untyped-call]
    """Fixed numerics; notes the names of the operations that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def _other_forward(module: Any) -> None:
    module.forward = lambda rows: torch.nn.functional.linear(rows, module.weight, module.bias) * 2


# what makes an output projection more than a product
MORE: dict[str, Any] = {
    "a hook": lambda module: module.register_forward_hook(lambda _module, _args, out: out * 2),
    "a hook before it": lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a forward": _other_forward,
    "a class": lambda module: setattr(module, "__class__", _Doubled),
}


@pytest.mark.ci
@pytest.mark.parametrize("biased", [False, True])
def test_fixed_products_of_a_layer_run_past_the_modes(biased: bool) -> None:
    model = build("qwen3_moe", torch.bfloat16, num_hidden_layers=1, attention_bias=biased)
    assert fuse_layers(model).names == ["0"]
    layer: Any = model.model.layers[0]
    context = layer_proof._context(layer.forward, layer_proof.hidden_of(model, 1), _positions(1), pooled=True)
    block = _Block()
    layer.forward.block = block

    def played() -> tuple[torch.Tensor, list[str]]:
        hidden = layer_proof.hidden_of(model, layer_proof._ROWS)
        turns = model.model.rotary_emb(hidden, position_ids=_positions(layer_proof._ROWS))
        with torch.inference_mode(), _Seen() as seen:
            layer(hidden, position_embeddings=turns, fd_ctx=context)
        return block.given, seen.names

    plain, names = played()
    assert not {"linear", "mm", "addmm"} & set(names)
    # by the module, the same bits
    hook = layer.self_attn.o_proj.register_forward_hook(lambda _module, _args, out: out)
    called, names = played()
    assert {"linear", "mm", "addmm"} & set(names)
    assert torch.equal(called, plain)
    hook.remove()
    for what in MORE.values():
        again = build("qwen3_moe", torch.bfloat16, num_hidden_layers=1, attention_bias=biased)
        layer.self_attn.o_proj = again.model.layers[0].self_attn.o_proj
        what(layer.self_attn.o_proj)
        assert not torch.equal(played()[0], plain), what


class _Block:
    """In the place of a layer's second block: keeps the normed input that the layer gives it."""

    given: torch.Tensor

    def __call__(self, normed: torch.Tensor, stream: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        self.given = normed
        return stream, None


def _positions(count: int) -> torch.Tensor:
    return torch.arange(count, device=PLACE)[None]


class _Counted:
    """In the place of a kernel: notes that it is launched."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_args, **_kwargs: self._seen.append(self._name)


def _doubled(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2


def _other_eps(module: Any) -> None:
    own, eps = module.forward, module.variance_epsilon

    def forward(x: torch.Tensor) -> torch.Tensor:
        module.variance_epsilon = 0.1
        found: torch.Tensor = own(x)
        module.variance_epsilon = eps
        return found

    module.forward = forward


def _rounds_once(module: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return (module.weight.float() * wide).to(x.dtype)

    module.forward = forward


CHANGES: dict[str, Any] = {
    "its second block differs": lambda layer: _doubled(layer.mlp),
    "it returns other hidden states": _doubled,
    "its norms differ": lambda layer: _other_eps(layer.post_attention_layernorm),
    "its queries differ": lambda layer: _rounds_once(layer.self_attn.q_norm),
    "its keys differ": lambda layer: _other_eps(layer.self_attn.k_norm),
    "its merged product differs": lambda layer: _doubled(layer.self_attn.k_proj),
    "either its queries or its keys have a norm": lambda layer: delattr(layer.self_attn, "k_norm"),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "why", [pytest.param(one, marks=() if number < 2 else pytest.mark.nightly) for number, one in enumerate(CHANGES)]
)
def test_a_layer_that_differs_keeps_the_librarys_code(why: str) -> None:
    model = build("qwen3_moe", torch.bfloat16, num_hidden_layers=2, mlp_only_layers=[0])
    layer: Any = model.model.layers[1]
    CHANGES[why](layer)
    own = layer.__dict__.get("forward")
    fused = fuse_layers(model)
    assert fused.names == ["0"]
    assert fused.notes == (f"decoder layers 1 are the library's own: {why}",)
    assert layer.__dict__.get("forward") is own
    # the layer before it hands on no norm for it
    assert model.model.layers[0].forward.norms[2] is None


def test_a_norm_that_differs_behind_the_last_layer() -> None:
    model = build("mixtral", num_hidden_layers=1)
    _other_eps(model.model.norm)
    assert fuse_layers(model).notes == ("decoder layers 0 are the library's own: the norm that it hands on differs",)


def test_a_gradient_is_refused_where_kernels_would_run() -> None:
    model = build("mixtral", num_hidden_layers=1)
    assert fuse_layers(model).names == ["0"]
    layer = model.model.layers[0]
    hidden = torch.zeros((1, 3, 32), device=PLACE)
    context = layer_proof._context(layer.forward, hidden, torch.arange(3, device=PLACE)[None], pooled=True)
    model.requires_grad_(requires_grad=False)
    layer.input_layernorm.weight.requires_grad_()
    with pytest.raises(RunnerError, match="train a model of its own"):
        layer(hidden, fd_ctx=context)


def test_a_family_that_is_not_known_is_left_alone() -> None:
    model = make_tiny_model("phimoe")
    other = fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert other.names == []
    assert other.notes == ("decoder layers are the library's own: PhimoeDecoderLayer is of no known kind",)


def _two_layers(family: str) -> dict[str, Any]:
    found: dict[str, Any] = {"num_hidden_layers": 2}
    if family in ("gpt_oss", "qwen2_moe"):
        found["layer_types"] = ["sliding_attention", "full_attention"]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe"])
def test_with_fixed_numerics_layers_have_the_bits_of_their_operations(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_proof, "_EXACT_TRIALS", 1)
    model = build(family, torch.bfloat16, **_two_layers(family))
    assert fuse_layers(model, exact=FixedNumerics).names == []  # norms of the library
    fuse_operations(model)
    fused = fuse_layers(model, exact=FixedNumerics)
    if family == "olmoe":
        assert "norms over all heads" in fused.notes[0]
    else:
        assert fused.names == ["1", "0"]


@pytest.mark.nightly
def test_a_last_bit_keeps_a_layer_unfused_with_fixed_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral", torch.bfloat16, **_two_layers("mixtral"))
    fuse_operations(model)
    own = finish.add_norm

    def moved(block: Any, residual: Any, norm: Any, **more: Any) -> Any:
        stream, normed = own(block, residual, norm, **more)
        if normed is not None:
            normed.view(torch.int16)[3, 5] += 1
        return stream, normed

    monkeypatch.setattr(finish, "add_norm", moved)
    assert fuse_layers(model).names == ["1", "0"]
    notes = fuse_layers(build_again(model), exact=FixedNumerics).notes
    assert "other bits than its modules" in notes[0]


def build_again(model: Any) -> Any:
    """The model with its layers' own forwards."""
    for layer in model.model.layers:
        vars(layer).pop("forward", None)
    return model
