"""Values of configs that several tiny families share: what `families.py` makes its entries of."""

from __future__ import annotations

from typing import Any

from fdasync_transformers.weights.random_checkpoints import EOS_ID, PAD_ID, VOCAB_SIZE

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
# names of the experts' numbers, as families have them
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}
ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
SHARED: dict[str, Any] = {**ROUTED, "n_shared_experts": 1}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
ONE_GROUP: dict[str, Any] = {"n_group": 1, "topk_group": 1}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
WINDOWS: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
LATE_WINDOWS: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
}
# fewer positions than prompts have; so many heads that no two positions score exactly 0, where the library's choice
# depends on the length of its rows, and differs between its own passes
INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 8, "index_n_heads": 16}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
NO_QUERY_RANK: dict[str, Any] = {**MLA, "q_lora_rank": None}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "head_dim": 16,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 0, 1],
    "attn_temperature_tuning": True,
    "floor_scale": 5,
}
GEMMA4: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "per_layer_config": {},
    "attention_k_eq_v": True,
    **WINDOWS,
}
MINIMAX_M3: dict[str, Any] = {
    **LOCAL,
    **DENSE_FIRST,
    "head_dim": 8,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 16,
    "rotary_dim": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention"] * 4,
}
QWEN3_NEXT: dict[str, Any] = {
    **EXPERTS,
    **DELTA_NET,
    **LINEAR,
    "head_dim": 16,
    "shared_expert_intermediate_size": 16,
}
QWEN4: dict[str, Any] = {
    **QWEN3_NEXT,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 1000,
}
INKLING: dict[str, Any] = {
    **SHARED,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "head_dim": 8,
    "sliding_window_size": 9,
    "d_rel": 4,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
IMAGE_IDS: dict[str, Any] = {
    "image_token_id": VOCAB_SIZE - 4,
    "video_token_id": VOCAB_SIZE - 3,
    "vision_start_token_id": VOCAB_SIZE - 2,
    "vision_end_token_id": VOCAB_SIZE - 1,
}
