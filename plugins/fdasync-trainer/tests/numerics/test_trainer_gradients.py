"""Gradients within fixed numerics are those of the library's model, also under checkpointing and with replay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_trainer import checkpoint_contexts, fixed_numerics, replay_routing
from fdasync_trainer.numerics import trainer_attention
from fdasync_trainer.numerics.segments import HostSegments
from fdasync_trainer.replay.layout import Spans
from fdasync_transformers.model.kv import Reach
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from replay_helpers import checkpointed, grads_of, observe, random_routing
from rollout_bits import batch_of, drawn, loss_of, served_in
from structures import by_structure, in_turn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (40, 11, 3)
# most of a second each: the first in `make test`, the others in `make test-ci`
SLICED = ("qwen3_moe", "deepseek_v2", "longcat_flash")


def training(family: str, **overrides: Any) -> Any:
    model = make_tiny_model(family, **overrides)
    # phimoe samples experts in training
    return model if family == "phimoe" else model.train()


def weights_of(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 1, generator=torch.Generator().manual_seed(3))


def own_gradients(model: Any, layout: str = "left") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a pass, within whatever is open."""
    arguments, real = batch_of(drawn(LENGTHS), layout)
    model.zero_grad()
    loss = loss_of(model(**arguments, use_cache=False).logits.flatten(0, 1)[real], weights_of(sum(LENGTHS)))
    loss.backward()
    return loss.detach(), grads_of(model, of="all")


def library_gradients(family: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """Of the library's own code in float64, each sequence alone."""
    model = training(family, **overrides).double()
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    logits = torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens in drawn(LENGTHS)])
    loss_of(logits, weights_of(sum(LENGTHS))).backward()
    return grads_of(model, of="all")


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter's gradient, in parts of that gradient's norm."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[name].double() - grad).norm() / grad.norm().clamp_min(1e-12)) for name, grad in wanted.items()
    )


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    "family", by_structure(["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "phimoe", "mixtral"])
)
def test_gradients_are_those_of_the_library_in_float64(family: str) -> None:
    model = training(family)
    with fixed_numerics(model):
        _, found = own_gradients(model)
    assert worst(found, library_gradients(family)) < 1e-4


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn(SLICED, SLICED[:1], SLICED))
def test_gradients_of_sums_in_slices_are_those_of_the_library_too(family: str) -> None:
    plain, model = training(family), checkpointed(training(family))
    with fixed_numerics(plain, sum_slices=4):
        loss, found = own_gradients(plain)
    with fixed_numerics(model, sum_slices=4):
        again, recomputed = own_gradients(model)
    assert worst(found, library_gradients(family)) < 1e-4
    assert torch.equal(loss, again)
    assert worst(recomputed, found) < 1e-6


@pytest.mark.parametrize("family", ["qwen3_dense", "deepseek_v3"])
def test_gradients_in_bfloat16_are_as_near_as_the_librarys(family: str) -> None:
    """Without experts: a choice that falls otherwise in another dtype would hide all else."""
    dense = {"first_k_dense_replace": 4} if family == "deepseek_v3" else {}
    wanted = library_gradients(family, **dense)
    own, library = (served_in(make_tiny_model(family, **dense).train(), torch.bfloat16) for _ in range(2))
    library.set_attn_implementation("eager")
    with fixed_numerics(own):
        own_gradients(own)
    own_gradients(library)
    assert worst(grads_of(library, of="all"), wanted) > 1e-3
    assert worst(grads_of(own, of="all"), wanted) < 1.5 * worst(grads_of(library, of="all"), wanted)


def no_keys(grads: list[torch.Tensor]) -> None:
    grads[1] = torch.zeros_like(grads[1])


def values_off(grads: list[torch.Tensor]) -> None:
    grads[2] = grads[2] * 1.01


def no_sinks(grads: list[torch.Tensor]) -> None:
    grads[3] = torch.zeros_like(grads[3])


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("breaking", [no_keys, values_off, no_sinks])
def test_a_wrong_gradient_of_attention_is_found(breaking: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    own = trainer_attention._Attend.backward

    def broken(ctx: Any, grad: torch.Tensor) -> Any:
        grads = list(own(ctx, grad))
        breaking(grads)
        return tuple(grads)

    monkeypatch.setattr(trainer_attention._Attend, "backward", staticmethod(broken))
    model = training("gpt_oss")
    with fixed_numerics(model):
        _, found = own_gradients(model)
    assert worst(found, library_gradients("gpt_oss")) > 1e-3


def test_windows_that_are_shorter_than_sequences_are_played() -> None:
    """The families above cross their windows and chunks, or their gradients would show nothing about them."""
    assert make_tiny_model("gpt_oss").config.sliding_window < max(LENGTHS)
    assert make_tiny_model("llama4_text").config.attention_chunk_size < max(LENGTHS)


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_gradients_at_the_edge_of_a_reach(kind: Any, beyond: int) -> None:
    """Sequences that are as long as a window, and hardly longer: torch's own attention in float64, with the mask of
    the words."""
    size = 7
    length, generator = size + beyond, torch.Generator().manual_seed(5)
    leaves = [torch.randn(length, 2, 8, generator=generator).requires_grad_() for _ in range(3)]
    given = torch.randn(length, 2, 8, generator=generator)
    segments = HostSegments(Spans(np.array([0]), np.array([length]), length), torch.device("cpu"))
    out = trainer_attention._attend(*leaves, None, segments, Reach(kind, size), 0.3)
    found = torch.autograd.grad(out, leaves, given)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    seen = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        first = query - size + 1 if kind == "window" else query - query % size
        seen[query, max(0, first) : query + 1] = True
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in doubles), attn_mask=seen, scale=0.3
    )
    for one, other in zip(found, torch.autograd.grad(plain.transpose(0, 1), doubles, given.double()), strict=True):
        assert torch.allclose(one.double(), other, atol=1e-6)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit_of_the_loss(family: str, reentrant: bool) -> None:
    plain, model = training(family), checkpointed(training(family), use_reentrant=reentrant)
    if reentrant:
        model.enable_input_require_grads()
    with fixed_numerics(plain):
        loss, wanted = own_gradients(plain)
    with fixed_numerics(model):
        again, found = own_gradients(model)
    assert torch.equal(loss, again)
    assert worst(found, wanted) < 1e-6


@pytest.mark.ci
def test_an_own_checkpoint_is_recomputed_with_the_same_numerics() -> None:
    plain, model = training("qwen3_moe"), training("qwen3_moe")
    own_checkpoints(model, context_fn=checkpoint_contexts(model))
    with fixed_numerics(plain):
        loss, wanted = own_gradients(plain)
    with fixed_numerics(model):
        again, found = own_gradients(model)
    assert torch.equal(loss, again)
    assert all(torch.equal(found[name], grad) for name, grad in wanted.items())
    own_gradients(model)  # and without the context


@pytest.mark.ci
def test_selective_checkpointing_keeps_what_the_recomputation_asks_for() -> None:
    plain, model = training("qwen3_moe"), training("qwen3_moe")
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.bmm.default])
    checkpointed(model, use_reentrant=False, context_fn=kept)
    with fixed_numerics(plain):
        loss, wanted = own_gradients(plain)
    with fixed_numerics(model):
        again, found = own_gradients(model)
    assert torch.equal(loss, again)
    assert all(torch.equal(found[name], grad) for name, grad in wanted.items())


@pytest.mark.ci
def test_a_recomputation_on_another_thread_has_the_same_numerics() -> None:
    plain, model = training("qwen3_moe"), checkpointed(training("qwen3_moe"))
    arguments, real = batch_of(drawn(LENGTHS), "left")
    with fixed_numerics(plain):
        _, wanted = own_gradients(plain)
    with fixed_numerics(model), ThreadPoolExecutor(1) as pool:
        loss = loss_of(model(**arguments).logits.flatten(0, 1)[real], weights_of(sum(LENGTHS)))
        pool.submit(loss.backward).result()
    assert worst(grads_of(model, of="all"), wanted) == 0


@pytest.mark.parametrize(("part", "reentrant"), [("self_attn", False), ("mlp", False), ("", True)])
def test_an_own_checkpoint_that_would_be_recomputed_otherwise_is_refused(part: str, reentrant: bool) -> None:
    model = training("qwen3_moe")
    own_checkpoints(model, part, use_reentrant=reentrant)
    model.enable_input_require_grads()
    with fixed_numerics(model), pytest.raises(BadInput, match="checkpointed, and not by the library"):
        own_gradients(model)


def test_recomputation_after_the_context_raises() -> None:
    model = checkpointed(training("qwen3_moe"))
    arguments, _ = batch_of(drawn(LENGTHS), "right")
    with fixed_numerics(model):
        loss = model(**arguments).logits.sum()
    with pytest.raises(BadInput, match="fixed_numerics was closed"):
        loss.backward()


def test_backward_without_recomputation_may_come_after_the_context() -> None:
    model = training("qwen3_moe")
    arguments, real = batch_of(drawn(LENGTHS), "left")
    with fixed_numerics(model):
        _, wanted = own_gradients(model)
        model.zero_grad()
        loss = loss_of(model(**arguments, use_cache=False).logits.flatten(0, 1)[real], weights_of(sum(LENGTHS)))
    loss.backward()
    assert worst(grads_of(model, of="all"), wanted) == 0


@pytest.mark.ci
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_inside_and_outside_of_it_are_the_same(checkpointing: bool) -> None:
    model = training("qwen3_moe")
    if checkpointing:
        checkpointed(model)
    routing = [random_routing(model, length, seed) for seed, length in enumerate(LENGTHS)]
    found = []
    for outside in (False, True):
        contexts = [fixed_numerics(model), replay_routing(model, routing)]
        with ExitStack() as stack:
            for context in reversed(contexts) if outside else contexts:
                stack.enter_context(context)  # type: ignore[arg-type]
            found.append(own_gradients(model))
            packed = own_gradients(model, "packed")
        assert torch.equal(found[-1][0], packed[0])
    with fixed_numerics(model):
        live, _ = own_gradients(model)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], live)
    assert all(torch.equal(found[0][1][name], grad) for name, grad in found[1][1].items())


def test_a_context_that_is_opened_again_lets_backward_recompute() -> None:
    model = checkpointed(training("qwen3_moe"))
    numerics = fixed_numerics(model)
    arguments, real = batch_of(drawn(LENGTHS), "left")
    with numerics:
        _, wanted = own_gradients(model)
        model.zero_grad()
        loss = loss_of(model(**arguments, use_cache=False).logits.flatten(0, 1)[real], weights_of(sum(LENGTHS)))
    with numerics:
        loss.backward()
    assert worst(grads_of(model, of="all"), wanted) == 0


def test_the_routing_is_that_of_the_same_pass_of_a_rollout() -> None:
    model = training("qwen3_moe")
    with fixed_numerics(model):
        arguments, real = batch_of(drawn(LENGTHS), "left")
        padded = observe_rows(model, arguments, real)
        arguments, real = batch_of(drawn(LENGTHS), "packed")
        packed = observe_rows(model, arguments, real)
    assert all(torch.equal(padded[layer], rows) for layer, rows in packed.items())


def observe_rows(model: Any, arguments: dict[str, Any], real: torch.Tensor) -> dict[int, torch.Tensor]:
    return {layer: rows[real] for layer, rows in observe(model, **arguments).items()}


def own_checkpoints(model: Any, part: str = "", *, use_reentrant: bool = False, **options: Any) -> None:
    """Checkpoint each decoder layer, or a part of it, by torch's own function."""
    for layer in model.model.layers:
        module = getattr(layer, part) if part else layer
        own = module.forward

        def forward(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            function = partial(own, **kwargs)  # reentrant checkpointing takes no keywords
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **options)

        module.forward = forward
