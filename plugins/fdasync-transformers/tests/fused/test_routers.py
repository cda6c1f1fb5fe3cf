"""Fused routers in whole models: what they return, record, follow and give back: `fused/routers.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_transformers.fused.routers import fuse_routers
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from structures import by_structure

from fdasync.cache.debug_rows import debug_rows
from fdasync.errors import BadInput, InvariantBroken, RunnerError
from fdasync.gpu.capture import CaptureBuffer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS = 11


def build(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Any, Any, CaptureBuffer]:
    model = make_tiny_model(family, **overrides).to(DEVICE, dtype)
    # what the experts compute is not looked at, and the other ways have limits on a device
    model.set_experts_implementation("eager")
    layers = find_moe_layers(model)
    assert layers is not None
    return model, layers, CaptureBuffer(32, layers.spec, DEVICE)


def watched(model: Any, layers: Any) -> dict[int, list[Any]]:
    """What each layer's router returned, and the ids that its experts were given."""
    seen: dict[int, list[Any]] = {}
    for row, name in enumerate(layers.names):
        block = model.get_submodule(name.rpartition(".")[0])

        def after(_: Any, _args: Any, out: Any, row: int = row) -> None:
            seen[row] = [*out]

        def before(_: Any, args: Any, row: int = row) -> None:
            seen[row].append(args[1])

        block.gate.register_forward_hook(after)
        block.experts.register_forward_pre_hook(before)
    return seen


@torch.inference_mode()
def run(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 50, (1, TOKENS), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    logits: torch.Tensor = model(ids).logits
    return logits


FUSED = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", by_structure(FUSED))
def test_a_fused_model_answers_as_before_and_records(family, dtype):
    model, layers, capture = build(family, dtype)
    seen = watched(model, layers)
    before = run(model)
    library = {row: list(outputs) for row, outputs in seen.items()}
    fused = fuse_routers(model, layers)
    fused.attach(capture)
    assert fused.rows == tuple(range(len(layers.ids)))
    assert fused.notes == ()
    capture.begin()
    after = run(model)
    capture.expect()
    rows = capture.stage(TOKENS)
    for row, (logits, weights, ids, given) in seen.items():
        for mine, theirs in zip((logits, weights, ids), library[row], strict=False):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert given is ids, "experts were given another tensor of ids"
        assert torch.equal(rows[:, row, : layers.top_k[row]].long(), ids), "other ids were recorded"
    # float32: the same experts with weights that differ in the last place
    if dtype is torch.float32:
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(seen[row][2], library[row][2]) for row in seen)


def test_weights_are_renormalised_as_the_config_says():
    sums = {}
    for norm in (True, False):
        model, layers, _ = build("qwen2_moe", norm_topk_prob=norm)
        seen = watched(model, layers)
        assert fuse_routers(model, layers).rows
        run(model)
        sums[norm] = seen[0][1].sum(-1)
    assert torch.allclose(sums[True], torch.ones_like(sums[True]))
    assert bool((sums[False] < 0.999).any())


def test_new_weights_in_the_module_are_used():
    model, layers, _ = build("qwen3_moe")
    seen = watched(model, layers)
    fuse_routers(model, layers)
    run(model)
    first = seen[0][0]
    gate = model.get_submodule(layers.names[0].rpartition(".")[0]).gate
    with torch.no_grad():
        gate.weight.neg_()
    run(model)
    torch.testing.assert_close(seen[0][0], -first)


@pytest.mark.parametrize("family", ["dbrx", "llama4_text"])
def test_routers_of_other_kinds_are_left_alone(family):
    model, layers, capture = build(family)
    before = run(model)
    fused = fuse_routers(model, layers)
    fused.attach(capture)
    assert fused.rows == ()
    assert len(fused.notes) == 1
    listed = ", ".join(map(str, layers.ids))
    assert f"routers of layers {listed} are the library's own: " in fused.notes[0]
    assert torch.equal(run(model), before)


def test_selection_biases_are_as_before_and_later_ones_count():
    model, layers, _ = build("glm4_moe")
    gate = model.get_submodule(layers.names[0].rpartition(".")[0]).gate
    before = gate.e_score_correction_bias.clone()
    assert fuse_routers(model, layers).rows
    assert torch.equal(gate.e_score_correction_bias, before)
    seen = watched(model, layers)
    with torch.no_grad():
        gate.e_score_correction_bias.zero_()
        gate.e_score_correction_bias[5] = 100.0
    run(model)
    assert (seen[0][2] == 5).any(-1).all()


def test_one_layer_that_differs_keeps_its_router_alone():
    model, layers, capture = build("glm4_moe")
    gate = model.get_submodule(layers.names[1].rpartition(".")[0]).gate
    break_scores(gate)
    theirs = gate.forward
    fused = fuse_routers(model, layers)
    fused.attach(capture)
    assert fused.rows == (0, 2)
    assert fused.notes == (
        f"routers of layers {layers.ids[1]} are the library's own: Glm4MoeTopkRouter gives its experts other weights",
    )
    assert gate.forward is theirs


def break_scores(module: Any) -> None:
    """The library's forward, changed in the way that another release might change it."""
    plain = type(module).forward
    module.forward = lambda hidden: (lambda out: (out[0], out[1] * 1.01, out[2]))(plain(module, hidden))


def break_choice(module: Any) -> None:
    plain = type(module).forward
    module.forward = lambda hidden: (lambda out: (out[0], out[1], (out[2] + 1) % len(module.weight)))(
        plain(module, hidden)
    )


def break_logits(module: Any) -> None:
    plain = type(module).forward
    module.forward = lambda hidden: plain(module, hidden * 2)


def break_shape(module: Any) -> None:
    plain = type(module).forward
    module.forward = lambda hidden: plain(module, hidden)[:2]


def break_dtype(module: Any) -> None:
    plain = type(module).forward
    module.forward = lambda hidden: (lambda out: (out[0], out[1], out[2].int()))(plain(module, hidden))


def break_product(module: Any) -> None:
    plain = type(module).forward

    def forward(hidden: torch.Tensor) -> Any:
        weight, module.weight = module.weight, torch.nn.Parameter(module.weight * 1.001)
        try:
            return plain(module, hidden)
        finally:
            module.weight = weight

    module.forward = forward


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (break_scores, "gives its experts other weights"),
        (break_choice, "chooses other experts"),
        (break_logits, "multiplies something else"),
        (break_product, "multiplies something else"),
        (break_shape, "returns something else"),
        (break_dtype, "returns ids torch.int32"),
    ],
)
def test_a_library_that_routes_otherwise_is_left_as_it_is(breaks, words):
    model, layers, capture = build("qwen3_moe")
    gate = model.get_submodule(layers.names[-1].rpartition(".")[0]).gate
    breaks(gate)
    theirs = gate.forward
    fused = fuse_routers(model, layers)
    fused.attach(capture)
    assert fused.rows == tuple(range(len(layers.ids) - 1))
    assert len(fused.notes) == 1
    assert words in fused.notes[0]
    assert gate.forward is theirs


def test_ties_do_not_stop_it():
    model, layers, _ = build("qwen3_moe")
    with torch.no_grad():
        for name in layers.names:
            gate = model.get_submodule(name.rpartition(".")[0]).gate
            gate.weight[1:5] = gate.weight[0]
    assert fuse_routers(model, layers).rows == tuple(range(len(layers.ids)))


@pytest.mark.parametrize("part", ["weight", "bias", "hidden"])
def test_a_gradient_of_any_part_is_refused(part):
    model, layers, _ = build("gpt_oss")
    router = model.get_submodule(layers.names[0].rpartition(".")[0]).router
    assert fuse_routers(model, layers).rows
    model.requires_grad_(requires_grad=False)
    hidden = torch.randn((4, router.weight.shape[1]), device=DEVICE)
    router(hidden)
    (hidden if part == "hidden" else getattr(router, part)).requires_grad_()
    with pytest.raises(RunnerError, match="train a model of its own"):
        router(hidden)


def test_a_missing_layer_and_a_gradient_are_seen():
    model, layers, capture = build("qwen3_moe")
    fuse_routers(model, layers).attach(capture)
    capture.begin()
    run(model)
    with pytest.raises(RunnerError, match="captured twice"):
        run(model)
    capture.begin()
    with pytest.raises(RunnerError, match="no gradient"):
        model(torch.zeros((1, 3), dtype=torch.int64, device=DEVICE))


def test_one_capture_at_a_time_and_none_after_it():
    model, layers, capture = build("qwen3_moe")
    fused = fuse_routers(model, layers)
    # nothing is attached: passes need no `begin`
    for _ in range(2):
        run(model)
    fused.attach(capture)
    other = CaptureBuffer(32, layers.spec, DEVICE)
    with pytest.raises(InvariantBroken, match="one capture at a time"):
        fused.attach(other)
    fused.detach()
    fused.detach()
    fused.attach(other)
    other.begin()
    run(model)
    other.expect()
    assert capture.filled == 0


def test_debug_records_positions():
    model, layers, _ = build("mixtral")
    capture = CaptureBuffer(32, layers.spec, DEVICE, debug=True)
    positions = torch.arange(300, 300 + TOKENS, device=DEVICE)
    fused = fuse_routers(model, layers)
    with pytest.raises(BadInput):
        fused.attach(capture)
    fused.attach(capture, lambda: positions)
    assert fused.rows
    capture.begin()
    run(model)
    capture.expect()
    rows = capture.stage(TOKENS).cpu().numpy()
    assert (rows == debug_rows(range(300, 300 + TOKENS), layers.spec)).all()
