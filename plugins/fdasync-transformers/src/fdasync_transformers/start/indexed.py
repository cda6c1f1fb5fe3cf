"""Models with indexers at a start: what they are not served with yet, and why; what their keys take.

Knows configs and layouts; knows no steps. Called by `open_model.py` and `examine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync.runner.chosen import ChosenShape
from fdasync_transformers.model.indexers import KEYS, find_indexers
from fdasync_transformers.start.runner_config import uses_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.model.kv import KVLayout
    from fdasync_transformers.start.runner_config import TransformersConfig


def refuse_undone(kind: str, config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> None:
    """Raise ConfigError, naming the field, for a feature that a model whose indexers pick positions cannot have yet."""
    for field, why in _undone(config, limits, device):
        raise ConfigError(field, f"is not for models with indexers so far, such as {kind}: {why}")


def chosen_shape(model: PreTrainedModel) -> ChosenShape | None:
    """What the indexers pick for a token, where steps tell it; None: the model has none."""
    layers = tuple(indexer.layer for indexer in find_indexers(model))
    return ChosenShape(layers, int(model.config.index_topk)) if layers else None


def index_note(model: PreTrainedModel, layout: KVLayout) -> str:
    """What the indexers pick and what their keys take, for people."""
    specs = [layer for layer in layout.layers if layer.group == KEYS]
    nbytes = sum(layer.token_elements for layer in specs) * layout.dtype.itemsize
    picked = f"attention reads {int(model.config.index_topk):,} positions at most"
    return f"{picked}, which {len(specs)} indexers pick: {nbytes:,} bytes of keys a token"


def _undone(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> Iterator[tuple[str, str]]:
    if uses_kernels(config, device):
        yield "runner_config.device", "no kernel scores positions or reads chosen ones: steps run on CPUs"
    if limits.tensor_parallel > 1:
        yield "tensor_parallel", "ranks do not agree on the positions that each would pick"
    if limits.sum_slices > 1:
        yield "sum_slices", "the sums of scores have no slices"
    if limits.numerics == "fixed":
        yield "numerics", "scores have other bits in a chunk than alone, and another position may be picked"
    if config.mtp:
        yield "runner_config.mtp", "the indexers of multi-token prediction layers have no keys in the blocks"
