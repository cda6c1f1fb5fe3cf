"""Which models cannot be served, and the true reason, read from a model's modules and config.

Flattened, paged batches are right for attention over KV and for nothing that keeps other state. The self-check would
find such models too, but could not say what is wrong with them. Needs no weights: models may be on the meta device.
Knows no KV and no steps. Called by `open_model.py` and `replay/packing.py`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning_attention")
# the library's cache keeps state of these two kinds beside KV; a module that has such state updates it in its forward
_STATE_CALLS = (".update_conv_state(", ".update_recurrent_state(")
# the library's names of modules that choose which keys a query sees, or shorten them
_SPARSE = {
    "indexer": "sparse attention with an indexer",
    "compressor": "attention over compressed keys",
}


def refuse_unservable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, with every reason, for a model whose flattened batches would be silently wrong."""
    config: PreTrainedConfig = model.config
    reasons = [*_recurrent(model), *_sparse(model), *_masked(model), *_hashed(model), *_ropes(config)]
    if reasons:
        raise UnsupportedModel(str(config.model_type), "; ".join(reasons))


def refuse_recurrent(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model that keeps recurrent state beside KV, or instead of it."""
    if reasons := list(_recurrent(model)):
        raise UnsupportedModel(str(model.config.model_type), "; ".join(reasons))


def _recurrent(model: torch.nn.Module) -> Iterator[str]:
    config: Any = model.config
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    kinds = sorted({str(kind) for kind in types if kind in _RECURRENT_LAYER_TYPES})
    if kinds:
        yield f"layers of type {', '.join(kinds)} keep recurrent state instead of KV"
        return
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        classes.setdefault(type(module), path)
    for kind, path in classes.items():
        if any(call in _source(kind) for call in _STATE_CALLS):
            yield f"{path} ({kind.__name__}) keeps recurrent state beside KV"
            return


def _source(kind: type) -> str:
    forward: Any = getattr(kind, "forward", None)
    try:
        return inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return ""  # built in, or without a file


def _sparse(model: torch.nn.Module) -> Iterator[str]:
    found: dict[str, str] = {}
    for path, _ in model.named_modules():
        last = path.rpartition(".")[2]
        if last in _SPARSE:
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
