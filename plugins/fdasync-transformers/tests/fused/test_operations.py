"""Fused operations: what is compared, what keeps the library's code, and what a replaced forward does: `fused/`."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from fdasync_transformers.fused.dense import Gates
from fdasync_transformers.fused.modules import signature_of, steps_apart, twin_of
from fdasync_transformers.fused.norms import Norms
from fdasync_transformers.fused.operations import fuse_operations
from fdasync_transformers.fused.replacement import replace
from fdasync_transformers.fused.rotary import Rotary
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from torch.nn import functional

from fdasync.errors import RunnerError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = make_tiny_model(family, **overrides).to(DEVICE, dtype)
    # what the experts compute is not looked at, and the other ways have limits on a device
    model.set_experts_implementation("eager")
    return model


def ids_of(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(3)).to(DEVICE)


@torch.inference_mode()
def run(model: Any, rows: int = 1, tokens: int = 9) -> torch.Tensor:
    logits: torch.Tensor = model(ids_of(rows, tokens), use_cache=False).logits
    return logits


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", ["qwen3_moe", "beam", "deepseek_v2"])
def test_narrow_dtypes_round_where_the_library_rounds(family):
    model = build(family, torch.bfloat16)
    before = run(model)
    fused = fuse_operations(model)
    assert all(each.names for each in (fused[Norms], fused[Rotary], fused[Gates]))
    # the order of the mean's sum may show once in thousands of values
    assert int((run(model) != before).sum()) <= before.numel() // 4


def test_several_sequences_in_a_batch_and_single_tokens():
    model = build("qwen3_moe")
    before = [run(model, 3, 5), run(model, 1, 1)]
    fuse_operations(model)
    for one, other in zip(before, [run(model, 3, 5), run(model, 1, 1)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
def test_a_decode_with_the_librarys_cache():
    model = build("qwen3_moe")
    ids = ids_of(1, 8)
    before = run(model, 1, 8)
    fuse_operations(model)
    with torch.inference_mode():
        first = model(ids[:, :7], use_cache=True)
        last = model(ids[:, 7:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(last[0, -1], before[0, -1], rtol=1e-4, atol=1e-5)


def test_new_weights_are_used():
    model, other = build("qwen3_moe"), build("qwen3_moe")
    fused = fuse_operations(model)
    run(model)
    for each in (model, other):
        with torch.no_grad():
            each.model.norm.weight.neg_()
            each.model.layers[0].input_layernorm.weight = torch.nn.Parameter(
                torch.full_like(each.model.norm.weight, 0.5), requires_grad=False
            )
            each.model.layers[1].mlp.gate_proj.weight.mul_(2.0)
    assert fused[Norms].names
    torch.testing.assert_close(run(model), run(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["model.norm", "model.layers.0.self_attn.q_norm"])
def test_rows_of_another_dtype_go_the_librarys_way(part):
    model = build("qwen3_moe")
    module = model.get_submodule(part)
    rows = torch.randn((3, module.weight.shape[0]), device=DEVICE).half()
    with torch.inference_mode():
        before = module(rows)
        fuse_operations(model)
        assert torch.equal(module(rows), before)


def test_a_gradient_is_refused():
    model = build("qwen3_moe")
    fuse_operations(model)
    ids = ids_of(1, 4)
    with pytest.raises(RunnerError, match="no gradient"):
        model(ids)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn((1, 4, 32), device=DEVICE)
    tables = torch.ones((1, 4, 16), device=DEVICE)
    model.requires_grad_(requires_grad=False)
    with pytest.raises(RunnerError, match="no gradient"):
        model.model.layers[1].mlp(hidden.clone().requires_grad_())
    for norm in (attention.q_norm, attention.k_norm):
        del norm.forward
    with pytest.raises(RunnerError, match="no gradient"):
        attention(hidden.requires_grad_(), (tables, tables), None)


def test_other_models_of_the_family_keep_the_librarys_function():
    model, other = build("qwen3_moe"), build("qwen3_moe")
    function = type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]
    fuse_operations(model)
    assert type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"] is function
    assert torch.equal(run(other), run(build("qwen3_moe")))
    assert not any("forward" in vars(module) for module in other.modules())


def break_norm(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = type(model.model.norm)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: plain(self, hidden) * 1.01)
    return "norms of Qwen3MoeRMSNorm are the library's own: it computes something else"


def break_epsilon(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = type(model.model.norm)
    plain = kind.forward

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        own, self.variance_epsilon = self.variance_epsilon, 1e-3
        try:
            return plain(self, hidden)
        finally:
            self.variance_epsilon = own

    monkeypatch.setattr(kind, "forward", forward)
    return "norms of Qwen3MoeRMSNorm are the library's own: it computes something else"


def break_gate(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = type(model.model.layers[1].mlp)
    monkeypatch.setattr(
        kind,
        "forward",
        lambda self, x: self.down_proj(functional.silu(self.gate_proj(x)).clamp(max=7) * self.up_proj(x)),
    )
    return "gates of Qwen3MoeMLP are the library's own: it is no product of an activation known here"


def break_gate_input(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = type(model.model.layers[1].mlp)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: plain(self, x * 2))
    return "gates of Qwen3MoeMLP are the library's own: it does more than gate: its linears are handed something else"


def break_rotary(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    known = type(model.model.layers[0].self_attn).forward.__globals__
    plain = known["apply_rotary_pos_emb"]

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        q, k = plain(q, k, cos, sin, unsqueeze_dim)
        return q * 1.001, k

    monkeypatch.setitem(known, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    return "rotary embeddings of Qwen3MoeAttention are the library's own: apply_rotary_pos_emb rotates in no style"


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("breaks", "part"),
    [
        (break_norm, Norms),
        (break_gate_input, Gates),
        (break_rotary, Rotary),
        (break_epsilon, Norms),
        (break_gate, Gates),
    ],
)
def test_a_library_that_computes_otherwise_is_left_as_it_is(breaks, part, monkeypatch):
    model = build("qwen3_moe")
    words = breaks(model, monkeypatch)
    before = run(model)
    fused = fuse_operations(model)
    assert fused[part].names == []
    assert sum(bool(each.names) for each in (fused[Norms], fused[Rotary], fused[Gates])) == 2
    notes = [note for each in fused.values() for note in each.notes]
    assert len(notes) == 1, "one note of a class, not of a layer"
    assert notes[0].startswith(words)
    torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [1, 5])
def test_dense_layers_that_differ_as_a_whole_are_the_librarys(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """The activation is a known one; for rows of one number the library goes another way."""
    model = build("qwen3_moe", num_hidden_layers=2)
    kind = type(model.model.layers[1].mlp)
    plain = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = plain(self, x)
        return found * 1.01 if found.shape[-2] == wrong else found

    monkeypatch.setattr(kind, "forward", forward)
    replaced = replace(Gates(torch.float32, DEVICE), model)
    assert replaced.names == []
    assert replaced.reasons == {"Qwen3MoeMLP": "whole layers differ"}
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_that_returns_another_dtype_is_left_alone(monkeypatch):
    model = build("qwen3_moe")
    kind = type(model.model.norm)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: plain(self, hidden).double())
    # norms alone: no pass of this model works
    replaced = replace(Norms(torch.float32, DEVICE), model)
    assert replaced.names == []
    assert replaced.reasons["Qwen3MoeRMSNorm"].startswith("returns torch.float64")


def test_a_forward_on_the_instance_stays():
    model = build("qwen3_moe")
    for part in (model.model.norm, model.model.layers[1].mlp, model.model.layers[0].self_attn):
        part.forward = MethodType(type(part).forward, part)
    kept = model.model.norm.forward
    fused = fuse_operations(model)
    assert model.model.norm.forward is kept
    assert "model.norm" not in fused[Norms].names
    assert "model.layers.0.self_attn" not in fused[Rotary].names
    reasons = [why for each in fused.values() for why in each.reasons.values()]
    assert reasons == ["it has a forward of its own already"] * 3


def test_dtypes_without_kernels_are_left_alone():
    fused = fuse_operations(build("qwen3_moe", torch.float64))
    assert not any(each.names for each in fused.values())
    assert fused[Norms].notes == ("norms are the library's own: no kernels for torch.float64",)


def test_the_random_state_stays():
    model = build("qwen3_moe")
    state = torch.random.get_rng_state()
    fuse_operations(model)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_steps_apart():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        one = torch.tensor([1.0, -1.0, 0.0, 0.0, float("nan")], dtype=dtype)
        far = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0], dtype=dtype)
        other = torch.nextafter(one, far)
        other[3] = -0.0
        assert steps_apart(one, other).tolist() == [1, 1, 1, 0, 0]
        assert steps_apart(torch.tensor([-1.0], dtype=dtype), torch.tensor([1.0], dtype=dtype)) > 1000


def test_twins_and_signatures():
    model = build("qwen3_moe")
    norm = model.model.norm
    assert signature_of(norm) == signature_of(model.model.layers[0].input_layernorm)
    assert signature_of(norm) != signature_of(model.model.layers[0].self_attn.q_norm)
    twin = twin_of(norm, {"weight": torch.nn.Parameter(torch.zeros(3))})
    assert twin.variance_epsilon == norm.variance_epsilon
    assert norm.weight.numel() == 32
    twin.variance_epsilon = 5.0
    assert signature_of(twin) != signature_of(norm)
    assert norm.variance_epsilon != 5.0
