"""Mends of model families, one function for each family in need, and the place of a model's layers.

`probe.py` and `moe_layers.py` find out the other facts of a model, and `selfcheck.py` proves them. Knows configs and
modules of the library; knows nothing of KV or steps. Called by `runner.py`, the producers of aux data and
`replay/packing.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Mends:
    """The result of `mend`.

    Attributes:
        scaled_layers: attention layers whose queries grow with their position, for the attention function to apply.
        max_context_tokens: a tighter bound on the context than the config's, or None.
        notes: for people.
    """

    scaled_layers: tuple[torch.nn.Module, ...]
    max_context_tokens: int | None
    notes: tuple[str, ...]

    @property
    def query_scales(self) -> dict[int, tuple[float, float]]:
        """The (floor scale, attention scale) of each layer, by its index, as the layers have them now."""
        layers: tuple[Any, ...] = self.scaled_layers
        return {int(layer.layer_idx): (float(layer.floor_scale), float(layer.attn_scale)) for layer in layers}


def decoder_of(model: PreTrainedModel) -> Any:
    """The module that holds the decoder layers as `layers` (dbrx: as `blocks`). Raises UnsupportedModel."""
    for module in model.modules():
        if isinstance(_layers_in(module), torch.nn.ModuleList):
            return module
    raise UnsupportedModel(str(model.config.model_type), "it has no list of decoder layers")


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers, dense ones included. Raises UnsupportedModel."""
    layers: torch.nn.ModuleList = _layers_in(decoder_of(model))
    return layers


def _layers_in(module: torch.nn.Module) -> Any:
    return getattr(module, "layers", None) or getattr(module, "blocks", None)


def mend(model: PreTrainedModel) -> Mends:
    """Apply the mends that the model's family needs, in place."""
    kind = str(model.config.model_type)
    if kind in ("llama4", "llama4_text"):
        return _mend_llama4(model)
    if kind == "phimoe":
        return _mend_phimoe(model)
    return Mends((), None, ())


@contextmanager
def mended(model: PreTrainedModel) -> Iterator[Mends]:
    """`mend` for the time of a context: the model has its own parts again afterwards."""
    flag = "attn_temperature_tuning"
    flags = [(vars(module), vars(module)[flag]) for module in model.modules() if flag in vars(module)]
    decoder = decoder_of(model)
    rotary = getattr(decoder, "rotary_emb", None)
    try:
        yield mend(model)
    finally:
        for attributes, value in flags:
            attributes[flag] = value
        if rotary is not None:
            decoder.rotary_emb = rotary


def _mend_llama4(model: PreTrainedModel) -> Mends:
    """Query temperature by absolute position: the model's own code counts rows of the batch."""
    scaled: list[torch.nn.Module] = []
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "use_rope"):
            attention: Any = module
            attention.attn_temperature_tuning = False
            if not attention.use_rope:
                scaled.append(attention)
    return Mends(tuple(scaled), None, ("llama4: query temperature by absolute position",) if scaled else ())


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
    return Mends((), limit, notes)


class PositionRotary(torch.nn.Module):
    """Cosine and sine of each token's position: a function of that position alone."""

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.inv_freq = torch.nn.Buffer(inv_freq.float(), persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [B, T] -> cosine and sine [B, T, D], in the dtype of `x`."""
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return (emb.cos() * self.scale).to(x.dtype), (emb.sin() * self.scale).to(x.dtype)
