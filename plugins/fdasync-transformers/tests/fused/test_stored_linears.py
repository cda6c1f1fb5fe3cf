"""Linear layers that stay as stored: their proof, and the product of several: `fused/layers/`."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from fdasync_transformers.fused.layers import linears
from fdasync_transformers.fused.layers.linears import KeptLinears
from fdasync_transformers.fused.layers.merged import merge_linears
from fdasync_transformers.fused.replacement import Differs, replace
from fdasync_transformers.model.kept.forms import FP8
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.model.kept.linears import KeptLinear, keep_linears, kept_product, kept_weight, linears_of
from fdasync_transformers.model.places import plan_places, taker
from fdasync_transformers.tiny.checkpoints import make_tiny_model

from fdasync.errors import InvariantBroken

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(outputs: tuple[int, ...] = (256, 128, 40), bias: bool = False) -> Any:
    """A stack of linear layers that are kept, with weights."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(48, each, bias=bias, dtype=torch.bfloat16) for each in outputs]
    model: Any = torch.nn.Module()
    model.add_module("layers", torch.nn.ModuleList())
    for each in layers:
        block = torch.nn.Module()
        block.add_module("proj", each)
        model.layers.append(block)
    plain = [(each.weight.detach().clone(), each.bias) for each in layers]
    wrapped = torch.nn.Module()
    wrapped.add_module("model", model)
    keep_linears(wrapped, [path for path, _ in linears_of(wrapped)])
    for block, (weight, _) in zip(model.layers, plain, strict=True):
        made = Kept.made_of(weight, FP8)
        kept = kept_weight(block.proj)
        kept.values.copy_(made.values)
        kept.scales.copy_(made.scales)
    return wrapped.to(PLACE).requires_grad_(False)


def layers_of(model: Any) -> list[KeptLinear]:
    return [block.proj for block in model.model.layers]


@pytest.mark.ci
@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_take_over_when_they_were_proven(bias: bool) -> None:
    model = build(bias=bias)
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(PLACE, torch.bfloat16)
    wanted = [layer(rows) for layer in layers_of(model)]
    for layer, found in zip(layers_of(model), wanted, strict=True):
        weight = FP8.dequantised(kept_weight(layer).values, kept_weight(layer).scales)
        assert torch.equal(found, torch.nn.functional.linear(rows, weight, layer.bias))
        assert not layer.proven
    assert len(replace(KeptLinears(), model).names) == 3
    for layer, found in zip(layers_of(model), wanted, strict=True):
        assert layer.proven
        assert float((layer(rows) - found).float().norm()) <= 1e-2 * float(found.float().norm())
    first = layers_of(model)[0]
    before = first(rows)
    if not bias:
        # in place
        kept_weight(first).scales.mul_(2)
        assert torch.equal(first(rows), 2 * before)


def test_a_layer_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    honest = linears.kept_product

    def wrong(rows: torch.Tensor, weight: Kept, bias: Any, *, proven: bool) -> torch.Tensor:
        return honest(rows, weight, bias, proven=proven) * (1.05 if proven and len(weight) == 40 else 1)

    monkeypatch.setattr(linears, "kept_product", wrong)
    done = replace(KeptLinears(), model)
    assert done.names == []
    (problem,) = done.reasons.values()
    assert re.fullmatch(r"model.layers.2.proj gives other results \(\d.\de-02 of their size, at 1 rows\)", problem)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_several_are_one_product(bias: bool) -> None:
    model = build(bias=bias)
    parts = layers_of(model)
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(PLACE, torch.bfloat16)
    wanted = torch.cat([layer(rows) for layer in parts], -1)
    held = [(kept_weight(layer).values.clone(), kept_weight(layer).scales.clone()) for layer in parts]
    merged = merge_linears(parts)
    assert isinstance(merged.weight, Kept)
    assert torch.equal(kept_product(rows, merged.weight, merged.bias, proven=False), wanted)
    for layer, (values, scales) in zip(parts, held, strict=True):
        assert torch.equal(kept_weight(layer).values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(kept_weight(layer).scales, scales)
    # what is written to a part is in the whole
    kept_weight(parts[1]).scales.mul_(2)
    found = kept_product(rows, merged.weight, None, proven=False)
    assert torch.equal(found[:, 256:384], torch.nn.functional.linear(rows, kept_weight(parts[1])[:]))
    again = merge_linears(parts)
    assert again.weight.data_ptr() == merged.weight.data_ptr()


def test_parts_that_end_within_a_block_are_not_merged() -> None:
    parts = layers_of(build((256, 40, 128)))
    with pytest.raises(Differs, match="its projections end within blocks of 128 rows that share a scale"):
        merge_linears(parts)


def test_which_layers_of_a_model_could_stay() -> None:
    model = make_tiny_model("deepseek_v3", q_lora_rank=16).bfloat16()
    last = {path.rpartition(".")[2] for path, _ in linears_of(model)}
    assert last == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not list(linears_of(make_tiny_model("deepseek_v3")))


@torch.no_grad()
@pytest.mark.parametrize("stored", [False, True])
def test_in_one_memory_the_parts_lie_where_they_are_merged(stored: bool) -> None:
    """So no copy of them is left behind, and a sleep releases them with the rest."""
    with torch.device("meta"):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
        model = make_tiny_model("glm4_moe", hidden_size=512, attention_bias=True, **heads).bfloat16()
    if stored:
        keep_linears(model, [path for path, _ in linears_of(model)])
    places, nbytes = plan_places(model)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=PLACE)
    model._apply(taker(memory, places))
    first, end = memory.data_ptr(), memory.data_ptr() + nbytes
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in model.state_dict().values())
    assert first <= spans[0][0]
    assert spans[-1][1] <= end
    # tied ones have one place for each name
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    for layer in model.model.layers:
        attention = layer.self_attn
        merged = merge_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        assert merged.bias is not None
        for whole in (merged.weight, merged.bias, getattr(merged.weight, "scales", merged.bias)):
            assert first <= whole.data_ptr() < end
    with pytest.raises(InvariantBroken, match="more tensors"):
        model._apply(taker(memory, places[:-1]))
