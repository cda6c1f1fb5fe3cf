"""Which routers of the library are which kind, read from a module: the table of `routers.py`.

A kind says how ids and weights follow from logits (`RouterRule`), and where the module keeps what that needs. Numbers
are read from the module's attributes, so the table holds forms alone. The table may be wrong where the library changes:
each module is proven against its own code before it is replaced (`router_proof.py`). Knows class names; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fdasync_kernels.router.rule import RouterRule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

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


def kind_of(module: torch.nn.Module) -> RouterKind | str:
    """The kind of a router, or for people why it has none."""
    name = type(module).__name__
    if name in _LEFT:
        return _LEFT[name]
    make = _KINDS.get(name)
    if make is None:
        return "is of no known kind"
    try:
        return make(module)
    except AttributeError as error:
        return f"is not built as it was: {error}"


def part_of(module: Any, path: str) -> Any:
    """The tensor at a path within a module; raises AttributeError."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _softmax(module: Any) -> RouterKind:
    return RouterKind(RouterRule(renormalise=bool(getattr(module, "norm_topk_prob", True))))


def _plain_softmax(_: Any) -> RouterKind:
    return RouterKind(RouterRule(renormalise=False))


def _hunyuan(_: Any) -> RouterKind:
    return RouterKind(RouterRule(), weight="wg.weight")


def _gemma(_: Any) -> RouterKind:
    def prepare(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = module.norm(hidden) * module.scale * module.scalar_root_size
        return normed

    return RouterKind(
        RouterRule(),
        weight="proj.weight",
        expert_scale="per_expert_scale",
        prepare=prepare,
        other_tensors=("scale",),
        probabilities=True,
    )


def _of_chosen(_: Any) -> RouterKind:
    return RouterKind(RouterRule("softmax_of_chosen", renormalise=False))


def _of_chosen_rounded(module: Any) -> RouterKind:
    rule = RouterRule("softmax_of_chosen", renormalise=False, rounded=True)
    return RouterKind(rule, bias="bias" if getattr(module, "bias", None) is not None else "")


def _cohere(module: Any) -> RouterKind:
    if module.expert_selection_fn == "softmax":
        return _of_chosen(module)
    return RouterKind(RouterRule("sigmoid", renormalise=bool(module.norm_topk_prob), rounded=True))


def _grouped_sigmoid(module: Any, closed: Any = "never") -> RouterKind:
    rule = RouterRule(
        "sigmoid",
        by_logits=False,
        groups=module.num_group or 1,
        open_groups=module.topk_group if module.num_group else 1,
        closed=closed,
        renormalise=bool(module.norm_topk_prob),
        least_sum=_TINY,
        scale=float(getattr(module, "routed_scaling_factor", 1.0)),
    )
    return RouterKind(rule, selection_bias="e_score_correction_bias")


def _axk2(module: Any) -> RouterKind:
    return _grouped_sigmoid(module, "zero")


def _deepseek_v2(module: Any) -> RouterKind:
    scale = float(module.routed_scaling_factor)
    if module.topk_method != "group_limited_greedy":
        return RouterKind(RouterRule(renormalise=False, scale=scale))
    # the library weighs a closed expert 0.0, and chooses one only where open ones weigh 0.0 too
    rule = RouterRule(
        by_logits=False,
        groups=module.num_group,
        open_groups=module.topk_group,
        group_score="largest",
        renormalise=False,
        scale=scale,
    )
    return RouterKind(rule)


def _mistral(module: Any, rounded: bool = True) -> RouterKind:
    rule = RouterRule(
        by_logits=False,
        groups=module.num_group,
        open_groups=module.topk_group,
        closed="zero",
        renormalise=bool(getattr(module, "norm_topk_prob", True)),
        least_sum=_TINY,
        scale=float(module.routed_scaling_factor),
        rounded=rounded,
    )
    return RouterKind(rule)


def _mistral_large(module: Any) -> RouterKind:
    return _mistral(module, rounded=False)


def _biased(score: Any = "sigmoid", **rule: Any) -> RouterRule:
    return RouterRule(score, by_logits=False, **rule)


def _sigmoid(_: Any) -> RouterKind:
    return RouterKind(_biased(), selection_bias="e_score_correction_bias")


def _minimax_m2(_: Any) -> RouterKind:
    return RouterKind(_biased(), bias_argument=True)


def _hy_v3(module: Any) -> RouterKind:
    return RouterKind(_biased(least_sum=_TINY, scale=float(module.router_scaling_factor)), bias_argument=True)


def _afmoe(module: Any) -> RouterKind:
    rule = _biased(least_sum=_TINY, scale=float(module.route_scale))
    return RouterKind(rule, weight="gate.weight", bias_argument=True, batched=True)


def _lfm2(module: Any) -> RouterKind:
    rule = _biased(
        renormalise=bool(module.norm_topk_prob),
        least_sum=1e-6,
        scale=float(module.routed_scaling_factor),
        rounded=True,
    )
    return RouterKind(rule, bias_argument=bool(module.use_expert_bias))


def _deepseek_v4(module: Any) -> RouterKind:
    score = "sqrtsoftplus" if type(module.score_fn).__name__ == "SqrtSoftplusActivation" else "sigmoid"
    rule = _biased(score, least_sum=_TINY, scale=float(module.routed_scaling_factor), rounded=True)
    return RouterKind(rule, selection_bias="e_score_correction_bias")


def _laguna(module: Any) -> RouterKind:
    if module.router_logit_softcapping > 0.0:
        raise AttributeError("its logits are capped")
    return _sigmoid(module)


def _flint(module: Any) -> RouterKind:
    return RouterKind(RouterRule("sigmoid", renormalise=bool(module.norm_topk_prob)))


def _kolibri(module: Any) -> RouterKind:
    rule = RouterRule("sigmoid", renormalise=bool(module.norm_topk_prob))
    return RouterKind(rule, selection_bias="e_score_correction_bias")


def _ernie(module: Any) -> RouterKind:
    rule = _biased("softmax", least_sum=float(module.norm_min), clamp_sum=True)
    return RouterKind(rule, selection_bias="moe_statics.e_score_correction_bias")


def _longcat(module: Any) -> RouterKind:
    rule = _biased("softmax", renormalise=False, scale=float(module.routed_scaling_factor))
    return RouterKind(
        rule,
        weight="classifier.weight",
        selection_bias="e_score_correction_bias",
        other_tensors=("classifier.bias",),
    )


def _phimoe(module: Any) -> RouterKind:
    return RouterKind(RouterRule(), near=2 * float(module.router_jitter_noise))


# by reading the library's source, release 5.23
_FORMS: dict[Callable[[Any], RouterKind], str] = {
    _softmax: "FlexOlmoTopKRouter MellumTopKRouter MiniMaxTopKRouter MixtralTopKRouter OlmoeTopKRouter"
    " Qwen2MoeTopKRouter Qwen3MoeTopKRouter Qwen3NextTopKRouter Qwen3OmniMoeTalkerTextTopKRouter"
    " Qwen3OmniMoeTextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter"
    " Qwen4ExpTextTopKRouter",
    _plain_softmax: "JambaTopKRouter",
    _hunyuan: "HunYuanMoEV1Gate",
    _gemma: "DiffusionGemmaTextRouter Gemma4TextRouter",
    _of_chosen: "GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter GraniteMoeSharedTopKRouter GraniteMoeTopKRouter",
    _of_chosen_rounded: "AriaTextTopKRouter GptOssTopKRouter",
    _cohere: "Cohere2MoeTopKRouter",
    _grouped_sigmoid: "AXK1TopkRouter BailingHybridTopkRouter BeamTopKRouter DeepseekV32TopkRouter"
    " DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter ExaoneMoeTopkRouter Glm4MoeLiteTopkRouter"
    " Glm4MoeTopkRouter Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter GlmMoeDsaTopkRouter HYV4TopkRouter"
    " KimiLinearTopkRouter MiMoV2FlashTopkRouter NemotronHTopkRouter SolarOpenTopkRouter",
    _axk2: "AXK2TopkRouter",
    _deepseek_v2: "DeepseekOcr2TextTopkRouter DeepseekV2TopkRouter UnlimitedOcrTextTopkRouter",
    _mistral: "Mistral4TopkRouter",
    _mistral_large: "MistralLarge4TextTopkRouter",
    _sigmoid: "MiniMaxM3VLTopKRouter Step3p7TopKRouter",
    _minimax_m2: "MiniMaxM2TopKRouter",
    _hy_v3: "Dots3NoteVisionTopKRouter HYV3TopKRouter",
    _afmoe: "AfmoeTokenChoiceRouter",
    _lfm2: "Lfm2MoeTopKRouter",
    _deepseek_v4: "DeepseekV4TopKRouter Inkling2TopKRouter",
    _laguna: "LagunaTopKRouter",
    _flint: "FlintTopKRouter",
    _kolibri: "Kolibri1TopKRouter",
    _ernie: "Ernie4_5_MoeTopKRouter Ernie4_5_VLMoeMoeTopKRouter",
    _longcat: "LongcatFlashTopkRouter",
    _phimoe: "PhimoeTopKRouter",
}
_KINDS = {name: form for form, names in _FORMS.items() for name in names.split()}
_LEFT = {
    "DbrxRouter": "makes logits, and the block around it chooses",
    "DeepseekV4HashRouter": "chooses by the token's id",
    "InklingTopkRouter": "weighs shared experts with the chosen ones",
    "Llama4Router": "scores all experts, which take no ids",
    "ZayaRouter": "is a network with a state",
}
