"""The models of `gpu_serving --model`: published shapes, with as many layers as fit beside their KV.

A layer is left out only where weights and the KV of 256 contexts would take more than 120 GB; every width is as
published. Knows no torch. Read by `scale.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.lib.published_shapes import SHAPES, Shape, tiny

#: huggingface.co/deepseek-ai/DeepSeek-V2-Lite; here, since `gpu_shapes` has latents by larger models of the family
DEEPSEEK_V2_LITE = Shape(
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    dense=1,
)
#: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct: three layers of gated delta nets, then one of attention
QWEN3_NEXT = Shape(
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    period=4,
)
DEFAULT_MODEL = "qwen3-30b-a3b"
HYBRID_MODEL = "qwen3-next-80b-a3b"


@dataclass(frozen=True)
class Served:
    """A model of the benchmark.

    Attributes:
        shape: as published.
        layers: that are kept.
    """

    shape: Shape
    layers: int

    def config(self, *, small: bool = False) -> dict[str, Any]:
        """Of the layers that are kept; `small`: every width too, and the fewest layers that have all kinds."""
        return tiny(self.shape.cut(self.shape.least_layers)) if small else self.shape.cut(self.layers)


#: by the name that `--model` takes
MODELS = {
    DEFAULT_MODEL: Served(SHAPES["Qwen3-30B-A3B"], 48),
    # of 46: weights of 92 GB and KV of 27; a layer of experts takes 4.7 and 1.3
    "glm-4.5-air": Served(SHAPES["GLM-4.5-Air"], 20),
    "deepseek-v2-lite": Served(DEEPSEEK_V2_LITE, 27),
    # of 48: weights of 53 GB, and 7 GB of states for 256 sequences; fits 80 GB
    HYBRID_MODEL: Served(QWEN3_NEXT, 16),
}
