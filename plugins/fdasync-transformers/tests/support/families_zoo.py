"""Tiny random checkpoints of many MoE families, made with the library's own config classes.

Small enough to write and load in milliseconds, odd enough to hit what sets each family apart: dense
layers among MoE layers, windows, sinks, groups, latent attention, uneven top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 128

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}

# class prefix, and what differs from the base
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe_swa": (
        "Qwen3Moe",
        {**_QWEN, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_QWEN, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "qwen2_moe_swa": (
        "Qwen2Moe",
        {
            **_QWEN,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": ("Glm4Moe", {**_GROUPS, "head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**_GROUPS, **_MLA, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_GROUPS,
            **_MLA,
            "topk_method": "group_limited_greedy",
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**_GROUPS, **_MLA, "rope_parameters": _YARN}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": [2, 3, 1], "head_dim": 16}),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7}),
    "llama4_text": (
        "Llama4",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "attn_temperature_tuning": True,
            "floor_scale": 5,
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            **_MLA,
            "num_layers": 2,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "head_dim": 4,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_QWEN, "head_dim": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},
    ),
    "jamba": ("Jamba", {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False}),
    "qwen3_dense": ("Qwen3", {"head_dim": 16}),
}


def config_of(family: str, **overrides: Any) -> Any:
    """A tiny config of a family."""
    prefix, extra = FAMILIES[family]
    cls = getattr(transformers, f"{prefix}TextConfig" if family == "llama4_text" else f"{prefix}Config")
    values = {**_BASE, **extra, **overrides}
    if family == "longcat_flash":
        for name in ("intermediate_size", "num_hidden_layers"):
            values.pop(name)
    return cls(**values)


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model whose biases and routers are random too, so that nothing passes by symmetry."""
    config = config_of(family, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if "correction_bias" in name or name.endswith(("bias", "sinks")):
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
            elif tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape) * (1.2 / tensor.shape[-1] ** 0.5))
    return model.eval()


def make_checkpoint(folder: Path, family: str, seed: int = 0, *, shards: bool = False, **overrides: Any) -> Any:
    """Save a tiny checkpoint; returns the model that was saved."""
    model = make_model(family, seed, **overrides)
    size = "40KB" if shards else "50GB"
    model.save_pretrained(folder, max_shard_size=size)
    return model
