"""The catalogue of tiny model families: one entry for each that the library knows, and what a runner is to do with it.

An entry is a small config with odd values, so that what sets the family apart changes tokens and rows: windows shorter
than prompts, groups of experts, dense layers among MoE layers, sinks, latents. It also says whether the family is to be
served, or else the true reason that a refusal must name. Knows configs, and neither models nor engines.
`checkpoints.py` makes checkpoints of the entries; tests and `python -m tests.nightly families` play them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fdasync_transformers.tiny.shapes import (
    DENSE_FIRST,
    EXPERTS,
    GEMMA4,
    GROUPS,
    IMAGE_IDS,
    INDEXER,
    INKLING,
    LATE_WINDOWS,
    LINEAR,
    LLAMA4,
    LOCAL,
    MAMBA,
    MINIMAX_M3,
    MLA,
    NO_QUERY_RANK,
    ONE_GROUP,
    QWEN3_NEXT,
    QWEN4,
    QWEN_VISION,
    ROUTED,
    SHARED,
    WINDOWS,
    YARN,
)
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE


class TinyFamily(msgspec.Struct, frozen=True):
    """A family, or a variant of one.

    Attributes:
        hits: what the values of the config hit, in a few words.
        config: values of the library's config class, beside `BASE`; of a wrapper the values of its text half.
        refused: () if it is to be served; else words, one of which the reason of its refusal must contain.
        model_type: the library's name; "" for the entry's own.
        family: the family that a variant is counted with; "" for the entry's own name.
        omit: names of `BASE` that the config class does not take.
        vision: values of the vision half of a multimodal wrapper, which is made with both halves; None for text models.
        wrapper: values of the wrapper's own config.
        replay_refused: as `refused`, of a trainer's replay of its routing.
        quantised: how its weights are stored, as `quantised.quantise` takes it; "" for plain.
        renamed: keys of config.json that are changed after the checkpoint was saved.
        dense: it has no experts.
        recurrent: its layers keep recurrent state, with which some ways of serving are refused so far.
        indexed: its attention reads positions that indexers pick; likewise.
    """

    hits: str
    config: dict[str, Any]
    refused: tuple[str, ...] = ()
    model_type: str = ""
    family: str = ""
    omit: tuple[str, ...] = ()
    vision: dict[str, Any] | None = None
    wrapper: dict[str, Any] = {}
    replay_refused: tuple[str, ...] = ()
    quantised: str = ""
    renamed: dict[str, Any] = {}
    dense: bool = False
    recurrent: bool = False
    indexed: bool = False

    @property
    def whole_only(self) -> bool:
        """Whether neither ranks nor slices of sums serve it so far."""
        return self.recurrent or self.indexed


# words of true reasons
_FORGETFUL = ("go on from a recurrent state",)
_BIASED = ("position_bias",)
_INDEXED = ("indexer",)
_NO_IDS = ("no ids",)

# text models of one name each, ordered; then their variants
_TEXT: dict[str, TinyFamily] = {
    "afmoe": TinyFamily(
        "windows, gated attention, a dense layer by num_dense_layers",
        {**EXPERTS, **WINDOWS, "head_dim": 8, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True,
         "route_scale": 1.5},
    ),
    "aria_text": TinyFamily(
        "shared experts", {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 1, "head_dim": 8}
    ),
    "axk1": TinyFamily("latents, groups", {**SHARED, **MLA, **GROUPS, **DENSE_FIRST}),
    "axk2": TinyFamily(
        "latents, positions picked by an indexer",
        {**SHARED, **MLA, **INDEXER, **DENSE_FIRST, "gated_norm_rank": 4},
        indexed=True,
    ),
    "bailing_hybrid": TinyFamily(
        "linear attention beside latents",
        {**NO_QUERY_RANK, **EXPERTS, **LINEAR, **DENSE_FIRST, "linear_head_dim": 8, "linear_num_heads": 4,
         "num_experts_per_token": 3, "num_shared_experts": 1, "num_expert_group": 4, "topk_group": 2,
         "first_k_dense_replace": 1, "model_max_length": 256},
        recurrent=True,
    ),
    "beam": TinyFamily("windows, groups", {**EXPERTS, **WINDOWS, **DENSE_FIRST, **GROUPS, "head_dim": 8}),
    "cohere2_moe": TinyFamily(
        "windows, a dense prefix of its own width",
        {**EXPERTS, **WINDOWS, **DENSE_FIRST, "head_dim": 8, "num_shared_experts": 1,
         "prefix_dense_intermediate_size": 40},
    ),
    "dbrx": TinyFamily(
        "configs within the config, experts chosen outside of the router",
        {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
         "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3}},
        replay_refused=("does not tell", "selection"),
        omit=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "max_position_embeddings", "bos_token_id"),
    ),
    "deepseek_v2": TinyFamily(
        "latents, yarn, groups without a bias",
        {**SHARED, **MLA, **GROUPS, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
         "rope_parameters": YARN},
    ),
    "deepseek_v3": TinyFamily(
        "latents, yarn, groups and a bias of the selection",
        {**SHARED, **MLA, **GROUPS, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek_v32": TinyFamily(
        "latents, positions picked by an indexer", {**SHARED, **MLA, **INDEXER, **GROUPS, **DENSE_FIRST}, indexed=True
    ),
    "deepseek_v4": TinyFamily(
        "compressed attention, experts by a hash of the token",
        {**SHARED, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24, "partial_rotary_factor": 0.5,
         "sliding_window": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8,
         "index_topk": 16, "hc_mult": 2, "num_nextn_predict_layers": 0,
         "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
         "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
        ("hash", "compress", "indexer"),
    ),
    "doge": TinyFamily(
        "experts that are rows of an embedding; dynamic mask",
        {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 3},
        ("experts", "dynamic mask"),
    ),
    "dots1": TinyFamily(
        "late windows", {**SHARED, **LATE_WINDOWS, **ONE_GROUP, "head_dim": 8, "first_k_dense_replace": 1,
                         "norm_topk_prob": True, "max_window_layers": 2},
    ),
    "dots3_note_text": TinyFamily(
        "latents, positions picked by an indexer, windows",
        {**SHARED, **MLA, **INDEXER, **ONE_GROUP, **DENSE_FIRST, "head_dim": 12, "sliding_window": 9,
         "layer_types": ["indexed_attention", "sliding_attention"] * 2, "shared_experts_intermediate_size": 16,
         "per_layer_config": {}},
        indexed=True,
    ),
    "ernie4_5_moe": TinyFamily(
        "a bias of the selection, tied output embedding",
        {"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
         "moe_layer_start_index": 1, "tie_word_embeddings": True},
    ),
    "exaone_moe": TinyFamily(
        "windows, groups", {**EXPERTS, **WINDOWS, **DENSE_FIRST, **GROUPS, "head_dim": 8, "num_shared_experts": 1}
    ),
    "flex_olmo": TinyFamily("norms after the blocks", {"num_experts": 8, "num_experts_per_tok": 3}),
    "flint": TinyFamily(
        "late windows, sinks",
        {**EXPERTS, **LATE_WINDOWS, "head_dim": 8, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
    "gemma4_text": TinyFamily(
        "a dense half beside the experts, heads of two sizes, embeddings for each layer",
        {**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 8,
         "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}}},
    ),
    "glm4_moe": TinyFamily(
        "groups and a bias of the selection, norms of heads, a part rotated",
        {**SHARED, **GROUPS, "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True,
         "partial_rotary_factor": 0.5},
    ),
    "glm4_moe_lite": TinyFamily("latents, groups", {**SHARED, **MLA, **GROUPS, **DENSE_FIRST}),
    "glm_moe_dsa": TinyFamily(
        "latents, positions picked by an indexer that one layer shares",
        {**SHARED, **MLA, **INDEXER, **ONE_GROUP, **DENSE_FIRST, "indexer_types": ["full", "full", "shared", "full"]},
        indexed=True,
    ),
    "gpt_oss": TinyFamily("windows and sinks, biased experts", {**LOCAL, **WINDOWS, "head_dim": 16}),
    "granitemoe": TinyFamily("multipliers of attention and logits", {**LOCAL, "attention_multiplier": 0.2,
                                                                     "logits_scaling": 4.0}),
    "granitemoe_swa": TinyFamily(
        "windows, sinks",
        {**LOCAL, **WINDOWS, "attention_multiplier": 0.2, "shared_intermediate_size": 16,
         "layer_rope_theta": [1e4] * 4},
    ),
    "granitemoehybrid": TinyFamily(
        "mamba layers", {**LOCAL, **LINEAR, **MAMBA, "shared_intermediate_size": 16, "mamba_chunk_size": 16},
        recurrent=True,
    ),
    "granitemoeshared": TinyFamily(
        "shared experts",
        {**LOCAL, "attention_multiplier": 0.2, "shared_intermediate_size": 16, "logits_scaling": 4.0},
    ),
    "hunyuan_v1_moe": TinyFamily("top-k that differs by layer", {"num_experts": 8, "moe_topk": [2, 3, 1, 2],
                                                                 "head_dim": 16}),
    "hy_v3": TinyFamily(
        "a bias of the selection", {**EXPERTS, **DENSE_FIRST, "head_dim": 8, "num_shared_experts": 1}
    ),
    "hy_v4": TinyFamily(
        "latents, positions picked by an indexer that layers share",
        {**SHARED, **MLA, **INDEXER, **DENSE_FIRST, "head_dim": 4, "indexer_types": ["full", "shared"] * 2,
         "hc_mult": 2},
        indexed=True,
    ),
    "inkling_text": TinyFamily(
        "biases by position, convolutions with state", {**INKLING, **DENSE_FIRST}, _BIASED, recurrent=True
    ),
    "inkling2_text": TinyFamily(
        "biases by position, convolutions with state", {**INKLING, "n_layers_per_attn_res_block": 2},
        ("dynamic_input",), recurrent=True,
    ),
    "jamba": TinyFamily(
        "mamba layers, MoE in every second",
        {"num_experts": 8, "num_experts_per_tok": 2, "use_mamba_kernels": False, "attn_layer_period": 2,
         "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        _FORGETFUL,
        recurrent=True,
    ),
    "jetmoe": TinyFamily(
        "attention of experts too", {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8}, ("experts",)
    ),
    "kimi_k2": TinyFamily(
        "DeepSeek-V3's architecture under a name that the library does not know",
        {**SHARED, **MLA, **ONE_GROUP, "first_k_dense_replace": 1, "routed_scaling_factor": 2.8,
         "rope_parameters": YARN},
        model_type="deepseek_v3",
        renamed={"model_type": "kimi_k2", "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        }},
    ),
    "kimi_linear": TinyFamily(
        "linear attention beside latents",
        {**NO_QUERY_RANK, **EXPERTS, **LINEAR, **DENSE_FIRST, "linear_head_dim": 8, "linear_num_heads": 4,
         "num_experts_per_token": 3, "num_shared_experts": 1, "model_max_length": 256},
        recurrent=True,
    ),
    "kolibri1": TinyFamily(
        "windows", {**LOCAL, **WINDOWS, "head_dim": 8, "moe_intermediate_size": 16,
                    "shared_expert_intermediate_size": 16},
    ),
    "laguna": TinyFamily(
        "windows, another number of heads in every second layer",
        {**EXPERTS, **WINDOWS, **DENSE_FIRST, "head_dim": 8, "shared_expert_intermediate_size": 16,
         "num_attention_heads_per_layer": [4, 2, 4, 2]},
    ),
    "lfm2_moe": TinyFamily(
        "convolutions with state", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
        recurrent=True,
    ),
    "llama4_text": TinyFamily(
        "chunked attention, query temperature by position, dense experts without ids", LLAMA4,
        replay_refused=_NO_IDS,
    ),
    "longcat_flash": TinyFamily(
        "two latents a layer, identity experts",
        {**MLA, "num_layers": 2, "n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 3, "ffn_hidden_size": 48,
         "expert_ffn_hidden_size": 16, "head_dim": 4},
        omit=("intermediate_size", "num_hidden_layers"),
    ),
    "mellum": TinyFamily("windows", {**LOCAL, **WINDOWS, **DENSE_FIRST, "head_dim": 8, "moe_intermediate_size": 16}),
    "mimo_v2_flash": TinyFamily(
        "windows with sinks, values narrower than keys",
        {**ROUTED, **WINDOWS, **DENSE_FIRST, "head_dim": 12, "v_head_dim": 8},
    ),
    "minimax": TinyFamily(
        "lightning attention", {**LOCAL, "head_dim": 8, "block_size": 16,
                                "layer_types": ["linear_attention", "full_attention"] * 2}, recurrent=True,
    ),
    "minimax_m2": TinyFamily("a bias as the router's argument, a part rotated", {**LOCAL, "head_dim": 16,
                                                                                 "rotary_dim": 8}),
    "minimax_m3_vl_text": TinyFamily("full attention in every layer", MINIMAX_M3, family="minimax_m3_vl"),
    "mistral4": TinyFamily(
        "latents; the library maps it to no causal language model",
        {**SHARED, **MLA, **ONE_GROUP, "first_k_dense_replace": 1,
         "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "mixtral": TinyFamily("a window in every layer", {**LOCAL, "num_experts_per_tok": 2, "sliding_window": 7}),
    "nemotron_h": TinyFamily(
        "mamba, experts and attention in layers of their own",
        {**SHARED, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "head_dim": 8,
         "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
         "use_mamba_kernels": False, "moe_shared_expert_intermediate_size": 16},
        recurrent=True,
        omit=("num_hidden_layers",),
    ),
    "olmoe": TinyFamily("clipped projections", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0}),
    "phimoe": TinyFamily(
        "slots chosen one after the other, rotary embedding by the batch",
        {**LOCAL, "num_experts_per_tok": 2, "sliding_window": 7},
        replay_refused=("samples",),
    ),
    "qwen2_moe": TinyFamily(
        "shared experts with a gate",
        {**EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "qwen3_5_moe_text": TinyFamily("gated delta nets", QWEN3_NEXT, recurrent=True),
    "qwen3_moe": TinyFamily(
        "a dense layer among MoE layers", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "qwen3_next": TinyFamily("gated delta nets", QWEN3_NEXT, recurrent=True),
    "qwen4_exp_text": TinyFamily(
        "gated delta nets, positions picked by an indexer",
        {**QWEN4, "layer_types": ["linear_attention", "full_attention"] * 2},
        _INDEXED, recurrent=True,
    ),
    "solar_open": TinyFamily("groups", {**SHARED, **GROUPS, "head_dim": 8}),
    "zaya": TinyFamily(
        "convolutions with state",
        {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8,
         "router_hidden_size": 8, "layer_types": ["hybrid"] * 4},
        replay_refused=("selection was seen 0 times",),
        recurrent=True,
    ),
}  # fmt: skip

_VARIANTS: dict[str, TinyFamily] = {
    "cohere2_moe_sigmoid": TinyFamily(
        "every layer sparse, sigmoid scores",
        {**EXPERTS, **WINDOWS, "head_dim": 8, "num_shared_experts": 0, "mlp_layer_types": ["sparse"] * 4,
         "expert_selection_fn": "sigmoid"},
        model_type="cohere2_moe", family="cohere2_moe",
    ),
    "gemma4_text_26b": TinyFamily(
        "keys that are values", GEMMA4, model_type="gemma4_text", family="gemma4_text"
    ),
    "granitemoehybrid_attention": TinyFamily(
        "attention in every layer",
        {**LOCAL, **MAMBA, "shared_intermediate_size": 16, "layer_types": ["full_attention"] * 4,
         "position_embedding_type": "rope"},
        model_type="granitemoehybrid", family="granitemoehybrid",
    ),
    "minimax_m3_sparse": TinyFamily(
        "blocks of positions picked by an indexer",
        {**MINIMAX_M3, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]},
        _INDEXED, model_type="minimax_m3_vl_text", family="minimax_m3_vl",
    ),
    "moonlight": TinyFamily(
        "latents, queries without a rank",
        {**SHARED, **NO_QUERY_RANK, **ONE_GROUP, "first_k_dense_replace": 1, "routed_scaling_factor": 2.4},
        model_type="deepseek_v3", family="deepseek_v3",
    ),
    "qwen2_moe_swa": TinyFamily(
        "windows in some layers",
        {**EXPERTS, "shared_expert_intermediate_size": 16, "use_sliding_window": True, **LATE_WINDOWS},
        model_type="qwen2_moe", family="qwen2_moe",
    ),
    "qwen3_dense": TinyFamily("no experts", {"head_dim": 16}, model_type="qwen3", family="qwen3", dense=True),
    "qwen3_moe_swa": TinyFamily(
        "a window in every layer",
        {**EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        model_type="qwen3_moe", family="qwen3_moe",
    ),
    "qwen4_exp_indexed": TinyFamily(
        "positions picked by an indexer in every layer",
        {**QWEN4, "layer_types": ["indexed_attention"] * 4},
        _INDEXED, model_type="qwen4_exp_text", family="qwen4_exp_text",
    ),
}  # fmt: skip

# text halves of multimodal checkpoints
_WRAPPERS: dict[str, TinyFamily] = {
    "gemma4": TinyFamily(
        "the text half of a multimodal checkpoint", GEMMA4, family="gemma4_text",
        vision={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64},
        wrapper={"audio_config": None, "image_token_id": VOCAB_SIZE - 4, "video_token_id": VOCAB_SIZE - 3,
                 "audio_token_id": VOCAB_SIZE - 2, "boi_token_id": VOCAB_SIZE - 1, "eoi_token_id": VOCAB_SIZE - 5},
    ),
    "glm4v_moe": TinyFamily(
        "the text half of a multimodal checkpoint; rotary sections",
        {**SHARED, **GROUPS, "first_k_dense_replace": 1, "head_dim": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                             "mrope_section": [1, 1, 2]}},
        vision={**QWEN_VISION, "image_size": 16},
        wrapper={"image_token_id": VOCAB_SIZE - 4, "video_token_id": VOCAB_SIZE - 3},
    ),
    "llama4": TinyFamily(
        "the text half of a multimodal checkpoint", LLAMA4, family="llama4_text", replay_refused=_NO_IDS,
        vision={"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "vision_output_dim": 32, "image_size": 28, "patch_size": 14, "projector_input_dim": 32,
                "projector_output_dim": 32},
        wrapper={"image_token_index": VOCAB_SIZE - 4},
    ),
    "minimax_m3_vl": TinyFamily(
        "the text half of a multimodal checkpoint", MINIMAX_M3,
        vision={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14},
        wrapper={"image_token_index": VOCAB_SIZE - 4, "video_token_index": VOCAB_SIZE - 3,
                 "projector_hidden_size": 32},
    ),
    "qwen3_5_moe": TinyFamily(
        "the text half of a multimodal checkpoint", QWEN3_NEXT, recurrent=True, family="qwen3_5_moe_text",
        vision={**QWEN_VISION, "num_position_embeddings": 16}, wrapper=IMAGE_IDS,
    ),
    "qwen3_vl_moe": TinyFamily(
        "the text half of a multimodal checkpoint; rotary sections",
        {**EXPERTS, "head_dim": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
                             "mrope_interleaved": True}},
        vision={**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, wrapper=IMAGE_IDS,
    ),
}  # fmt: skip


def _stored(of: str, how: str, **config: Any) -> TinyFamily:
    """An entry of `_TEXT` whose weights are stored quantised."""
    plain = _TEXT[of]
    return msgspec.structs.replace(
        plain,
        hits=f"stored as {_STORED_NAMES.get(how, how)}: {plain.hits}",
        config={**plain.config, **config},
        model_type=plain.model_type or of,
        family=of,
        quantised=how,
    )


_STORED_NAMES = {"fp8": "FP8", "mxfp4": "MXFP4", "awq": "AWQ", "gptq": "GPTQ", "gptq desc_act": "GPTQ with desc_act"}
_QUANTISED = {
    "deepseek_v3_fp8": _stored("deepseek_v3", "fp8"),
    "gpt_oss_mxfp4": _stored("gpt_oss", "mxfp4", hidden_size=64, intermediate_size=64),  # its blocks have 32 columns
    "kimi_k2_int4": _stored("kimi_k2", "pack-quantized"),
    "minimax_m2_awq": _stored("minimax_m2", "awq"),
    "minimax_m2_fp8": _stored("minimax_m2", "fp8"),
    "qwen3_moe_awq": _stored("qwen3_moe", "awq"),
    "qwen3_moe_compressed_fp8": _stored("qwen3_moe", "float-quantized"),
    "qwen3_moe_fp8": _stored("qwen3_moe", "fp8"),
    "qwen3_moe_gptq": _stored("qwen3_moe", "gptq"),
    "qwen3_moe_gptq_desc_act": _stored("qwen3_moe", "gptq desc_act"),
    "qwen3_moe_int8": _stored("qwen3_moe", "int-quantized"),
    "qwen3_moe_modelopt": _stored("qwen3_moe", "modelopt"),
}

FAMILIES: dict[str, TinyFamily] = {**_TEXT, **_VARIANTS, **_WRAPPERS, **_QUANTISED}


def family_of(name: str) -> str:
    """The family that an entry is counted with."""
    return FAMILIES[name].family or name
