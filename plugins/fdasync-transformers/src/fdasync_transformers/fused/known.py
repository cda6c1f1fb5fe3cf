"""Which classes of the library are known, and as what: the one table of routers, decoder layers and recurrent nets.

Someone read the library's code (transformers 5.23). The table may be wrong where the library changes: each module is
held against its own code before it is replaced. All other kinds of modules are found by their names and parts. Knows
class names; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fdasync_transformers.fused import router_kinds
from fdasync_transformers.fused.layers.attention import AttentionKind
from fdasync_transformers.fused.layers.feed_forward import BlockKind

if TYPE_CHECKING:
    import torch

    from fdasync_transformers.fused.router_kinds import Form, RouterKind


@dataclass(frozen=True)
class LayerKind:
    """A known decoder layer: x = x + attention(norm(x)), then x = x + block(norm(x)).

    Attributes:
        attention, block: of the family.
    """

    attention: AttentionKind = field(default_factory=AttentionKind)
    block: BlockKind = field(default_factory=BlockKind)


#: decoder layers, of which all is replaced
LAYERS = {
    # interleaved rotary embedding in float32, no norms of heads, shared experts perhaps, dense layers perhaps
    "Ernie4_5_MoeDecoderLayer": LayerKind(
        AttentionKind(interleaved=True, full_precision=True), BlockKind(shared="shared_experts")
    ),
    # a part of a head is turned, norms of heads perhaps, shared experts, dense layers first
    "Glm4MoeDecoderLayer": LayerKind(block=BlockKind(shared="shared_experts")),
    # sinks, cosines of pairs, norms that round once
    "GptOssDecoderLayer": LayerKind(AttentionKind(half_width=True, norm_rounds_once=True), BlockKind(router="router")),
    # neither norms of heads nor shared experts
    "MixtralDecoderLayer": LayerKind(),
    # norms over all heads, and a bound perhaps
    "OlmoeDecoderLayer": LayerKind(AttentionKind(row_norm=True, clip="clip_qkv")),
    # biased projections, a gated shared expert, dense layers perhaps
    "Qwen2MoeDecoderLayer": LayerKind(block=BlockKind(shared="shared_expert", shared_gate="shared_expert_gate")),
    # norms of heads, dense layers perhaps
    "Qwen3MoeDecoderLayer": LayerKind(),
}
#: decoder layers that norm by 1 + weight, with `linear_attn` or `self_attn`, of which what is around these is replaced
HYBRID_LAYERS = {
    name: BlockKind(shared="shared_expert", shared_gate="shared_expert_gate")
    for name in ("Qwen3NextDecoderLayer", "Qwen3_5MoeDecoderLayer")
}
#: gated delta nets, and their projections: joined, or apart
NETS = {
    "Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
    "Qwen3_5MoeGatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
#: routers: their form, or why they have none
ROUTERS: dict[str, Form | str] = {
    "AXK1TopkRouter": router_kinds.GROUPED_SIGMOID,
    "AXK2TopkRouter": router_kinds.AXK2,
    "AfmoeTokenChoiceRouter": router_kinds.AFMOE,
    "AriaTextTopKRouter": router_kinds.OF_CHOSEN_ROUNDED,
    "BailingHybridTopkRouter": router_kinds.GROUPED_SIGMOID,
    "BeamTopKRouter": router_kinds.GROUPED_SIGMOID,
    "Cohere2MoeTopKRouter": router_kinds.cohere,
    "DbrxRouter": "makes logits, and the block around it chooses",
    "DeepseekOcr2TextTopkRouter": router_kinds.deepseek_v2,
    "DeepseekV2TopkRouter": router_kinds.deepseek_v2,
    "DeepseekV32TopkRouter": router_kinds.GROUPED_SIGMOID,
    "DeepseekV3TopkRouter": router_kinds.GROUPED_SIGMOID,
    "DeepseekV4HashRouter": "chooses by the token's id",
    "DeepseekV4TopKRouter": router_kinds.DEEPSEEK_V4,
    "DiffusionGemmaTextRouter": router_kinds.GEMMA,
    "Dots1TopkRouter": router_kinds.GROUPED_SIGMOID,
    "Dots3NoteTextTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Dots3NoteVisionTopKRouter": router_kinds.HY_V3,
    "Ernie4_5_MoeTopKRouter": router_kinds.ERNIE,
    "Ernie4_5_VLMoeMoeTopKRouter": router_kinds.ERNIE,
    "ExaoneMoeTopkRouter": router_kinds.GROUPED_SIGMOID,
    "FlexOlmoTopKRouter": router_kinds.SOFTMAX,
    "FlintTopKRouter": router_kinds.FLINT,
    "Gemma4TextRouter": router_kinds.GEMMA,
    "Glm4MoeLiteTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Glm4MoeTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Glm4vMoeTextTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Glm5NextTextTopkRouter": router_kinds.GROUPED_SIGMOID,
    "GlmMoeDsaTopkRouter": router_kinds.GROUPED_SIGMOID,
    "GptOssTopKRouter": router_kinds.OF_CHOSEN_ROUNDED,
    "GraniteMoeHybridTopKRouter": router_kinds.OF_CHOSEN,
    "GraniteMoeSWATopKRouter": router_kinds.OF_CHOSEN,
    "GraniteMoeSharedTopKRouter": router_kinds.OF_CHOSEN,
    "GraniteMoeTopKRouter": router_kinds.OF_CHOSEN,
    "HYV3TopKRouter": router_kinds.HY_V3,
    "HYV4TopkRouter": router_kinds.GROUPED_SIGMOID,
    "HunYuanMoEV1Gate": router_kinds.HUNYUAN,
    "Inkling2TopKRouter": router_kinds.DEEPSEEK_V4,
    "InklingTopkRouter": "weighs shared experts with the chosen ones",
    "JambaTopKRouter": router_kinds.PLAIN_SOFTMAX,
    "KimiLinearTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Kolibri1TopKRouter": router_kinds.KOLIBRI,
    "LagunaTopKRouter": router_kinds.laguna,
    "Lfm2MoeTopKRouter": router_kinds.LFM2,
    "Llama4Router": "scores all experts, which take no ids",
    "LongcatFlashTopkRouter": router_kinds.LONGCAT,
    "MellumTopKRouter": router_kinds.SOFTMAX,
    "MiMoV2FlashTopkRouter": router_kinds.GROUPED_SIGMOID,
    "MiniMaxM2TopKRouter": router_kinds.MINIMAX_M2,
    "MiniMaxM3VLTopKRouter": router_kinds.SIGMOID,
    "MiniMaxTopKRouter": router_kinds.SOFTMAX,
    "Mistral4TopkRouter": router_kinds.MISTRAL,
    "MistralLarge4TextTopkRouter": router_kinds.MISTRAL_LARGE,
    "MixtralTopKRouter": router_kinds.SOFTMAX,
    "NemotronHTopkRouter": router_kinds.GROUPED_SIGMOID,
    "OlmoeTopKRouter": router_kinds.SOFTMAX,
    "PhimoeTopKRouter": router_kinds.PHIMOE,
    "Qwen2MoeTopKRouter": router_kinds.SOFTMAX,
    "Qwen3MoeTopKRouter": router_kinds.SOFTMAX,
    "Qwen3NextTopKRouter": router_kinds.SOFTMAX,
    "Qwen3OmniMoeTalkerTextTopKRouter": router_kinds.SOFTMAX,
    "Qwen3OmniMoeTextTopKRouter": router_kinds.SOFTMAX,
    "Qwen3OmniMoeThinkerTextTopKRouter": router_kinds.SOFTMAX,
    "Qwen3VLMoeTextTopKRouter": router_kinds.SOFTMAX,
    "Qwen3_5MoeTopKRouter": router_kinds.SOFTMAX,
    "Qwen4ExpTextTopKRouter": router_kinds.SOFTMAX,
    "SolarOpenTopkRouter": router_kinds.GROUPED_SIGMOID,
    "Step3p7TopKRouter": router_kinds.SIGMOID,
    "UnlimitedOcrTextTopkRouter": router_kinds.deepseek_v2,
    "ZayaRouter": "is a network with a state",
}


def kind_of(module: torch.nn.Module) -> RouterKind | str:
    """The kind of a router, or for people why it has none."""
    form = ROUTERS.get(type(module).__name__, "is of no known kind")
    if isinstance(form, str):
        return form
    try:
        return form(module)
    except AttributeError as error:
        return f"is not built as it was: {error}"
