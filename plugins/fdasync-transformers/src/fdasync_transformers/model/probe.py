"""Finds the shapes and reaches of a loaded model's attention layers by one forward pass of one token.

Config fields differ between families, and some are wrong or missing; the model's own calls are right. A probe attention
function notes the tensors that each layer hands over, and a probe mask function gives each layer a note of the mask
that the library would have built. Knows no steps. Called at start, by `open_model.py` and `examine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import AttentionInterface, DynamicCache, masking_utils
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from fdasync.errors import UnsupportedModel
from fdasync_transformers.model.attention import NOT_DONE
from fdasync_transformers.model.families import decoder_layers
from fdasync_transformers.model.indexers import key_specs, noted_keys
from fdasync_transformers.model.kv import LayerSpec, Reach

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

PROBE = "fdasync_probe"

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class MaskNote:
    """The inputs of a mask of the library, passed through the model in place of the mask.

    Attributes:
        function: of the library: whether a query sees a key.
        local_size: of a window or chunk; None for others.
    """

    function: MaskFunction
    local_size: int | None

    def __getitem__(self, _: object) -> MaskNote:
        """What models with indexers take of a mask: all heads' part."""
        return self


class ProbeLog:
    """Notes of the layers' calls, in their order; goes through the forward pass as `fd_ctx`.

    Attributes:
        model_type: of the model.
        layers: by layer index, (module, kv heads, key dim, value dim, mask note or None).
        query_heads: by layer index.
        chosen: indices of layers that are handed the positions that their queries read.
        index_nbytes: by layer index, of a key of its indexer.
    """

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.layers: dict[int, tuple[torch.nn.Module, int, int, int, MaskNote | None]] = {}
        self.query_heads: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.index_nbytes: dict[int, int] = {}


class Attention(NamedTuple):
    """The attention layers of a whole model, by their index.

    Attributes:
        layers, names, queries: spec, name of the module, and query heads of each.
    """

    layers: dict[int, LayerSpec]
    names: dict[int, str]
    queries: dict[int, int]


def attention_layers(
    model: PreTrainedModel, *, latent: bool, query_scales: Mapping[int, tuple[float, float]], reaches: bool = True
) -> tuple[LayerSpec, ...]:
    """The spec of every attention layer, by rising layer index; then of the keys of the indexers, where it has any.

    Args:
        model: loaded, or on the meta device without `reaches`.
        latent: page the latents of MLA layers instead of the expanded keys and values.
        query_scales: of layers whose queries grow with their position.
        reaches: find them; else every layer gets the full one, which is enough to know sizes.

    Raises UnsupportedModel where a decoder layer does not attend through the library's interface (it keeps other state,
    or none), where no `kv.Reach` describes a mask, and where an indexer picks positions that no attention takes.
    """
    log = run(model)
    name = str(model.config.model_type)
    depth = len(decoder_layers(model))
    # some families have two attentions in each layer
    all_attend = len(log.layers) % depth == 0 and sorted(log.layers) == list(range(len(log.layers)))
    if not log.layers or not (all_attend or set(range(depth)) - set(log.layers) <= _without_kv(model)):
        which = f"layers {sorted(log.layers)}" if log.layers else "none"
        raise UnsupportedModel(
            name, f"of its {depth} layers {which} attend through the library's attention interface, and all must"
        )
    specs = []
    for index, (module, heads, key_dim, value_dim, note) in sorted(log.layers.items()):
        rank = latent_rank(module) if latent else 0
        if rank:
            # a number, which torch does not know
            heads, key_dim, value_dim = 1, rank + int(module.qk_rope_head_dim), 0  # type: ignore[arg-type]
        reach = _reach(note, name) if reaches else Reach()
        if index in log.chosen and reach != Reach():
            raise UnsupportedModel(name, f"layer {index} reads positions that an indexer picked within a {reach.kind}")
        specs.append(LayerSpec(index, heads, key_dim, value_dim, reach, rank, query_scales.get(index)))
    if lost := sorted(log.index_nbytes.keys() - log.chosen):
        raise UnsupportedModel(name, f"the attention of layers {lost} is not handed the positions that indexers picked")
    return (*specs, *key_specs(log.index_nbytes, max(log.layers) + 1, model.dtype))


def register() -> None:
    """Make the probe known to the library under `PROBE`; harmless when repeated."""
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)


def run(model: PreTrainedModel) -> ProbeLog:
    """The notes of one pass of one token. `model` may be on the meta device."""
    register()
    log = ProbeLog(str(model.config.model_type))
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        unpacked = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with torch.no_grad(), noted_keys(model, log.index_nbytes), unpacked:
            # the search for packed sequences would read positions back, which a model without memory has not
            model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, fd_ctx=log)
    finally:
        model.set_attn_implementation(before)
    return log


def _without_kv(model: PreTrainedModel) -> set[int]:
    """Layers that have no KV, as the library's cache has it: they keep recurrent state, or none at all."""
    cache: Any = DynamicCache(config=model.config)
    return {number for number, layer in enumerate(cache.layers) if not isinstance(layer, CacheLayerMixin)}


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskNote | None,
    *,
    fd_ctx: ProbeLog | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if fd_ctx is None:
        kind = str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))
        raise UnsupportedModel(kind, f"{type(module).__name__} is not handed the arguments of the model's call")
    index = int(module.layer_idx)  # type: ignore[arg-type]  # a number, which torch does not know
    for name in NOT_DONE:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(fd_ctx.model_type, f"attention with {name!r}")
    if kwargs.get("indices") is not None:
        if not fd_ctx.index_nbytes:
            raise UnsupportedModel(fd_ctx.model_type, "attention with 'indices' that no known indexer picked")
        fd_ctx.chosen.add(index)
    fd_ctx.layers[index] = (module, key.shape[1], key.shape[3], value.shape[3], attention_mask)
    fd_ctx.query_heads[index] = query.shape[1]
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def _probe_mask(*, mask_function: MaskFunction, local_size: int | None = None, **kwargs: Any) -> MaskNote:
    del kwargs
    return MaskNote(mask_function, local_size)


def latent_rank(module: torch.nn.Module) -> int:
    """The rank of a latent (MLA) attention layer whose latents can be paged; else 0."""
    parts = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "expand_kv")
    # a number, which torch does not know
    return int(module.kv_lora_rank) if all(hasattr(module, part) for part in parts) else 0  # type: ignore[arg-type]


def _reach(note: MaskNote | None, model: str) -> Reach:
    """The reach whose mask equals the library's at positions around its size."""
    if note is None:
        raise UnsupportedModel(model, "an attention layer is given no causal mask")
    size = int(note.local_size or 0)
    choices = [Reach("window", size), Reach("chunk", size)] if size else [Reach()]
    edge = size or 8
    positions = sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 2 * edge + 1} - {-1})
    pairs = [(q, k) for q in positions for k in positions]
    said = [bool(note.function(0, 0, torch.tensor(q), torch.tensor(k))) for q, k in pairs]
    for reach in choices:
        if said == [_sees(reach, q, k) for q, k in pairs]:
            return reach
    raise UnsupportedModel(model, f"an attention layer has a mask that is neither causal, window nor chunk ({size})")


def _sees(reach: Reach, query: int, key: int) -> bool:
    if key > query:
        return False
    if reach.kind == "window":
        return key > query - reach.size
    return reach.kind == "full" or key // reach.size == query // reach.size
