"""Sums in slices by kernels: one process, two ranks and a trainer have the same bits.

In Triton's interpreter products are made to walk in order, as those of a GPU do; ranks on GPUs are
`test_ranks_on_gpus.py`'s.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_rollout import device_rollout_logits
from fdasync_trainer import fixed_numerics
from fdasync_transformers.fused import experts as fused_layers
from fdasync_transformers.fused import experts_interface
from fdasync_transformers.fused.experts import Experts
from fdasync_transformers.fused.experts_interface import Description, fused_experts
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.fused.replacement import prove
from fdasync_transformers.parallel.slices import Slices, _Rows, _Sum
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from ordered_dot import walk_in_order
from ranks import as_ranks, returned
from rollout_bits import batch_of, drawn, served_in
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


def made(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    return served_in(make_tiny_model(family, **sizes), dtype).to(PLACE)


def trainers(model: Any, sequences: list[torch.Tensor], slices: int) -> torch.Tensor:
    arguments, real = batch_of(sequences, "left")
    moved = {name: value.to(PLACE) for name, value in arguments.items()}
    with fixed_numerics(model, kernels="triton", sum_slices=slices):
        logits: torch.Tensor = model(**moved, use_cache=False).logits.flatten(0, 1)[real.to(PLACE)]
    logits.float().logsumexp(-1).sum().backward()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())
    return logits.detach().cpu()


@pytest.mark.skipif(PLACE.type == "cuda", reason="forks, in Triton's interpreter")
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_one_process_two_ranks_and_a_trainer_have_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # tiles of all regimes are tried by `fused/test_experts.py`
    monkeypatch.setattr(fused_layers, "_tiles_of", lambda _: ())
    walk_in_order(monkeypatch)
    # a chunk, and a decode behind it
    sequences = drawn((5,))
    few = {"num_hidden_layers": 2 if family == "deepseek_v2" else 1}

    def play(slices: int, exchange: Exchange | None = None) -> tuple[torch.Tensor, str]:
        return device_rollout_logits(made(family, BF16, **few), sequences, 4, slices=slices, exchange=exchange)

    one, fused = play(4)
    if family == "qwen3_moe":
        assert "1 of 1 decoder layers" in fused
    assert "experts of " in fused
    for many, also in returned(as_ranks(2, lambda exchange: play(4, exchange))):
        assert also == fused
        assert torch.equal(many, one)
    assert torch.equal(trainers(made(family, BF16, **few), sequences, 4), one)
    if family == "deepseek_v2":
        assert not torch.equal(play(1)[0], one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "glm4_moe", "qwen2_moe", "olmoe"])
def test_a_rollouts_bits_are_a_trainers_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    sequences = drawn((300, 75, 20, 3))
    wanted, fused = device_rollout_logits(made(family, dtype, max_position_embeddings=512), sequences, slices=4)
    assert "routers" in fused
    assert wanted.isfinite().all()
    found = trainers(made(family, dtype, max_position_embeddings=512), sequences, 4)
    assert torch.equal(found, wanted), fused


def test_experts_compute_their_slices_at_once_as_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("qwen3_moe", torch.float32, num_hidden_layers=1)
    model.set_experts_implementation("eager")
    planned = Slices(copy.deepcopy(model).to("meta"), 4, latent=True)
    (experts,) = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((3, experts.hidden_dim), generator=generator).to(PLACE)
    ids = torch.tensor([[0, 1], [2, 0], [3, 1]], device=PLACE)
    rows = hidden, ids, torch.rand((3, 2), generator=generator).to(PLACE)
    with torch.inference_mode():
        whole = experts(*rows)
        monkeypatch.setattr(fused_layers, "_tiles_of", lambda _: ())
        replacement = Experts(LiveRows())
        assert isinstance(prove(replacement, replacement.place(experts, 2)), Description)
        planned.attach(model, None, kernels=True)
        one_by_one = experts(*rows)
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "sliced_for_a_test", fused_experts)
        monkeypatch.setattr(experts.config, "_experts_implementation", "sliced_for_a_test")
        asked: list[int] = []
        own = experts_interface.run_experts
        monkeypatch.setattr(
            experts_interface,
            "run_experts",
            lambda *args, **named: asked.append(named["slices"]) or own(*args, **named),
        )
        at_once = experts(*rows)
    assert asked == [4]
    assert at_once.dtype is torch.float32
    assert torch.allclose(at_once, one_by_one, rtol=1e-5, atol=1e-6)
    assert torch.allclose(at_once, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("held", [2, 4])
def test_a_linear_layer_has_the_bits_of_its_slices_with_and_without_a_gradient(held: int) -> None:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(64, 24).to(PLACE, BF16)
    rows = torch.randn((1, 5, 64), generator=generator).to(PLACE, BF16)
    forward = _Rows(module, held, _Sum("o_proj", None), kernels=True)
    with_gradient = forward(rows)
    assert with_gradient.requires_grad
    with torch.inference_mode():
        assert torch.equal(forward(rows), with_gradient)
    total = torch.zeros(1, 5, 24, device=PLACE)
    for part, weight in zip(rows.chunk(held, -1), module.weight.chunk(held, 1), strict=True):
        total += torch.nn.functional.linear(part, weight).float()
    assert torch.allclose((total + module.bias.float()).to(BF16), with_gradient, atol=0.02)
