"""Replays in flight: micro-batches, contexts and threads in any order, checkpointing of any kind."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_trainer import checkpoint_contexts, replay_routing
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from replay_helpers import (
    backward,
    checkpointed,
    grads_of,
    ids_of,
    loss_of,
    nothing_left,
    observe,
    random_routing,
    same,
)
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_micro_batches_in_flight(options: dict[str, Any], attention: str) -> None:
    model = make_tiny_model("qwen3_moe", attn_implementation=attention).train()
    model.get_input_embeddings().weight.requires_grad_(True)
    routing = [random_routing(model, 13, seed) for seed in (1, 2)]
    batches = [ids_of(14, seed) for seed in (1, 2)]
    expected = []
    for ids, record in zip(batches, routing, strict=True):
        with replay_routing(model, [record]):
            expected.append(backward(model, loss_of(model, ids)))
    checkpointed(model, **options)
    losses = []
    for ids, record in zip(batches, routing, strict=True):
        with replay_routing(model, [record]):
            losses.append(loss_of(model, ids))
    plain = loss_of(model, batches[0])  # one that routes live, in flight with them
    for which in (1, 0):
        assert same(backward(model, losses[which]), expected[which])
    live = backward(model, plain)
    model.zero_grad()
    assert same(backward(model, loss_of(model, batches[0])), live)
    assert not same(live, expected[0])


def test_backward_in_another_thread() -> None:
    # as backward on a GPU is: what is switched on per thread must be so where the recomputation runs
    model, ids = checkpointed(make_tiny_model("deepseek_v2").train()), ids_of(14)
    routing = [random_routing(model, 13)]
    with replay_routing(model, routing):
        expected = backward(model, loss_of(model, ids))
        model.zero_grad()
        loss = loss_of(model, ids)
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert same(grads_of(model, of="all"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_on_a_gpu(family: str) -> None:
    model = make_tiny_model(family).train()
    ids, routing = ids_of(14), [random_routing(model, 13)]
    with replay_routing(model, routing):
        expected = backward(model, loss_of(model, ids))
    checkpointed(model).cuda()
    model.set_experts_implementation("eager")  # whatever grouped kernels take float32
    losses = []
    for record in (routing, [random_routing(model, 13, 5)]):
        with replay_routing(model, record):
            losses.append(loss_of(model, ids.cuda()))
            reached = observe(model, input_ids=ids.cuda())
        for place, rows in enumerate(reached.values()):
            assert np.array_equal(rows[:13].cpu(), record[0].array[:, place])
    losses[1].backward()
    for name, grad in backward(model, losses[0]).items():
        torch.testing.assert_close(grad.cpu(), expected[name], rtol=1e-2, atol=1e-3 * float(expected[name].abs().max()))


def test_contexts_within_each_other_and_out_of_order() -> None:
    model = checkpointed(make_tiny_model("glm4_moe").train())
    ids = ids_of(14)
    routing = [random_routing(model, 13, seed) for seed in (1, 2)]
    expected = []
    for record in routing:
        with replay_routing(model, [record]):
            expected.append(backward(model, loss_of(model, ids)))
    outer, inner = replay_routing(model, [routing[0]]), replay_routing(model, [routing[1]])
    outer.__enter__()
    first = loss_of(model, ids)
    inner.__enter__()
    second = loss_of(model, ids)
    outer.__exit__(None, None, None)
    third = loss_of(model, ids)
    assert same(backward(model, third), expected[1])
    inner.__exit__(None, None, None)
    assert same(backward(model, second), expected[1])
    assert same(backward(model, first), expected[0])
    assert nothing_left(model)


def test_a_graph_that_is_run_twice_is_recomputed_twice() -> None:
    model = checkpointed(make_tiny_model("qwen3_moe").train())
    with replay_routing(model, [random_routing(model, 13)]):
        loss = loss_of(model, ids_of(14))
    loss.backward(retain_graph=True)
    once = grads_of(model)
    assert same(backward(model, loss, of="routers"), once)


# -- checkpointing that is not the library's


def own_checkpointing(model: Any, **options: Any) -> Callable[[], None]:
    """Checkpoint every decoder layer as a trainer of one's own may."""
    layers = list(model.model.layers)
    for layer in layers:

        def forward(*args: Any, own: Any = layer.forward, **kwargs: Any) -> Any:
            return checkpoint(partial(own, **kwargs), *args, **options)

        layer.forward = forward

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def test_other_checkpointing_needs_its_contexts() -> None:
    model, ids = make_tiny_model("qwen3_moe").train(), ids_of(14)
    routing = [random_routing(model, 13)]
    with replay_routing(model, routing):
        expected = backward(model, loss_of(model, ids))
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        undo = own_checkpointing(model, **options)
        with pytest.raises(BadInput, match="layer 0 is checkpointed"), replay_routing(model, routing):
            loss_of(model, ids)
        undo()
        assert nothing_left(model)
    own_checkpointing(model, use_reentrant=False, context_fn=checkpoint_contexts(model))
    live = backward(model, loss_of(model, ids))
    with replay_routing(model, routing):
        loss = loss_of(model, ids)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert same(grads_of(model, of="all"), expected)
    assert not same(live, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_checkpointed(reentrant: bool) -> None:
    model, ids = make_tiny_model("qwen3_moe").train(), ids_of(14)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    routing = [random_routing(model, 13)]

    def score(hidden: Any) -> Any:
        return model(inputs_embeds=hidden, use_cache=False).logits.float().logsumexp(-1).sum()

    with replay_routing(model, routing):
        expected = backward(model, score(embedded))
    with pytest.raises(BadInput, match="layer 0 is checkpointed"), replay_routing(model, routing):
        checkpoint(score, embedded, use_reentrant=reentrant)
    with replay_routing(model, routing), torch.no_grad():  # no gradients for another reason
        score(embedded)
    assert nothing_left(model)
    assert same(backward(model, score(embedded)), backward(model, checkpoint(score, embedded, use_reentrant=reentrant)))
    if not reentrant:
        # the contexts are asked for before the pass has begun
        contexts = checkpoint_contexts(model)
        with pytest.raises(BadInput, match="checkpointed"), replay_routing(model, routing):
            checkpoint(score, embedded, use_reentrant=False, context_fn=contexts)
    assert not same(backward(model, score(embedded)), expected)


def test_hooks_over_those_of_a_checkpoint() -> None:
    model, ids = make_tiny_model("qwen3_moe").train(), ids_of(14)
    routing = [random_routing(model, 13)]
    with replay_routing(model, routing):
        expected = backward(model, loss_of(model, ids))
    for layer in model.model.layers:

        def offloaded(*args: Any, own: Any = layer.mlp.forward, **kwargs: Any) -> Any:
            with save_on_cpu():
                return own(*args, **kwargs)

        layer.mlp.forward = offloaded
    # no checkpoint: nothing is recomputed, and the hooks are as they were
    with replay_routing(model, routing), save_on_cpu(), save_on_cpu():
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        loss = loss_of(model, ids)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == top
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert same(backward(model, loss), expected)
    undo = own_checkpointing(model, use_reentrant=False)
    with pytest.raises(BadInput, match="layer 0 is checkpointed"), replay_routing(model, routing):
        loss_of(model, ids)
    undo()
    own_checkpointing(model, use_reentrant=False, context_fn=checkpoint_contexts(model))
    with replay_routing(model, routing):
        loss = loss_of(model, ids)
    assert same(backward(model, loss), expected)
