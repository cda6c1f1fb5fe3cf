"""Treats tied tensors (as a rule the output head and the input embeddings) as the library does.

A folder may have several names of one tensor. With equal values they are one. With different values the library
believes the folder and not the config, and leaves them apart, at a first load too (`loading.load`). A model in use
keeps its memory: names with memory of their own may become equal or differ, names that share memory can only stay
equal. Reads tensors to compare them, changes nothing. Called by `mapping.py` and `update.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.open_shards import OpenShards, bands
from fdasync_transformers.weights.reading import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from fdasync_transformers.weights.placement import Placement
    from fdasync_transformers.weights.shards import StoredTensor

# of one band of rows in float32
_COMPARED_NBYTES = 64 << 20


class Settled(NamedTuple):
    """How to load a folder's tied tensors into a model in use.

    Attributes:
        placements: of the tensors to read; one for each value.
        copies: names that get the value of another name after that: {name: the other}.
    """

    placements: dict[str, Placement]
    copies: dict[str, str]


def tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Groups of names that the config ties, in the order in which the library looks for a value.

    By the config, whether or not the model has them apart. `model` may be on the meta device.
    """
    groups: dict[str, list[str]] = {}
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())


def settle(model: PreTrainedModel, tensors: Mapping[str, StoredTensor], placements: Mapping[str, Placement]) -> Settled:
    """Plan how to load a folder into the memory of a model in use, with the values that the library would load.

    Args:
        model: in use; not on the meta device.
        tensors: of the folder.
        placements: of the tensors, by `mapping.place`.

    Raises CheckpointError where the folder has different values for names that share memory in the model, and for a
    file that cannot be read.
    """
    state = model.state_dict()
    memory = {name: (tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in state.items()}
    key_of = {placement.target: key for key, placement in placements.items()}
    kept = dict(placements)
    copies: dict[str, str] = {}
    for names in tied_groups(model):
        given = [name for name in names if name in key_of]
        if not given:
            continue
        first = given[0]
        # name of the stored tensor that has the value of each name
        values = dict.fromkeys(names, first)
        for name in given[1:]:
            if not _equal(tensors[key_of[first]], tensors[key_of[name]], state[name]):
                values[name] = name
        by_memory: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, value in values.items():
            other = by_memory.setdefault(memory[name], value)
            if other != value:
                raise CheckpointError(
                    str(tensors[key_of[value]].file),
                    f"{key_of[value]} differs from {key_of[other]}: the config makes them one, and the model was loaded"
                    " with them as the same memory, so they cannot come apart in an update (the library leaves them"
                    " apart, and so does an engine that is started from such a folder)",
                )
            if value != name:
                kept.pop(key_of.get(name, ""), None)
                if memory[name] != memory[value]:
                    copies[name] = value
    return Settled(kept, copies)


def _equal(one: StoredTensor, other: StoredTensor, target: torch.Tensor) -> bool:
    """Whether two stored tensors of the target's shape are equal after loading, as the library compares them."""
    with OpenShards() as shards:
        for first, last in bands(tuple(target.shape), _COMPARED_NBYTES):
            rows = rows_of(shards, one, first, last, target)
            if not torch.equal(rows, rows_of(shards, other, first, last, target)):
                return False
    return True
