"""Replay in a batch: padded, packed and alone are equal; what cannot be replayed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families_zoo import make_model
from fdasync_transformers import Packed, Padded, replay_routing
from fdasync_transformers.replay import find_routers
from replay_helpers import (
    FAMILIES,
    LENGTHS,
    backward,
    checkpointed,
    ids_of,
    loss_of,
    nothing_left,
    observe,
    random_routing,
    same,
)

from fdasync.errors import BadInput, UnsupportedModel


def batch_of(model: Any, layout: str) -> tuple[dict[str, Any], Any, list[tuple[int, int]]]:
    """Arguments of a pass of three sequences, an explicit layout, and where (row, first token) each begins."""
    parts = [ids_of(n)[0] for n in LENGTHS]
    if layout.startswith("packed"):
        starts = [(0, sum(LENGTHS[:i])) for i in range(3)]
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        return {"input_ids": torch.cat(parts)[None], "position_ids": positions}, Packed(LENGTHS), starts
    width = max(LENGTHS) + 1
    ids, mask = torch.zeros((3, width), dtype=torch.long), torch.zeros((3, width), dtype=torch.long)
    starts = [(i, 0 if layout == "right" else width - n) for i, n in enumerate(LENGTHS)]
    positions = torch.zeros_like(ids)
    for (row, first), part in zip(starts, parts, strict=True):
        ids[row, first : first + len(part)], mask[row, first : first + len(part)] = part, 1
        positions[row, first : first + len(part)] = torch.arange(len(part))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, Padded(mask), starts


# one sequence would see the other: packed, these are refused
UNPACKED = ("gpt_oss", "qwen3_next", "jamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_packed_and_alone_are_equal(family: str) -> None:
    model = make_model(family)
    routing = [random_routing(model, 8, 1), None, random_routing(model, 7, 2, start=3)]
    alone = []
    for n, record in zip(LENGTHS, routing, strict=True):
        with torch.no_grad(), replay_routing(model, [record]):
            alone.append(model(input_ids=ids_of(n), use_cache=False).logits[0])
    with torch.no_grad():
        live = model(input_ids=ids_of(LENGTHS[0]), use_cache=False).logits[0]
    assert not torch.allclose(live, alone[0], atol=1e-2)
    layouts = [("left", 16), ("right", 16), ("packed", 0)]
    if family in UNPACKED:
        layouts.pop()
    for name, padding in layouts:
        inputs, layout, starts = batch_of(model, name)
        for given in (None, layout):
            with torch.no_grad(), replay_routing(model, routing, layout=given) as replay:
                logits = model(use_cache=False, **inputs).logits
            assert (replay.replayed_tokens, replay.live_tokens, replay.padding_tokens) == (15, 11, padding)
            for (row, first), expected in zip(starts, alone, strict=True):
                own = logits[row, first : first + len(expected)]
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("family", UNPACKED)
def test_packed_sequences_that_would_mix_are_refused(family: str) -> None:
    model = make_model(family)
    inputs, _, _ = batch_of(model, "packed")
    with replay_routing(model, [None] * 3), pytest.raises(UnsupportedModel, match=r"pad them|recurrent state"):
        model(**inputs)
    with replay_routing(model, [None]):  # one is no mixture
        model(input_ids=inputs["input_ids"], use_cache=False)


def test_packed_with_lengths_for_flash_attention() -> None:
    model = make_model("qwen3_moe")
    inputs, _, _ = batch_of(model, "packed")
    routing = [random_routing(model, n - 1, n) for n in LENGTHS]
    with replay_routing(model, routing):
        expected = observe(model, **inputs)
    inputs.pop("position_ids")
    bounds = torch.tensor([0, 9, 13, 26], dtype=torch.int32)
    with replay_routing(model, routing) as replay:
        got = observe(model, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **inputs)
    assert all(torch.equal(got[layer][:8], expected[layer][:8]) for layer in got)
    assert replay.replayed_tokens == 23


def test_arguments_by_place_and_embeddings() -> None:
    model = make_model("qwen3_moe")
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
    model = make_model("qwen3_moe")
    with replay_routing(model, [random_routing(model, 13)]):
        with pytest.raises(BadInput, match="part of it"):
            model.model(input_ids=ids_of(14))
        model(input_ids=ids_of(14))
    with replay_routing(model.model, [random_routing(model, 13)]) as replay:
        model(input_ids=ids_of(14))
    assert replay.replayed_tokens == 13


def test_an_error_within_leaves_nothing() -> None:
    model = checkpointed(make_model("qwen3_moe").train())
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
    model = checkpointed(make_model("qwen3_moe").train())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), replay_routing(model, [random_routing(model, 13)]):
        loss_of(model, ids_of(14))
    handle.remove()
    assert nothing_left(model)


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "qwen3_dense"])
def test_families_that_are_refused(family: str) -> None:
    model = make_model(family)
    reason = {"phimoe": "samples", "llama4_text": "no ids", "qwen3_dense": "no experts"}[family]
    with pytest.raises(UnsupportedModel, match=reason), replay_routing(model, [None]):
        pass


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_noise_in_training_is_refused(family: str) -> None:
    model = make_model(family, router_jitter_noise=0.1)
    with replay_routing(model, [random_routing(model, 13)]) as replay:
        model(input_ids=ids_of(14))
        assert replay.replayed_tokens == 13
        model.train()
        with pytest.raises(UnsupportedModel, match=r"jitter_noise is 0\.1"):
            model(input_ids=ids_of(14))
    assert nothing_left(model)


def test_a_router_that_is_not_called_is_noticed() -> None:
    model = make_model("qwen3_moe")
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden  # as a kernel that replaces the whole block
    replayed = replay_routing(model, [random_routing(model, 13)])
    with pytest.raises(UnsupportedModel, match=r"layers \[2\] were not called"), replayed:
        model(input_ids=ids_of(14))


def test_fused_and_compiled_and_wrapped_models_are_refused() -> None:
    from fdasync_transformers import fused_router

    model = make_model("qwen3_moe")
    router = find_routers(model)[2].router
    router.forward = fused_router._fused(router, 3, None, torch.float32, None, 0, None)
    with pytest.raises(UnsupportedModel, match="layer 2: Qwen3MoeTopKRouter is fused"), replay_routing(model, [None]):
        pass
    del router.forward
    with pytest.raises(BadInput, match="Sequential"), replay_routing(torch.nn.Sequential(model), [None]):
        pass
    model.model.layers[0]._compiled_call_impl = lambda *_: None  # what `layer.compile()` leaves
    with pytest.raises(BadInput, match=r"torch\.compile"), replay_routing(model, [None]):
        pass


def test_arguments_of_other_types_are_refused() -> None:
    model = make_model("qwen3_moe")
    record: Any = random_routing(model, 3)
    lengths: Any = [4]
    with pytest.raises(BadInput, match="is a Routing"), replay_routing(model, record):
        pass
    with pytest.raises(BadInput, match="is a list"), replay_routing(model, [record], layout=lengths):
        pass


def test_a_filled_cache_is_refused() -> None:
    model = make_model("qwen3_moe")
    cache = model(input_ids=ids_of(3), use_cache=True).past_key_values
    with replay_routing(model, [random_routing(model, 13)]):
        with pytest.raises(BadInput, match="past_key_values"):
            model(input_ids=ids_of(14), past_key_values=cache)
        with pytest.raises(BadInput, match="without input_ids"):
            model()
