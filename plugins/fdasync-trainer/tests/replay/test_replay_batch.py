"""Replay in a batch: padded, packed and alone are equal; what cannot be replayed is refused by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_trainer import replay_routing
from fdasync_trainer.replay.force import find_routers, forced_routing
from fdasync_trainer.replay.packing import refuse_mixing
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from made import Made
from replay_checks import PLAYED, UNPACKED, batch_of, padded_packed_and_alone_are_equal
from replay_helpers import (
    LENGTHS,
    backward,
    checkpointed,
    ids_of,
    loss_of,
    nothing_left,
    random_routing,
    same,
)
from torch.overrides import BaseTorchFunctionMode as BaseMode

from fdasync.errors import BadInput, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("family", PLAYED.by_day)
def test_padded_packed_and_alone_are_equal(tmp_path: Path, family: str) -> None:
    padded_packed_and_alone_are_equal(Made(family, tmp_path))


@pytest.mark.parametrize("family", UNPACKED)
def test_packed_sequences_that_would_mix_are_refused(family: str) -> None:
    model = make_tiny_model(family)
    inputs, _, _ = batch_of(model, "packed")
    with replay_routing(model, [None] * 3), pytest.raises(UnsupportedModel, match=r"pad them|recurrent state"):
        model(**inputs)
    with replay_routing(model, [None]):  # one is no mixture
        model(input_ids=inputs["input_ids"], use_cache=False)


BOUNDS = torch.tensor([0, 9, 13, 26], dtype=torch.int32)
LENGTHS_OF_FLASH: dict[str, Any] = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}
ALL_OF_FLASH = LENGTHS_OF_FLASH | {"max_length_q": 13, "max_length_k": 13}


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_every_packed_form_that_is_accepted_equals_alone(family: str, attention: str) -> None:
    # positions are picked from those of a sequence alone
    picking = {"index_topk": 4} if family == "glm_moe_dsa" else {}
    model = make_tiny_model(family, attn_implementation=attention, **picking)
    routing = [random_routing(model, n - 1, n) for n in LENGTHS]
    alone = []
    for n, record in zip(LENGTHS, routing, strict=True):
        with torch.no_grad(), replay_routing(model, [record]):
            alone.append(model(input_ids=ids_of(n), use_cache=False).logits[0])
    inputs, packed, starts = batch_of(model, "packed")
    own = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)).bool()
    four = {"attention_mask": torch.where(own, 0.0, torch.finfo(torch.float32).min)[None, None]}
    forms: list[tuple[dict[str, Any], Any]] = [
        (inputs | {"use_cache": False}, None),
        (inputs | {"use_cache": False}, packed),
        (inputs | {"use_cache": False} | LENGTHS_OF_FLASH, None),
        (inputs | {"use_cache": False} | four, packed),
    ]
    for arguments, layout in forms:
        with torch.no_grad(), replay_routing(model, routing, layout=layout) as replay:
            logits = model(**arguments).logits[0]
        assert replay.replayed_tokens == 23
        for (_, first), expected in zip(starts, alone, strict=True):
            torch.testing.assert_close(logits[first : first + len(expected)], expected, rtol=1e-4, atol=5e-5)
    # the cache that checkpointing switches off
    checkpointed(model.train())
    with replay_routing(model, routing):
        logits = model(**inputs).logits[0].detach()
    for (_, first), expected in zip(starts, alone, strict=True):
        torch.testing.assert_close(logits[first : first + len(expected)], expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_forms_that_would_mix_are_refused(attention: str) -> None:
    model = make_tiny_model("qwen3_moe", attn_implementation=attention)
    inputs, packed, starts = batch_of(model, "packed")
    ids, positions = {"input_ids": inputs["input_ids"]}, {"position_ids": inputs["position_ids"]}
    ones, uncached = {"attention_mask": torch.ones_like(inputs["input_ids"])}, {"use_cache": False}
    bad: list[tuple[dict[str, Any], Any, str]] = [
        (ids | positions | ones | uncached, None, "2-D attention_mask"),
        (ids | positions | ones | uncached, packed, "2-D attention_mask"),
        (ids | ALL_OF_FLASH | uncached, None, "position_ids alone"),
        (ids | uncached, packed, "position_ids alone"),
        (ids | {"position_ids": torch.arange(26)[None]} | uncached, packed, "position_ids alone"),
        (ids | positions, None, "use_cache=False"),
        (ids | positions | {"use_cache": True}, None, "use_cache=False"),
    ]
    alone = model(input_ids=ids_of(LENGTHS[2]), use_cache=False).logits[0]
    for arguments, layout, reason in bad:
        # each of them does mix
        (_, first) = starts[2]
        assert not torch.allclose(model(**arguments).logits[0, first:], alone, atol=1e-2)
        replayed = replay_routing(model, [None] * 3, layout=layout)
        with pytest.raises(UnsupportedModel, match=reason), replayed:
            model(**arguments)
    assert nothing_left(model)


def test_what_flash_attention_reads() -> None:
    """No flash attention runs on a CPU: only what is asked of its arguments."""
    model = make_tiny_model("qwen3_moe")
    inputs, packed, _ = batch_of(model, "packed")
    spans, positions = packed.spans(1, 26), {"position_ids": inputs["position_ids"]}
    model.config._attn_implementation = "flash_attention_2"
    for arguments in (positions, ALL_OF_FLASH, positions | LENGTHS_OF_FLASH, positions | {"use_cache": True}):
        refuse_mixing("x", model, arguments, spans)
    ones = {"attention_mask": torch.ones((1, 26))}
    for arguments in ({}, LENGTHS_OF_FLASH, positions | ones, ALL_OF_FLASH | ones):
        with pytest.raises(UnsupportedModel, match="attend to each other"):
            refuse_mixing("x", model, arguments, spans)
    model.config._attn_implementation = "one_of_my_own"
    with pytest.raises(UnsupportedModel, match="not known"):
        refuse_mixing("x", model, positions, spans)


def test_arguments_by_place_and_embeddings() -> None:
    model = make_tiny_model("qwen3_moe")
    routing = [random_routing(model, 8, 1), None, random_routing(model, 12, 2)]
    inputs, _, _ = batch_of(model, "left")
    with torch.no_grad(), replay_routing(model, routing) as replay:
        named = model(**inputs).logits
        by_place = model(*inputs.values()).logits
        embedded = model(inputs_embeds=model.get_input_embeddings()(inputs.pop("input_ids")), **inputs).logits
    assert torch.equal(named, by_place)
    assert torch.equal(named, embedded)
    assert (replay.replayed_tokens, replay.live_tokens, replay.padding_tokens) == (20, 6, 16)


# -- refusals


def test_a_part_of_the_model_would_be_routed_live() -> None:
    model = make_tiny_model("qwen3_moe")
    with replay_routing(model, [random_routing(model, 13)]):
        with pytest.raises(BadInput, match="part of it"):
            model.model(input_ids=ids_of(14))
        model(input_ids=ids_of(14))
    with replay_routing(model.model, [random_routing(model, 13)]) as replay:
        model(input_ids=ids_of(14))
    assert replay.replayed_tokens == 13


def test_an_error_within_leaves_nothing() -> None:
    model = checkpointed(make_tiny_model("qwen3_moe").train())
    live = backward(model, loss_of(model, ids_of(14)))

    def fail(*_: Any) -> None:
        raise KeyError("x")

    with replay_routing(model, [random_routing(model, 13)]) as replay:
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            loss_of(model, ids_of(14))
        handle.remove()
        assert replay.replayed_tokens == 0
        replayed = backward(model, loss_of(model, ids_of(14)))
    assert not same(replayed, live)
    assert nothing_left(model)
    assert same(backward(model, loss_of(model, ids_of(14))), live)


def test_an_interrupt_leaves_nothing() -> None:
    model = checkpointed(make_tiny_model("qwen3_moe").train())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), replay_routing(model, [random_routing(model, 13)]):
        loss_of(model, ids_of(14))
    handle.remove()
    assert nothing_left(model)


@contextmanager
def interrupted(model: Any, kind: type[BaseException]) -> Iterator[None]:
    """Within the context, the router of the second layer is interrupted in its forward."""
    router = list(find_routers(model).values())[1].router

    def interrupt(*_: Any) -> None:
        raise kind

    router.forward = interrupt
    try:
        yield
    finally:
        del router.forward


def library_topk() -> bool:
    table = torch.arange(8.0).repeat(14, 1)
    ids = torch.topk(table, 2).indices
    return bool((ids == torch.tensor([7, 6])).all()) and torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_router_leaves_nothing(kind: type[BaseException]) -> None:
    model, ids = make_tiny_model("qwen3_moe").train(), ids_of(14)
    record = random_routing(model, 13)
    with replay_routing(model, [record]):
        expected = backward(model, loss_of(model, ids))
    with interrupted(model, kind), pytest.raises(kind), replay_routing(model, [record]):
        loss_of(model, ids)
    assert library_topk()
    assert nothing_left(model)
    # caught within the context, which then goes on
    with replay_routing(model, [record]):
        with interrupted(model, kind), pytest.raises(kind):
            loss_of(model, ids)
        assert same(backward(model, loss_of(model, ids)), expected)
    assert nothing_left(model)
    # in a recomputation, within and after the context
    checkpointed(model)
    with replay_routing(model, [record]):
        first, second = loss_of(model, ids), loss_of(model, ids)
        with interrupted(model, kind), pytest.raises(kind):
            first.backward()
        assert library_topk()
    with interrupted(model, kind), pytest.raises(kind):
        second.backward()
    assert library_topk()
    assert nothing_left(model)


@pytest.mark.parametrize("outer_first", [False, True])
def test_an_interrupt_within_contexts_within_each_other(outer_first: bool) -> None:
    model, ids = make_tiny_model("qwen3_moe"), ids_of(14)
    rows = {layer: torch.arange(site.router.top_k).repeat(14, 1) for layer, site in find_routers(model).items()}
    contexts: list[Any] = [forced_routing(model, rows), replay_routing(model, [random_routing(model, 13)])]
    for context in contexts:
        context.__enter__()
    with BaseMode() as own:  # one that was entered meanwhile, and stays
        with interrupted(model, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(input_ids=ids)
        for context in contexts if outer_first else contexts[::-1]:
            context.__exit__(None, None, None)
        assert torch.overrides._get_current_function_mode() is own
    assert library_topk()
    assert nothing_left(model)


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "qwen3_dense"])
def test_families_that_are_refused(family: str) -> None:
    model = make_tiny_model(family)
    reason = {"phimoe": "samples", "llama4_text": "no ids", "qwen3_dense": "no experts"}[family]
    with pytest.raises(UnsupportedModel, match=reason), replay_routing(model, [None]):
        pass


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_noise_in_training_is_refused(family: str) -> None:
    model = make_tiny_model(family, router_jitter_noise=0.1)
    with replay_routing(model, [random_routing(model, 13)]) as replay:
        model(input_ids=ids_of(14))
        assert replay.replayed_tokens == 13
        model.train()
        with pytest.raises(UnsupportedModel, match=r"jitter_noise is 0\.1"):
            model(input_ids=ids_of(14))
    assert nothing_left(model)


def test_a_router_that_is_not_called_is_noticed() -> None:
    model = make_tiny_model("qwen3_moe")
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden  # as a kernel that replaces the whole block
    replayed = replay_routing(model, [random_routing(model, 13)])
    with pytest.raises(UnsupportedModel, match=r"layers \[2\] were not called"), replayed:
        model(input_ids=ids_of(14))


def test_fused_and_compiled_and_wrapped_models_are_refused() -> None:
    from fdasync_transformers.fused.known import kind_of
    from fdasync_transformers.fused.router_proof import RouterForm
    from fdasync_transformers.fused.routers import Record, make_forward

    model = make_tiny_model("qwen3_moe")
    router = find_routers(model)[2].router
    kind = kind_of(router)
    assert not isinstance(kind, str)
    form = RouterForm(("logits", "weights", "ids"), torch.float32, torch.float32, rounded=False)
    router.forward = make_forward(router, kind, form, 3, Record(), 0)
    with pytest.raises(UnsupportedModel, match="layer 2: Qwen3MoeTopKRouter is fused"), replay_routing(model, [None]):
        pass
    del router.forward
    with pytest.raises(BadInput, match="Sequential"), replay_routing(torch.nn.Sequential(model), [None]):
        pass
    model.model.layers[0]._compiled_call_impl = lambda *_: None  # what `layer.compile()` leaves
    with pytest.raises(BadInput, match=r"torch\.compile"), replay_routing(model, [None]):
        pass


def test_arguments_of_other_types_are_refused() -> None:
    model = make_tiny_model("qwen3_moe")
    record: Any = random_routing(model, 3)
    lengths: Any = [4]
    with pytest.raises(BadInput, match="is a Routing"), replay_routing(model, record):
        pass
    with pytest.raises(BadInput, match="is a list"), replay_routing(model, [record], layout=lengths):
        pass


def test_a_filled_cache_is_refused() -> None:
    model = make_tiny_model("qwen3_moe")
    cache = model(input_ids=ids_of(3), use_cache=True).past_key_values
    with replay_routing(model, [random_routing(model, 13)]):
        with pytest.raises(BadInput, match="past_key_values"):
            model(input_ids=ids_of(14), past_key_values=cache)
        with pytest.raises(BadInput, match="without input_ids"):
            model()
