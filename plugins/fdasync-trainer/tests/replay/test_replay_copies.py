"""Copies of a model whose routing is replayed: never one that stays forced."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_trainer import replay_routing
from fdasync_trainer.replay.force import find_routers, forced_routing, observed_routing
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from replay_helpers import checkpointed, ids_of, loss_of, nothing_left, random_routing

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

# plain routers, groups and biases, renamed and fused experts, dense layers between, state beside attention
SOME = ("qwen3_moe", "gpt_oss", "deepseek_v3", "jamba", "ernie4_5_moe", "mixtral")


def saved(model: Any) -> None:
    torch.save(model, io.BytesIO())


DEEP: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": saved,
    "deepcopy of the base model": lambda model: copy.deepcopy(model.model),
    "deepcopy of a router": lambda model: copy.deepcopy(next(iter(find_routers(model).values())).router),
    "deepcopy of what wraps it": lambda model: copy.deepcopy(torch.nn.Sequential(model)),
}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", SOME)
def test_a_deep_copy_within_a_replay_is_refused_and_harms_nothing(family: str) -> None:
    model, ids = make_tiny_model(family), ids_of(14)
    routing = [random_routing(model, 13)]
    live = logits(model, ids)
    with replay_routing(model, routing):
        forced = logits(model, ids)
        for copied in DEEP.values():
            with pytest.raises(BadInput, match="is copied or pickled while its routing is forced"):
                copied(model)
        assert torch.equal(logits(model, ids), forced)
    assert not torch.equal(live, forced)
    assert nothing_left(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert nothing_left(twin)
        assert torch.equal(logits(twin, ids), live)


@pytest.mark.parametrize("where", ["replay_routing", "forced_routing", "observed_routing"])
def test_a_deep_copy_within_any_context_and_any_pass_is_refused(where: str) -> None:
    model, ids = make_tiny_model("qwen3_moe"), ids_of(14)
    rows = {layer: torch.arange(3).repeat(14, 1) for layer in find_routers(model)}
    contexts: dict[str, Any] = {
        "replay_routing": lambda: replay_routing(model, [random_routing(model, 13)]),
        "forced_routing": lambda: forced_routing(model, rows),
        "observed_routing": lambda: observed_routing(model, {}),
    }
    refused = []

    def in_the_middle(*_: Any) -> None:
        for part in (model, model.model):
            with pytest.raises(BadInput) as caught:
                copy.deepcopy(part)
            refused.append(caught.value.field)

    with contexts[where]():
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(BadInput, match="copy it outside of the context"):
                copied(model)
        handle = model.lm_head.register_forward_pre_hook(in_the_middle)
        logits(model, ids)
    handle.remove()
    assert refused == ["model", "model"]
    assert nothing_left(model)
    assert nothing_left(copy.deepcopy(model))


@pytest.mark.parametrize("family", SOME)
def test_a_shallow_copy_is_forced_as_long_as_the_model_is(family: str) -> None:
    model, ids = make_tiny_model(family), ids_of(14)
    live = logits(model, ids)
    with replay_routing(model, [random_routing(model, 13)]):
        twin = copy.copy(model)
        assert torch.equal(logits(twin, ids), logits(model, ids))
    assert nothing_left(twin)
    assert torch.equal(logits(twin, ids), live)
    assert torch.equal(logits(model, ids), live)


def test_a_shallow_copy_from_within_a_checkpointed_pass_is_free_after_it() -> None:
    model, ids = checkpointed(make_tiny_model("qwen3_moe").train()), ids_of(14)
    live = loss_of(model, ids).detach()
    twins = []
    handle = model.model.norm.register_forward_pre_hook(lambda *_: twins.append(copy.copy(model.model.layers[0])))
    with replay_routing(model, [random_routing(model, 13)]):
        loss_of(model, ids).backward()
    handle.remove()
    model.model.layers[0] = twins[0]
    loss = loss_of(model, ids)
    loss.backward()
    assert torch.equal(loss.detach(), live)
    assert len(twins) == 1
