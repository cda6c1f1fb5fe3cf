"""The kinds of routers of the library; `known.py` says which class is which.

A kind says how ids and weights follow from logits (`RouterRule`), and where the module keeps what that needs. Numbers
are read from the module's attributes, so a form holds for many classes. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fdasync_kernels.router.rule import RouterRule

if TYPE_CHECKING:
    import torch

#: makes the kind of a module; raises AttributeError for one that is built otherwise
Form = Callable[[Any], "RouterKind"]

_TINY = 1e-20  # what the library adds to many sums


@dataclass(frozen=True)
class RouterKind:
    """How a router module works.

    Attributes:
        rule: of the choice and the weights.
        near: slots are chosen one after the other (`route_in_turn`), with this nearness; None: by `rule`.
        weight, bias: paths of the linear's tensors within the module; "": it has none.
        selection_bias: path of a bias of the selection alone; "": none, or an argument of the forward.
        bias_argument: that bias is the forward's second argument.
        expert_scale: path of the experts' own factors of their weights; "": none.
        prepare: makes the linear's input of the hidden states, by the library's operations; None: they are it.
        other_tensors: paths of tensors that `prepare` reads, and of tensors that the library reads nowhere.
        probabilities: the forward returns the softmax where others return logits.
        batched: the forward takes hidden states [1, T, H] alone.
    """

    rule: RouterRule
    near: float | None = None
    weight: str = "weight"
    bias: str = ""
    selection_bias: str = ""
    bias_argument: bool = False
    expert_scale: str = ""
    prepare: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    other_tensors: tuple[str, ...] = ()
    probabilities: bool = False
    batched: bool = False


def part_of(module: Any, path: str) -> Any:
    """The tensor at a path within a module; raises AttributeError."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _form(**values: Any) -> Form:
    """A form by the fields of the kind and of its rule; a function as a value (but `prepare`) reads it from the
    module."""

    def make(module: Any) -> RouterKind:
        read = {
            name: value(module) if callable(value) and name != "prepare" else value for name, value in values.items()
        }
        kind = {one.name: read.pop(one.name) for one in fields(RouterKind) if one.name in read}
        return RouterKind(RouterRule(**read), **kind)

    return make


def _flag(name: str, *otherwise: bool) -> Callable[[Any], bool]:
    return lambda module: bool(getattr(module, name, *otherwise))


def _number(name: str, *otherwise: float) -> Callable[[Any], float]:
    return lambda module: float(getattr(module, name, *otherwise))


def _prepared(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = module.norm(hidden) * module.scale * module.scalar_root_size
    return normed


_OWN_BIAS: dict[str, Any] = {"selection_bias": "e_score_correction_bias"}
_NORM: dict[str, Any] = {"renormalise": _flag("norm_topk_prob")}
_SCALE: dict[str, Any] = {"scale": _number("routed_scaling_factor")}
_BIASED: dict[str, Any] = {"score": "sigmoid", "by_logits": False}
# what open groups there are; without any, all experts are one
_GROUPED: dict[str, Any] = {
    "score": "sigmoid",
    "by_logits": False,
    "groups": lambda module: module.num_group or 1,
    "open_groups": lambda module: module.topk_group if module.num_group else 1,
    "least_sum": _TINY,
    "scale": _number("routed_scaling_factor", 1.0),
    **_NORM,
    **_OWN_BIAS,
}
_OPEN: dict[str, Any] = {"groups": lambda module: module.num_group, "open_groups": lambda module: module.topk_group}
_MISTRAL: dict[str, Any] = {
    "by_logits": False,
    "closed": "zero",
    "renormalise": _flag("norm_topk_prob", True),
    "least_sum": _TINY,
    **_OPEN,
    **_SCALE,
}

SOFTMAX = _form(renormalise=_flag("norm_topk_prob", True))
PLAIN_SOFTMAX = _form(renormalise=False)
HUNYUAN = _form(weight="wg.weight")
GEMMA = _form(
    weight="proj.weight",
    expert_scale="per_expert_scale",
    prepare=_prepared,
    other_tensors=("scale",),
    probabilities=True,
)
OF_CHOSEN = _form(score="softmax_of_chosen", renormalise=False)
OF_CHOSEN_ROUNDED = _form(
    score="softmax_of_chosen",
    renormalise=False,
    rounded=True,
    bias=lambda module: "bias" if getattr(module, "bias", None) is not None else "",
)
_ROUNDED_SIGMOID = _form(score="sigmoid", rounded=True, **_NORM)
GROUPED_SIGMOID = _form(**_GROUPED)
AXK2 = _form(closed="zero", **_GROUPED)
_SCALED = _form(renormalise=False, **_SCALE)
# the library weighs a closed expert 0.0, and chooses one only where open ones weigh 0.0 too
_GREEDY_GROUPS = _form(by_logits=False, group_score="largest", renormalise=False, **_OPEN, **_SCALE)
MISTRAL = _form(rounded=True, **_MISTRAL)
MISTRAL_LARGE = _form(**_MISTRAL)
SIGMOID = _form(**_BIASED, **_OWN_BIAS)
MINIMAX_M2 = _form(bias_argument=True, **_BIASED)
HY_V3 = _form(bias_argument=True, least_sum=_TINY, scale=_number("router_scaling_factor"), **_BIASED)
AFMOE = _form(
    weight="gate.weight", bias_argument=True, batched=True, least_sum=_TINY, scale=_number("route_scale"), **_BIASED
)
LFM2 = _form(bias_argument=_flag("use_expert_bias"), least_sum=1e-6, rounded=True, **_BIASED, **_NORM, **_SCALE)
DEEPSEEK_V4 = _form(
    score=lambda module: "sqrtsoftplus" if type(module.score_fn).__name__ == "SqrtSoftplusActivation" else "sigmoid",
    by_logits=False,
    least_sum=_TINY,
    rounded=True,
    **_SCALE,
    **_OWN_BIAS,
)
FLINT = _form(score="sigmoid", **_NORM)
KOLIBRI = _form(score="sigmoid", **_NORM, **_OWN_BIAS)
ERNIE = _form(
    by_logits=False, least_sum=_number("norm_min"), clamp_sum=True, selection_bias="moe_statics.e_score_correction_bias"
)
LONGCAT = _form(
    by_logits=False,
    renormalise=False,
    weight="classifier.weight",
    other_tensors=("classifier.bias",),
    **_SCALE,
    **_OWN_BIAS,
)
PHIMOE = _form(near=lambda module: 2 * float(module.router_jitter_noise))


def cohere(module: Any) -> RouterKind:
    return (OF_CHOSEN if module.expert_selection_fn == "softmax" else _ROUNDED_SIGMOID)(module)


def deepseek_v2(module: Any) -> RouterKind:
    return (_GREEDY_GROUPS if module.topk_method == "group_limited_greedy" else _SCALED)(module)


def laguna(module: Any) -> RouterKind:
    if module.router_logit_softcapping > 0.0:
        raise AttributeError("its logits are capped")
    return SIGMOID(module)
