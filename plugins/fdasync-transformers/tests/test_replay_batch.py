"""Replay in a trainer: forced experts with live gate weights, whatever the batch, the checkpointing, the family."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from families_zoo import VOCAB, make_model
from fdasync_transformers import Packed, Padded, checkpoint_contexts, replay_routing
from fdasync_transformers.replay import find_routers, observed_routing
from torch.utils.checkpoint import checkpoint

from fdasync import Routing
from fdasync.errors import BadInput, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

FAMILIES = [
    "qwen3_moe",
    "qwen2_moe",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "hunyuan_v1_moe",
    "granitemoe",
    "longcat_flash",
    "qwen3_next",
    "jamba",
]
LENGTHS = (9, 4, 13)


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


def top_ks(model: Any) -> list[int]:
    return [site.router.top_k for site in find_routers(model).values()]


def routing_of(model: Any, rows: dict[int, Any], start: int = 0) -> Routing:
    """Rows [n, k] by layer, as an engine gives them: zeros past a layer's own k."""
    ks, sites = top_ks(model), find_routers(model)
    array = np.zeros((len(rows[min(rows)]), len(sites), max(ks)), dtype=np.uint8)
    for place, (layer, k) in enumerate(zip(sites, ks, strict=True)):
        array[:, place, :k] = np.asarray(rows[layer])
    return Routing(
        array=array,
        start=start,
        layer_ids=tuple(sites),
        num_experts=next(iter(sites.values())).num_experts,
        top_k_by_layer=tuple(ks) if len(set(ks)) > 1 else None,
    )


def random_routing(model: Any, count: int, seed: int = 0, start: int = 0) -> Routing:
    rng = np.random.default_rng(seed)
    rows = {
        layer: np.stack([rng.permutation(site.num_experts)[: site.router.top_k] for _ in range(count)])
        for layer, site in find_routers(model).items()
    }
    return routing_of(model, rows, start)


def observe(model: Any, **inputs: Any) -> dict[int, torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    with torch.no_grad(), observed_routing(model, seen):
        model(use_cache=False, **inputs)
    return {layer: rows.clone() for layer, rows in seen.items()}


def router_weights(model: Any) -> dict[int, Any]:
    return {
        layer: next(p for p in site.router.parameters() if p.requires_grad and p.ndim == 2)
        for layer, site in find_routers(model).items()
    }


def loss_of(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    return loss


def grads_of(model: Any, *, of: str = "routers") -> dict[Any, torch.Tensor]:
    if of == "routers":
        return {layer: p.grad.clone() for layer, p in router_weights(model).items()}
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(model: Any, loss: torch.Tensor, *, of: str = "all") -> dict[Any, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return grads_of(model, of=of)


def checkpointed(model: Any, **options: Any) -> Any:
    name = "activation_checkpointing_enable"
    if not hasattr(model, name):  # older releases
        name = "gradient_checkpointing_enable"
    getattr(model, name)(options or None)
    return model


def same(left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def nothing_left(model: Any) -> bool:
    sites = find_routers(model).values()
    modules = [model, *(site.router for site in sites)]
    return (
        not any(len(m._forward_pre_hooks) or len(m._forward_hooks) for m in modules)
        and torch.overrides._get_current_function_mode() is None
        and not any(
            type(vars(m).get("_gradient_checkpointing_func")).__name__ == "Checkpointing" for m in model.modules()
        )
    )


# -- every family


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_live_choice_changes_nothing(family: str) -> None:
    model, ids = make_model(family), ids_of(14)
    rows = {layer: live.flip(-1)[:13] for layer, live in observe(model, input_ids=ids).items()}
    before = loss_of(model, ids)
    grads = backward(model, before, of="routers")
    with replay_routing(model, [routing_of(model, rows)]) as replay:
        after = loss_of(model, ids)
    replayed = backward(model, after, of="routers")
    assert (replay.replayed_tokens, replay.live_tokens, replay.padding_tokens) == (13, 1, 0)
    assert float(after.detach()) == pytest.approx(float(before.detach()), rel=1e-5)
    for layer, grad in grads.items():
        # with one expert and renormalised weights the gradient is 0 but for rounding
        bound = 1e-5 * max(float(grad.norm()), 1e-2)
        assert float((replayed[layer] - grad).norm()) < (5 * bound if family == "qwen3_next" else bound)
    assert nothing_left(model)


def expected_weights(family: str, config: Any, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The family's formula on live logits [T, E] at the forced ids, from its paper or source."""
    chosen, softmax = logits.gather(-1, rows), torch.softmax(logits, dim=-1).gather(-1, rows)
    total = softmax.sum(-1, keepdim=True)
    if family in ("gpt_oss", "granitemoe"):
        return torch.softmax(chosen, dim=-1)
    if family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2"):
        sigmoid = torch.sigmoid(chosen)
        scale = getattr(config, "routed_scaling_factor", 1.0)
        return sigmoid / (sigmoid.sum(-1, keepdim=True) if getattr(config, "norm_topk_prob", True) else 1.0) * scale
    if family in ("deepseek_v2", "longcat_flash"):
        return softmax * config.routed_scaling_factor
    if family == "ernie4_5_moe":
        return softmax / total.clamp(min=config.moe_norm_min)
    if family in ("mixtral", "hunyuan_v1_moe") or getattr(config, "norm_topk_prob", False):
        return softmax / total
    return softmax


@pytest.mark.parametrize("family", FAMILIES)
def test_random_rows_get_live_weights_and_true_gradients(family: str) -> None:
    model, ids = make_model(family), ids_of(14)
    routing = random_routing(model, 13)
    got: dict[int, Any] = {}
    sites = find_routers(model)
    with replay_routing(model, [routing]), ExitStack() as stack:
        for layer, site in sites.items():
            hook = site.router.register_forward_hook(lambda _m, _a, out, layer=layer: got.update({layer: out}))
            stack.callback(hook.remove)
        loss = loss_of(model, ids)
    grads = backward(model, loss, of="routers")
    for place, (layer, k) in enumerate(zip(sites, top_ks(model), strict=True)):
        logits, weights, chosen = (value.detach()[:13] for value in got[layer])
        rows = torch.from_numpy(routing.array[:, place, :k].astype(np.int64))
        assert torch.equal(chosen, rows)
        expected = expected_weights(family, model.config, logits.float(), rows)
        torch.testing.assert_close(weights.float(), expected, rtol=1e-5, atol=1e-6)
    # along one direction of all routers together, so that no single small entry decides
    generator = torch.Generator().manual_seed(3)
    steps = {layer: torch.randn(p.shape, generator=generator) for layer, p in router_weights(model).items()}
    before = {layer: weight.detach().clone() for layer, weight in router_weights(model).items()}
    size, values = 1e-3, []
    with torch.no_grad(), replay_routing(model, [routing]):
        for sign in (1, -1):
            for layer, weight in router_weights(model).items():
                weight.copy_(before[layer] + sign * size * steps[layer])
            values.append(float(loss_of(model, ids)))
    slope = sum(float((grads[layer] * steps[layer]).sum()) for layer in grads)
    assert abs(slope) > 1e-2
    # the recurrent state bends the loss more within the step
    rel = 5e-2 if family == "qwen3_next" else 1e-2
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(slope, rel=rel, abs=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_is_bit_equal_even_after_the_context(family: str) -> None:
    model, ids = make_model(family).train(), ids_of(14)
    routing = random_routing(model, 10, start=2)
    with replay_routing(model, [routing]):
        plain = loss_of(model, ids)
    live = backward(model, loss_of(model, ids))
    expected = backward(model, plain)
    checkpointed(model)
    with replay_routing(model, [routing]):
        within = backward(model, loss_of(model, ids))
        later = loss_of(model, ids)
    after = backward(model, later)
    assert torch.equal(later, plain)
    assert same(within, expected)
    assert same(after, expected)
    assert not same(live, expected)
    assert nothing_left(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_live_choices_mix_in_one_router_call(family: str) -> None:
    model, ids = make_model(family), ids_of(14)
    live = observe(model, input_ids=ids)
    routing = random_routing(model, 6, start=5)
    with replay_routing(model, [routing]) as replay:
        reached = observe(model, input_ids=ids)
    assert (replay.replayed_tokens, replay.live_tokens) == (6, 8)
    first = min(reached)  # later layers see other inputs
    assert torch.equal(reached[first][:5], live[first][:5])
    assert torch.equal(reached[first][11:], live[first][11:])
    for place, (layer, k) in enumerate(zip(reached, top_ks(model), strict=True)):
        assert np.array_equal(reached[layer][5:11], routing.array[:, place, :k])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    model, ids = make_model(family).to(torch.bfloat16).train(), ids_of(14)
    routing = random_routing(model, 13)
    with replay_routing(model, [routing]):
        plain = loss_of(model, ids)
    expected = backward(model, plain)
    assert bool(torch.isfinite(plain))
    assert any(bool(grad.any()) for grad in grads_of(model).values())
    checkpointed(model)
    with replay_routing(model, [routing]):
        again = loss_of(model, ids)
    assert same(backward(model, again), expected)


# -- batches


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


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_micro_batches_in_flight(options: dict[str, Any], attention: str) -> None:
    model = make_model("qwen3_moe", attn_implementation=attention).train()
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
    model, ids = checkpointed(make_model("deepseek_v2").train()), ids_of(14)
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
    model = make_model(family).train()
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
    model = checkpointed(make_model("glm4_moe").train())
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
    model = checkpointed(make_model("qwen3_moe").train())
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
    model, ids = make_model("qwen3_moe").train(), ids_of(14)
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
