"""Configurations of published models, cut to fewer layers, with every width as published.

What is cut: `num_hidden_layers` and the lists and counts that follow from it; of several dense layers at the head one
stays. Nothing else is changed but for `quantization_config`, which a config keeps apart (`quantised`): its weights are
drawn plain unless a run asks for the form that was published. Keys that the library does not know (`auto_map`, what
concerns training and further predicted tokens) are left out.

The values are in `published_shapes.json`: ten models (`SHAPES`), and two more that benchmarks serve (`MORE`). Sources:
config.json of each model's repository on the Hugging Face hub (`source`), by the copies of them in public code and
documents; a `note` is for readers alone. `tests/benchmarks/test_published_shapes.py` holds every value against the
library's defaults for the family where the library took its defaults from that model. Knows no engine. Used by
`benchmarks/gpu`, `benchmarks/engine` and `tests/nightly`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    dense: int
    period: int
    quantised: dict[str, Any]
    differs: frozenset[str]

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


def _shapes(table: dict[str, dict[str, Any]]) -> dict[str, Shape]:
    return {
        name: Shape(
            config=one["config"],
            dense=one.get("dense", 0),
            period=one.get("period", 1),
            quantised=one.get("quantised", {}),
            differs=frozenset(one.get("differs", ())),
        )
        for name, one in table.items()
    }


_KEPT = json.loads(Path(__file__).with_suffix(".json").read_text())
#: by name, as the publishers call them: ten that `python -m tests.nightly shapes` plays, and two more
SHAPES, MORE = _shapes(_KEPT["shapes"]), _shapes(_KEPT["more"])

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
