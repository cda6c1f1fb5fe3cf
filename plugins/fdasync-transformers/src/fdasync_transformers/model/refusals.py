"""Which models cannot be served, and the true reason, read from a model's modules and config.

Flattened, paged batches are right for attention over KV and for nothing that keeps other state. The self-check would
find such models too, but could not say what is wrong with them. Needs no weights: models may be on the meta device.
Knows no KV and no steps. Called by `open_model.py` and `replay/packing.py`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fdasync.errors import UnsupportedModel
from fdasync_transformers.model.indexers import find_indexers, picks_positions
from fdasync_transformers.model.recurrent.mixers import find_mixers, source_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning_attention")
# the library's scan of Mamba 1
_SCAN = "mamba_selective_scan"
# arguments without a default that a mixer may have beside hidden states, a cache and masks
_NOT_BY_TOKEN = ("position_embeddings",)
# the library's names of modules that choose which keys a query sees, or shorten them
_SPARSE = {
    "indexer": "sparse attention with an indexer that does not keep one key a token and return positions",
    "compressor": "attention over compressed keys",
}


def refuse_unservable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, with every reason, for a model whose flattened batches would be silently wrong."""
    config: PreTrainedConfig = model.config
    reasons = [
        *_hidden_state(model),
        *_forgetful(model),
        *_uncut(model),
        *_sparse(model),
        *_masked(model),
        *_hashed(model),
        *_ropes(config),
    ]
    if reasons:
        raise UnsupportedModel(str(config.model_type), "; ".join(reasons))


def refuse_recurrent(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model that keeps recurrent state beside KV, or instead of it."""
    if reasons := list(_recurrent(model)):
        raise UnsupportedModel(str(model.config.model_type), "; ".join(reasons))


def refuse_indexed(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model with attention to positions that an indexer picks."""
    if indexers := find_indexers(model):
        reason = f"attention to positions that an indexer picks ({indexers[0].name})"
        raise UnsupportedModel(str(model.config.model_type), reason)


def _recurrent(model: torch.nn.Module) -> Iterator[str]:
    kinds = _recurrent_types(model)
    if kinds:
        yield f"layers of type {', '.join(kinds)} keep recurrent state instead of KV"
    elif mixers := find_mixers(model):
        yield f"{mixers[0].name} ({type(mixers[0].module).__name__}) keeps recurrent state beside KV"


def _hidden_state(model: torch.nn.Module) -> Iterator[str]:
    kinds = _recurrent_types(model)
    if kinds and not find_mixers(model):
        yield f"layers of type {', '.join(kinds)} keep recurrent state, and not in the library's cache"


def _forgetful(model: torch.nn.Module) -> Iterator[str]:
    for mixer in find_mixers(model):
        kind = type(mixer.module)
        forward: Any = inspect.unwrap(kind.forward)
        scan = forward.__globals__.get(_SCAN)
        if scan is None or f"{_SCAN}(" not in source_of(kind):
            continue
        if not any("initial" in name for name in inspect.signature(inspect.unwrap(scan)).parameters):
            yield f"{mixer.name} ({kind.__name__}) cannot go on from a recurrent state: the library's scan takes none"
            return


def _uncut(model: torch.nn.Module) -> Iterator[str]:
    seen = set()
    for mixer in find_mixers(model):
        kind = type(mixer.module)
        more = [name for name in mixer.others if name not in _NOT_BY_TOKEN and not name.endswith("mask")]
        if mixer.hidden != "hidden_states":
            more.insert(0, mixer.hidden)
        if more and kind not in seen:
            seen.add(kind)
            what = f"{mixer.name} ({kind.__name__}) keeps state, and takes {', '.join(more)}"
            yield f"{what}: of each sequence it gets hidden states alone"


def _recurrent_types(model: torch.nn.Module) -> list[str]:
    config: Any = model.config
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    return sorted({str(kind) for kind in types if kind in _RECURRENT_LAYER_TYPES})


def _sparse(model: torch.nn.Module) -> Iterator[str]:
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if last in _SPARSE and not picks_positions(module):
            found.setdefault(last, path)
    for last, path in found.items():
        yield f"{_SPARSE[last]} ({path})"


def _masked(model: torch.nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        # of doge's attention
        if hasattr(module, "prepare_dynamic_mask"):
            yield f"attention with a dynamic mask, which picks keys by their values ({path})"
            return


def _hashed(model: torch.nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if type(module).__name__.endswith("HashRouter"):
            yield f"hash-routed layers, which need the token ids of a sequence beside its hidden states ({path})"
            return


def _ropes(config: PreTrainedConfig) -> Iterator[str]:
    for rope in sorted(set(_rope_types(config))):
        # both choose their frequencies for a whole batch, by its longest sequence; phimoe's is mended
        if rope == "dynamic" or (rope == "longrope" and config.model_type != "phimoe"):
            yield f"rope type {rope!r} makes a sequence depend on the others in its batch"


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
