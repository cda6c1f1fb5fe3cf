"""Each family of the catalogue is in one class of structure, and each kind has a family that stands for it.

A family that is added to the catalogue fails the first test until it has a class, and the last one where it brings a
kind that no class stands for.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_transformers.fused.known import kind_of
from fdasync_transformers.fused.router_kinds import RouterKind
from fdasync_transformers.model.families import mend
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.model.probe import attention_layers
from fdasync_transformers.model.recurrent import mixers
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.tiny.families import FAMILIES, TinyFamily
from fdasync_transformers.tiny.packed_forms import FORMS
from fdasync_transformers.weights.quantized import read_scheme
from structures import CLASSES, by_structure, parted

if TYPE_CHECKING:
    from collections.abc import Iterator

#: what a module is called that is no router
NO_ROUTER = "is of no known kind"


def test_every_family_is_in_one_class() -> None:
    named = Counter(name for members in CLASSES.values() for name in members)
    assert named == dict.fromkeys(FAMILIES, 1)


def test_the_first_of_each_class_that_occurs_is_played_by_day() -> None:
    names = ["mixtral", "qwen3_moe", "glm4_moe", "olmoe", "solar_open"]
    assert parted(names) == (("qwen3_moe", "glm4_moe"), ("mixtral", "olmoe", "solar_open"))
    assert parted(["mixtral", "olmoe"], also=["olmoe"]) == (("mixtral", "olmoe"), ())
    assert len(parted(FAMILIES).by_day) == len(CLASSES)
    assert [one.marks for one in by_structure(names)] == [(), (), *[(pytest.mark.nightly,)] * 3]


def test_families_ahead_are_some_of_the_families() -> None:
    assert parted(["mixtral", "qwen3_moe"], ahead=["qwen3_moe"]) == (("qwen3_moe",), ("mixtral",))
    with pytest.raises(AssertionError, match=r"not among the families: \['olmoe'\]"):
        parted(["mixtral"], ahead=["olmoe"])


def routers(model: Any) -> Iterator[tuple[str, ...]]:
    for module in model.modules():
        kind = kind_of(module)
        if isinstance(kind, RouterKind):
            rule = kind.rule
            by = "in turn" if kind.near is not None else "groups" if rule.groups > 1 else ""
            yield "router", rule.score, by or ("logits" if rule.by_logits else "biased scores")
            if kind.prepare is not None:
                yield "router", "of prepared input"
        elif kind != NO_ROUTER:
            yield "router", "left alone"


def experts(model: Any) -> Iterator[tuple[str, ...]]:
    found = find_experts(model)
    if not found:
        yield "experts", "none"
    for one in found.values():
        module: Any = one.module
        told = getattr(module, "has_gate", None)
        if told is None:
            yield "experts", "handed no ids" if one.dense else "of a layout of their own"
            continue
        yield "experts", "gated" if told else "without gates"
        if told and not module.is_concatenated:
            yield "experts", "interleaved"
        if module.has_bias:
            yield "experts", "biased"
        if module.is_transposed:
            yield "experts", "transposed"


def attention(model: Any) -> Iterator[tuple[str, ...]]:
    mends = mend(model)
    for layer in attention_layers(model, latent=True, query_scales=mends.query_scales):
        if layer.group:
            yield "attention", layer.group
        yield "attention", "latents" if layer.latent_rank else "heads"
        yield "attention", layer.reach.kind
        if layer.query_scale is not None:
            yield "attention", "queries that grow"
    if any("sink" in name for name, _ in model.named_parameters()):
        yield "attention", "sinks"


def states(model: Any) -> Iterator[tuple[str, ...]]:
    for mixer in mixers.find_mixers(model):
        kind = type(mixer.module)
        calls = [call for call in mixers._STATE_CALLS if call in mixers.methods_of(kind)]
        yield "state", *calls, *[rule for rule in mixers._BY_KEY if f"{rule}(" in mixers.source_of(kind)]


def storage(entry: TinyFamily) -> Iterator[tuple[str, ...]]:
    if entry.vision is not None:
        yield "stored", "in a larger model"
    if entry.quantised:
        form = FORMS.get(entry.quantised)
        settings = {"quant_method": entry.quantised} if form is None else form.settings
        scheme = read_scheme({"quantization_config": settings}, Path("config.json"))
        assert scheme is not None
        for layout in scheme.layouts:
            yield "stored", type(layout).__name__


def kinds_of(name: str) -> set[tuple[str, ...]]:
    """Of a family that is refused those of its routers alone; one that is stored quantised has all others of the
    entry that it was made of."""
    entry = FAMILIES[name]
    found = set(storage(entry))
    if entry.quantised:
        return found
    model = make_tiny_model(name)
    found |= set(routers(model))
    if entry.refused:
        return found | {("refused",)}
    return found.union(experts(model), attention(model), states(model))


@pytest.mark.ci
def test_every_kind_has_a_family_that_stands_for_it() -> None:
    kinds = {name: kinds_of(name) for name in FAMILIES}
    stand = set().union(*(kinds[members[0]] for members in CLASSES.values()))
    lacking = {name: found - stand for name, found in kinds.items() if found - stand}
    assert not lacking
    # each dimension was read
    assert {kind[0] for kind in stand} == {"router", "experts", "attention", "state", "stored", "refused"}
