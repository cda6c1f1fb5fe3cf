"""Fused experts against the library's own: `fused/experts.py`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from fdasync_kernels.experts import chain
from fdasync_kernels.experts.activation import Activation
from fdasync_transformers.fused.experts import fuse_experts
from fdasync_transformers.fused.experts_interface import NAME, Description, fused_experts
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.tiny.checkpoints import make_tiny_model

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_transformers.model.moe_layers import MoELayers

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OAI = Activation("silu", "swiglu_oai", 1.702, 7.0)

# two layers of experts each
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
    },
    "aria_text": {},
    "beam": {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 2},
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention"] * 2, "mlp_layer_types": ["moe"] * 2},
    "nemotron_h": {"num_hidden_layers": None, "layers_block_type": ["attention", "moe", "moe"]},
}

# the activation and what else the module says of itself; in float32 the wide form is the plain one, which comes first
FOUND: dict[str, tuple[Activation, set[str]]] = {
    "qwen3_moe": (Activation("silu"), {"gated"}),
    "gpt_oss": (OAI, {"gated", "biased", "transposed", "interleaved"}),
    "minimax_m3_vl_text": (OAI, {"gated"}),
    "gemma4_text": (Activation("gelu_tanh"), {"gated"}),
    "aria_text": (Activation("silu"), {"gated", "transposed"}),
    "beam": (Activation("silu"), {"gated"}),
    "deepseek_v4": (Activation("silu", "clamped", limit=10.0), {"gated"}),
    "nemotron_h": (Activation("relu2"), set()),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, MoELayers, list[Any]]:
    overrides = {"num_hidden_layers": 2, **SHAPES.get(family, {})}
    model = make_tiny_model(family, **{key: value for key, value in overrides.items() if value is not None})
    model = model.to(PLACE, dtype)
    layers = find_moe_layers(model)
    assert layers is not None
    return model, layers, [model.get_submodule(name) for name in layers.names]


class Fused(NamedTuple):
    """A fused model.

    Attributes:
        model: of two layers.
        module: the experts of the second one.
        live: which rows are padding.
    """

    model: Any
    module: Any
    live: LiveRows


@pytest.fixture(scope="module")
def fused() -> Fused:
    """One for all tests of this file: the interpreter takes seconds to prove it. A test gives it back as it was."""
    model, layers, modules = build("qwen3_moe")
    live = LiveRows()
    assert fuse_experts(model, layers, live).names
    return Fused(model, modules[1], live)


def rows_of(module: Any, count: int, k: int = 3, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of a size, ids and weights, other ones than those of the proof."""
    make = torch.Generator().manual_seed(77 + count)
    down: torch.Tensor = module.down_proj
    width = down.shape[2] if module.is_transposed else down.shape[1]
    hidden = torch.randn((count, width), generator=make) * size
    ids = torch.rand((count, len(down)), generator=make).topk(k, dim=-1).indices
    weights = torch.rand((count, k), generator=make)
    return hidden.to(PLACE, down.dtype), ids.to(PLACE), weights.to(PLACE, down.dtype)


@contextmanager
def implementation(module: Any, name: str) -> Iterator[None]:
    before, module.config._experts_implementation = module.config._experts_implementation, name
    yield
    module.config._experts_implementation = before


@torch.inference_mode()
def both(module: Any, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a fused module, and of the library's plain loop on the same rows."""
    assert module.config._experts_implementation == NAME
    ours = module(*rows)
    with implementation(module, "eager"):
        wanted = module(*rows)
    return ours, wanted


def assert_close(ours: torch.Tensor, wanted: torch.Tensor, room: float = 1e-5) -> None:
    assert ours.dtype == wanted.dtype
    assert ours.shape == wanted.shape
    assert float((ours - wanted).abs().max()) <= room * float(wanted.abs().max())


@pytest.mark.ci
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "gpt_oss" else pytest.mark.nightly) for one in FOUND]
)
def test_every_layer_is_fused(family: str) -> None:
    model, layers, modules = build(family)
    live = LiveRows()
    state = torch.random.get_rng_state()
    result = fuse_experts(model, layers, live)
    assert (result.names, result.notes) == (list(layers.names), ())
    assert model.config._experts_implementation == NAME
    assert torch.equal(torch.random.get_rng_state(), state)
    activation, flags = FOUND[family]
    named = {name: name in flags for name in ("gated", "biased", "transposed", "interleaved")}
    assert len(modules) == 2
    for module in modules:
        assert module.fd_experts == Description(activation, live=live, **named)
        assert module.fd_experts.live is live
    # rows so large that gates and ups are beyond the limits of those that have any
    assert_close(*both(modules[0], *rows_of(modules[0], 5, size=9.0)))
    assert_close(*both(modules[1], *rows_of(modules[1], 21)))


@pytest.mark.ci
def test_a_form_that_rounds_once_is_told_apart_in_bfloat16() -> None:
    model, layers, modules = build("beam", torch.bfloat16)
    assert fuse_experts(model, layers, LiveRows()).names
    assert [module.fd_experts.activation for module in modules] == [Activation("silu", "wide")] * 2
    assert_close(*both(modules[0], *rows_of(modules[0], 7)), room=0.02)


@pytest.mark.ci
def test_whole_passes_are_the_librarys(fused: Fused) -> None:
    tokens = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(3)).to(PLACE)
    with torch.inference_mode():
        ours = fused.model(tokens, use_cache=False).logits
        with implementation(fused.module, "eager"):
            wanted = fused.model(tokens, use_cache=False).logits
    assert_close(ours, wanted, room=1e-4)


def refused(model: Any, layers: MoELayers, modules: list[Any]) -> str:
    """The note of a model that is not fused, and that is left as it was."""
    before = model.config._experts_implementation
    assert before != NAME
    live = LiveRows(torch.zeros(3, dtype=torch.int64))
    slots = live.slots
    result = fuse_experts(model, layers, live)
    assert not result.names
    assert model.config._experts_implementation == before
    assert {module.config._experts_implementation for module in modules if hasattr(module, "config")} <= {before}
    assert not [module for module in modules if hasattr(module, "fd_experts")]
    assert live.slots is slots
    (note,) = result.notes
    start = "experts are the library's own: "
    assert note.startswith(start)
    return note.removeprefix(start)


@pytest.mark.parametrize(("family", "layer"), [("dbrx", "0 (DbrxExperts)"), ("llama4_text", "1 (Llama4TextExperts)")])
def test_experts_without_the_librarys_interface_are_refused(family: str, layer: str) -> None:
    model = make_tiny_model(family).to(PLACE)
    layers = find_moe_layers(model)
    assert layers is not None
    modules = [model.get_submodule(name) for name in layers.names]
    assert refused(model, layers, modules) == f"layer {layer} does not take the library's experts interface"


def _scaled(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args: own(*args) * 1.001


def _with(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value)


def _gate(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    return _with("_apply_gate", lambda rows: function(*rows.chunk(2, dim=-1)))


silu = torch.nn.functional.silu
UNKNOWN = "has an activation that the kernels do not know"
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "norm": (_with("has_post_expert_norm", True), "has a norm behind each expert"),
    "spread": (_with("_is_expert_parallel", True), "is spread over devices"),
    "shape": (_with("gate_up_proj", torch.nn.Parameter(torch.zeros(4, 4))), "has no experts' weights in three dim"),
    "dtype": (
        _with("gate_up_proj", torch.nn.Parameter(torch.zeros(1, 2, 2).double())), "has no experts' weights in three",
    ),
    "many": (_with("gate_up_proj", torch.nn.Parameter(torch.zeros(1025, 2, 2))), "has 1025 experts, more than the"),
    "function": (_with("act_fn", torch.nn.Tanh()), UNKNOWN),
    "swapped halves": (_gate(lambda gate, up: gate * silu(up)), UNKNOWN),
    "a little more": (_gate(lambda gate, up: silu(gate) * up * 1.0005), UNKNOWN),
    "limit of no name": (_gate(lambda gate, up: silu(gate.clamp(max=20.0)) * up), UNKNOWN),
    "width": (_gate(lambda gate, up: torch.cat([silu(gate) * up, up], -1)), UNKNOWN),
    "dtype of the result": (_gate(lambda gate, up: (silu(gate) * up).double()), UNKNOWN),
    "result": (_scaled, "gives other results (1.0e-03 of their size, at 3 rows)"),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=() if one in ("function", "norm") else pytest.mark.nightly) for one in CHANGES]
)
def test_one_layer_that_differs_leaves_all_to_the_library(what: str) -> None:
    model, layers, modules = build("qwen3_moe")
    change, why = CHANGES[what]
    change(modules[1])
    assert refused(model, layers, modules).startswith(f"layer 1 (Qwen3MoeExperts) {why}")


@pytest.mark.ci
def test_tiles_of_a_regime_that_differ_leave_the_librarys_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first comparisons run is right."""
    model = make_tiny_model("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[]).to(PLACE, torch.bfloat16)
    layers = find_moe_layers(model)
    assert layers is not None
    honest = chain.experts

    def experts(*args: Any, tiles: Any = None, **kwargs: Any) -> torch.Tensor:
        found = honest(*args, tiles=tiles, **kwargs)
        return found if tiles is None else found * 1.1

    monkeypatch.setattr(chain, "experts", experts)
    before = model.config._experts_implementation
    result = fuse_experts(model, layers, LiveRows())
    assert not result.names
    assert model.config._experts_implementation == before
    (note,) = result.notes
    assert "of their size, with Tiles(rows=" in note


@pytest.mark.ci
def test_a_model_that_was_refused_can_be_fused_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layers, modules = build("qwen3_moe")
    with monkeypatch.context() as patch:
        patch.setattr(modules[1], "has_post_expert_norm", True)
        refused(model, layers, modules)
    assert fuse_experts(model, layers, LiveRows()).names
    assert_close(*both(modules[1], *rows_of(modules[1], 4)))


@pytest.mark.ci
@torch.inference_mode()
def test_rows_of_padding_are_zeros(fused: Fused) -> None:
    module, live = fused.module, fused.live
    for count in (6, 40):
        rows = rows_of(module, count)
        whole = module(*rows)
        slots = torch.arange(count, device=PLACE)
        slots[1::3] = -1
        live.slots = slots
        found = module(*rows)
        live.slots = None
        padding = slots < 0
        assert not found[padding].any()
        assert whole[padding].any(dim=-1).all()
        assert_close(found[~padding], whole[~padding])


@pytest.mark.heavy("Triton's interpreter works out a product in parts")
@torch.inference_mode()
def test_parts_sum_to_the_result(fused: Fused) -> None:
    rows = rows_of(fused.module, 6)
    parts = fused.module(*rows, parts=True)
    assert parts.shape == (*rows[1].shape, rows[0].shape[1])
    assert_close(parts.sum(1), fused.module(*rows))


@torch.inference_mode()
def test_strided_ids_and_weights(fused: Fused) -> None:
    """As `topk` of a transposed tensor, or a slice of more slots, gives them."""
    module = fused.module
    hidden, ids, weights = rows_of(module, 6)
    wanted = module(hidden, ids, weights)
    assert torch.equal(module(hidden, ids.t().contiguous().t(), weights.t().contiguous().t()), wanted)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj", "hidden", "weights"])
def test_a_gradient_of_any_part_is_refused(fused: Fused, part: str) -> None:
    module = fused.module
    hidden, ids, weights = rows_of(module, 4)
    with torch.no_grad():
        wanted = module(hidden, ids, weights)
    module.requires_grad_(False)
    assert torch.equal(module(hidden, ids, weights), wanted)
    {"hidden": hidden, "weights": weights, **dict(module.named_parameters())}[part].requires_grad_()
    try:
        with pytest.raises(RunnerError, match="train a model of its own"):
            module(hidden, ids, weights)
    finally:
        module.requires_grad_(True)


def test_a_module_that_was_never_described_is_refused() -> None:
    _, _, modules = build("qwen3_moe")
    with torch.no_grad(), pytest.raises(RunnerError, match="Qwen3MoeExperts was never described"):
        fused_experts(modules[0], *rows_of(modules[0], 2))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_new_weights_in_place_are_used(fused: Fused, name: str) -> None:
    module = fused.module
    rows = rows_of(module, 5)
    before, _ = both(module, *rows)
    weight: torch.Tensor = getattr(module, name)
    old = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.2)
        after, wanted = both(module, *rows)
        weight.copy_(old)
    assert_close(after, wanted)
    assert float((after - before).norm()) > 0.1 * float(before.norm())
