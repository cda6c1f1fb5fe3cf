"""Reads one tensor of a checkpoint as the model has it: stored plain, quantised, or made of several.

Knows files and dtypes; knows no models and no names. Called by `loading.py` and `ties.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.weights import conversions
from fdasync_transformers.weights.kept.files import copy_kept
from fdasync_transformers.weights.kept.targets import KeptTarget
from fdasync_transformers.weights.open_shards import bands
from fdasync_transformers.weights.shards import FLOATS

if TYPE_CHECKING:
    from fdasync_transformers.weights.open_shards import OpenShards
    from fdasync_transformers.weights.shards import Converted, StoredTensor

# of one band of rows in float32; the arithmetic takes up to four times as much meanwhile
_BAND_NBYTES = 16 << 20


def copy_stored(shards: OpenShards, stored: StoredTensor, target: Target | KeptTarget) -> None:
    """Copy a stored tensor of the target's shape into it, in its dtype. Raises CheckpointError.

    A quantised tensor is read in bands of rows. A converted one is held whole beside its sources meanwhile.
    """
    if isinstance(target, KeptTarget):
        copy_kept(shards, stored, target, rows_of)
    elif stored.converted is not None:
        target.put(0, _converted(shards, stored.converted, target.tensor))
    elif stored.quantized is None:
        target.put(0, shards.tensor(stored.file, stored.name))
    else:
        for first, last in bands(stored.shape, _BAND_NBYTES):
            target.put(first, stored.quantized.layout.rows(shards, stored, first, last, target.tensor))


def rows_of(shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
    """Rows `first` to `last` (exclusive) in the dtype of `like`. Raises CheckpointError."""
    if stored.converted is not None:
        return _converted(shards, stored.converted, like)[first:last]
    if stored.quantized is None:
        return shards.rows(stored.file, stored.name, first, last).to(like.dtype)
    return stored.quantized.layout.rows(shards, stored, first, last, like)


def _converted(shards: OpenShards, converted: Converted, like: torch.Tensor) -> torch.Tensor:
    sources = []
    for _, stored in converted.sources:
        # the library converts dtypes first
        source = like.new_empty(stored.shape, dtype=like.dtype if stored.dtype in FLOATS else torch.int64)
        copy_stored(shards, stored, Target.whole(source))
        sources.append(source)
    return conversions.run(converted, sources)
