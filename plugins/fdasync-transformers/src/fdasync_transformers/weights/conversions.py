"""Makes tensors of a model of stored ones that have another form, by the library's own conversion code.

Most checkpoints need none of this: `mapping.py` copies experts to their rows. Other conversions (interleaved halves,
concatenated convolutions) run as the library's `WeightConverter`, once on the meta device to learn names and shapes of
the results before memory is taken, and again while the folder is read. Knows no folders. Called by `mapping.py` and
`reading.py`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import UnsupportedModel
from fdasync_transformers.weights.shards import FLOATS, Converted, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


def planned(
    rule: WeightConverter,
    layer_name: str,
    sources: Sequence[tuple[str, StoredTensor]],
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
) -> dict[str, StoredTensor]:
    """The tensors that a rule of the library makes of stored ones, by their names in `state`.

    Args:
        rule: of the library.
        layer_name: of the first tensor that it makes.
        sources: (pattern, tensor) in the library's order.
        model: whose names `state` has; may be on the meta device.
        state: of the model.

    Raises UnsupportedModel where the library's code cannot make them.
    """
    empty = [
        (pattern, torch.empty(stored.shape, dtype=_dtype_of(stored, state[layer_name]), device="meta"))
        for pattern, stored in sources
    ]
    kept = tuple(sources)
    first = kept[0][1]
    try:
        made = _run(rule, layer_name, empty, model)
    except Exception as error:  # the library's conversions raise errors of many types
        names = ", ".join(stored.name for _, stored in kept[:3])
        raise UnsupportedModel(
            str(model.config.model_type), f"the library cannot convert {names} ({rule.operations}): {error}"
        ) from error
    return {
        name: StoredTensor(
            name, first.file, first.dtype, tuple(tensor.shape), None, Converted(rule, layer_name, name, kept, model)
        )
        for name, tensor in made.items()
    }


def run(converted: Converted, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The tensor that is meant, of the tensors of all sources in their order."""
    sources = [(pattern, tensor) for (pattern, _), tensor in zip(converted.sources, tensors, strict=True)]
    return _run(converted.rule, converted.layer_name, sources, converted.model)[converted.name]


def _run(
    rule: WeightConverter, layer_name: str, sources: Sequence[tuple[str, torch.Tensor]], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    # a rule collects its tensors in itself
    fresh: Any = deepcopy(rule)
    for pattern, tensor in sources:
        fresh.add_tensor(layer_name, layer_name, pattern, tensor)
    made = fresh.convert(layer_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _dtype_of(stored: StoredTensor, target: torch.Tensor) -> torch.dtype:
    return target.dtype if stored.dtype in FLOATS else torch.int64
