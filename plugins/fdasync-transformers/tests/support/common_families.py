"""Entries of the catalogue that tests of single parts play; `tests.nightly.families` plays engines of all of them."""

from __future__ import annotations

SERVED = (
    "qwen3_moe",
    "qwen3_moe_swa",
    "qwen2_moe",
    "qwen2_moe_swa",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "hunyuan_v1_moe",
    "granitemoe",
    "phimoe",
    "llama4_text",
    "longcat_flash",
    "qwen3_dense",
)
#: positions picked by indexers: without fixed numerics
INDEXED = ("deepseek_v32", "glm_moe_dsa")
COMMON = (*SERVED, "qwen3_next", "jamba", *INDEXED)
#: names on disk of their own: tied embeddings, renamed experts, fused ones
STORED = ("ernie4_5_moe", "mixtral", "granitemoe")
#: unlike each other in the names and shapes of their tensors
AHEAD = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "llama4_text", "qwen3_next")
