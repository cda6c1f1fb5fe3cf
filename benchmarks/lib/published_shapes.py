"""Configurations of ten published models, cut to fewer layers, with every width as published.

What is cut: `num_hidden_layers` and the lists and counts that follow from it; of several dense layers at the head one
stays. Nothing else is changed but for `quantization_config`, which a config keeps apart (`quantised`): its weights are
drawn plain unless a run asks for the form that was published. Keys that the library does not know (`auto_map`, what
concerns training and further predicted tokens) are left out.

Sources: config.json of each model's repository on the Hugging Face hub, by the copies of them in public code and
documents. `tests/benchmarks/test_published_shapes.py` holds every value against the library's defaults for the family
where the library took its defaults from that model. Knows no engine. Used by `benchmarks/gpu` and `tests/nightly`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@dataclass(frozen=True)
class Shape:
    """One published model.

    Attributes:
        config: its config.json, whole.
        dense: layers without experts at its head.
        period: layers after which the kinds of attention repeat.
        quantised: its published `quantization_config`; empty: it was published plain.
        differs: keys in which the library's defaults for the family are of another model, or of an earlier form.
    """

    config: dict[str, Any]
    dense: int = 0
    period: int = 1
    quantised: dict[str, Any] = field(default_factory=dict)
    differs: frozenset[str] = frozenset()

    @property
    def least_layers(self) -> int:
        """One dense layer where there are some, two of experts, and every kind of attention."""
        return max(min(self.dense, 1) + 2, self.period)

    @property
    def most_layers(self) -> int:
        """As published, without the dense layers that are cut."""
        return int(self.config["num_hidden_layers"]) - max(self.dense - 1, 0)

    def cut(self, layers: int) -> dict[str, Any]:
        """The config with so many layers. Raises ValueError for fewer or more than there can be."""
        if not self.least_layers <= layers <= self.most_layers:
            raise ValueError(f"{layers} layers are not from {self.least_layers} to {self.most_layers}")
        config = {**self.config, "num_hidden_layers": layers}
        for name in ("layer_types", "attn_type_list"):
            if name in config:
                config[name] = config[name][:layers]
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(self.dense, 1)
        if "moe_layer_end_index" in config:
            config["moe_layer_end_index"] = layers - 1
        return config


_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_QWEN3_DIFFERS = frozenset({"max_position_embeddings", "num_hidden_layers", "bos_token_id", "eos_token_id"}) | {
    "norm_topk_prob"
}
_GLM4: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
    "torch_dtype": "bfloat16",
}
_GLM4_DIFFERS = frozenset({"attention_bias", "eos_token_id", "pad_token_id"})
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_DIFFERS = frozenset({"max_position_embeddings"})

SHAPES: dict[str, Shape] = {
    # huggingface.co/Qwen/Qwen3-30B-A3B
    "Qwen3-30B-A3B": Shape(
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
        },
        differs=_QWEN3_DIFFERS,
    ),
    # huggingface.co/Qwen/Qwen3-235B-A22B
    "Qwen3-235B-A22B": Shape(
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        differs=_QWEN3_DIFFERS | {"hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads"},
    ),
    # huggingface.co/zai-org/GLM-4.5-Air
    "GLM-4.5-Air": Shape(
        _GLM4
        | {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_hidden_layers": 46,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        dense=1,
        differs=_GLM4_DIFFERS,
    ),
    # huggingface.co/zai-org/GLM-4.6
    "GLM-4.6": Shape(
        _GLM4
        | {
            "first_k_dense_replace": 3,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_hidden_layers": 92,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        dense=3,
        # the defaults are those of the Air
        differs=_GLM4_DIFFERS
        | {"first_k_dense_replace", "hidden_size", "intermediate_size", "max_position_embeddings", "use_qk_norm"}
        | {"moe_intermediate_size", "n_routed_experts", "num_hidden_layers", "routed_scaling_factor"},
    ),
    # huggingface.co/deepseek-ai/DeepSeek-V3
    "DeepSeek-V3": Shape(
        _DEEPSEEK
        | {
            "model_type": "deepseek_v3",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 163840,
            "n_group": 8,
            "n_routed_experts": 256,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "vocab_size": 129280,
        },
        dense=3,
        quantised=_FP8,
        differs=_DEEPSEEK_DIFFERS,
    ),
    # huggingface.co/moonshotai/Kimi-K2-Instruct
    "Kimi-K2": Shape(
        _DEEPSEEK
        | {
            "model_type": "kimi_k2",
            "bos_token_id": 163584,
            "eos_token_id": 163585,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rope_scaling": {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "vocab_size": 163840,
        },
        dense=1,
        quantised=_FP8,
        # held against deepseek_v3, whose code it runs
        differs=_DEEPSEEK_DIFFERS
        | {"eos_token_id", "first_k_dense_replace", "n_group", "n_routed_experts", "num_attention_heads"}
        | {"num_key_value_heads", "num_nextn_predict_layers", "routed_scaling_factor", "topk_group"}
        | {"vocab_size", "bos_token_id"},
    ),
    # huggingface.co/MiniMaxAI/MiniMax-M2
    "MiniMax-M2": Shape(
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "attention_dropout": 0.0,
            "attn_type_list": [1] * 62,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "initializer_range": 0.02,
            "intermediate_size": 1536,
            "max_position_embeddings": 196608,
            "num_attention_heads": 48,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": 200064,
            "torch_dtype": "bfloat16",
        },
        quantised=_FP8,
    ),
    # huggingface.co/openai/gpt-oss-120b
    "gpt-oss-120b": Shape(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": 200002,
            "pad_token_id": 199999,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
            "torch_dtype": "bfloat16",
        },
        period=2,
        quantised=_MXFP4,
        differs=frozenset({"eos_token_id", "pad_token_id", "router_aux_loss_coef"}),
    ),
    # huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT
    "ERNIE-4.5-21B-A3B": Shape(
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_layer_end_index": 27,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "num_attention_heads": 20,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103424,
            "torch_dtype": "bfloat16",
        },
        dense=1,
    ),
    # huggingface.co/mistralai/Mixtral-8x7B-v0.1
    "Mixtral-8x7B": Shape(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            "torch_dtype": "bfloat16",
        },
        # 4096 * 32 positions are the default, and the coefficient is of training
        differs=frozenset({"max_position_embeddings", "router_aux_loss_coef"}),
    ),
}

# what `tiny` puts in the place of a width
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "moe_num_experts": 16,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "moe_k": 4,
    "n_group": 4,
    "topk_group": 2,
    "sliding_window": 12,
    "vocab_size": 272,
    "max_position_embeddings": 4096,
}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with every width small: kinds of layers, of heads, of routers and of positions stay."""
    small = dict(config)
    for name, value in _TINY.items():
        held = config.get(name)
        # 1 group is no group, and an absent window is none
        if isinstance(held, int) and held > 1:
            small[name] = min(held, value)
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
