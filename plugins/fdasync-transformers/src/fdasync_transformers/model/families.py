"""Special cases of model families: which models are refused, and one mend, one function for each family in need.

`probe.py` and `moe_layers.py` find out the other facts of a model, and `selfcheck.py` proves them. Knows configs and
modules of the library; knows nothing of KV or steps. Called by `runner.py`, `moe_layers.py` and `replay/packing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

_STATEFUL = ("linear_attn", "mamba", "conv", "short_conv", "rwkv", "ssm")
_RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning_attention")


@dataclass(frozen=True)
class Mends:
    """The result of `mend`.

    Attributes:
        query_scales: by layer index, (floor scale, attention scale) for the attention function to apply.
        max_context_tokens: a tighter bound on the context than the config's, or None.
        notes: for people.
    """

    query_scales: dict[int, tuple[float, float]]
    max_context_tokens: int | None
    notes: tuple[str, ...]


def refuse_unservable(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel for models whose flattened batches would be silently wrong."""
    name = str(config.model_type)
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    recurrent = sorted({str(kind) for kind in types if kind in _RECURRENT_LAYER_TYPES})
    if recurrent:
        raise UnsupportedModel(name, f"layers of type {', '.join(recurrent)} keep recurrent state instead of KV")
    for rope in _rope_types(config):
        # both choose their frequencies for a whole batch, by its longest sequence
        if rope == "dynamic" or (rope == "longrope" and name != "phimoe"):
            raise UnsupportedModel(name, f"rope type {rope!r} makes a sequence depend on the others in its batch")


def refuse_stateful(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for modules that keep recurrent state instead of KV."""
    for path, _ in model.named_modules():
        if path.rpartition(".")[2] in _STATEFUL:
            raise UnsupportedModel(str(model.config.model_type), f"{path} keeps recurrent state instead of KV")


def decoder_of(model: PreTrainedModel) -> Any:
    """The module that holds the decoder layers as `layers`."""
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), torch.nn.ModuleList):
            return module
    raise UnsupportedModel(str(model.config.model_type), "it has no list of decoder layers")


def mend(model: PreTrainedModel) -> Mends:
    """Apply the mends that the model's family needs, in place."""
    kind = str(model.config.model_type)
    if kind == "llama4_text":
        return _mend_llama4(model)
    if kind == "phimoe":
        return _mend_phimoe(model)
    return Mends({}, None, ())


def num_hidden_layers(config: PreTrainedConfig) -> int:
    """How many hidden layers there are, dense ones included."""
    return int(getattr(config, "num_layers", None) or config.num_hidden_layers)


def expected_moe_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Hidden-layer numbers of the MoE layers, as the config says; () for a dense model."""
    depth = num_hidden_layers(config)
    if not _expert_count(config):
        return ()
    if getattr(config, "moe_layers", None) is not None:
        return tuple(sorted(int(layer) for layer in config.moe_layers))
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return tuple(layer for layer, kind in enumerate(kinds) if kind != "dense")
    layers = range(depth)
    if getattr(config, "decoder_sparse_step", None) is not None:
        dense = set(getattr(config, "mlp_only_layers", None) or ())
        step = int(config.decoder_sparse_step)
        return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    if getattr(config, "moe_layer_interval", None) is not None:
        first, last = int(config.moe_layer_start_index), int(config.moe_layer_end_index)
        step = int(config.moe_layer_interval)
        return tuple(layer for layer in layers if first <= layer <= last and (layer + 1) % step == 0)
    return tuple(layer for layer in layers if layer >= int(getattr(config, "first_k_dense_replace", None) or 0))


def expected_top_k(config: PreTrainedConfig, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Experts per token of each MoE layer. Raises UnsupportedModel where the config does not say."""
    for field in ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"):
        value: Any = getattr(config, field, None)
        if isinstance(value, list | tuple):
            return tuple(int(value[layer]) for layer in layers)
        if value is not None:
            return (int(value),) * len(layers)
    raise UnsupportedModel(str(config.model_type), "its config does not say how many experts a token uses")


def _expert_count(config: PreTrainedConfig) -> int:
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        value = getattr(config, field, None)
        if value:
            return max(value) if isinstance(value, list | tuple) else int(value)
    return 0


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Every rope type in the config, also of single layer types."""
    found: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while found:
        value = found.pop()
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if isinstance(kind, str):
                yield kind
            found.extend(value.values())


def _mend_llama4(model: PreTrainedModel) -> Mends:
    """Query temperature by absolute position: the model's own code counts rows of the batch."""
    scales: dict[int, tuple[float, float]] = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "use_rope"):
            attention: Any = module
            attention.attn_temperature_tuning = False
            if not attention.use_rope:
                scales[int(attention.layer_idx)] = (float(attention.floor_scale), float(attention.attn_scale))
    return Mends(scales, None, ("llama4: query temperature by absolute position",) if scales else ())


def _mend_phimoe(model: PreTrainedModel) -> Mends:
    """Rotary embedding by token alone: the model's own picks its scale by the longest sequence of the batch.

    With longrope a sequence that outgrows the original context changes the keys of its past. Cached blocks cannot
    change, so the context ends there; within it both agree exactly.
    """
    decoder = decoder_of(model)
    rotary = decoder.rotary_emb
    rope = model.config.rope_parameters
    # the model's own forward computes with the short frequencies too
    frequencies, scale = rotary.rope_init_fn(model.config)
    limit = None
    notes: tuple[str, ...] = ("phimoe: rotary embedding by token",)
    if rope["rope_type"] != "default":
        scale = rope["short_mscale"]
        limit = int(rope["original_max_position_embeddings"])
        notes = (*notes, f"phimoe: context ends at {limit} tokens, where longrope would change cached keys")
    decoder.rotary_emb = PositionRotary(frequencies.to(model.device), float(scale))
    return Mends({}, limit, notes)


class PositionRotary(torch.nn.Module):
    """Cosine and sine of each token's position: a function of that position alone."""

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.inv_freq = torch.nn.Buffer(inv_freq.float(), persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [1, T] -> cosine and sine [1, T, D], in the dtype of `x`."""
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return (emb.cos() * self.scale).to(x.dtype), (emb.sin() * self.scale).to(x.dtype)
