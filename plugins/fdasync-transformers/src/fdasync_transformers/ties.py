"""Tensors that a config makes one (as a rule the output head and the input embeddings), as the library takes them.

A folder may hold several names of one tensor. With equal values they are one. With others the library believes the
folder and not the config, and leaves them apart; so it is at a first load (`loading.load`, where the library does it).
A model in use keeps the memory that it has: names that have memory of their own may become equal or differ, names that
share memory can only stay equal. Reads tensors to compare them, changes nothing. Called by `weight_map.py` and
`engine/weights.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

    from fdasync_transformers.placement import Placement
    from fdasync_transformers.shards import StoredTensor

_COMPARED_NBYTES = 64 << 20


class Settled(NamedTuple):
    """What to do with a folder's tied tensors in a model in use.

    Attributes:
        placements: those to be read; one for each value.
        copies: names that then get another's value, by name: {name: the other}.
    """

    placements: dict[str, Placement]
    copies: dict[str, str]


def tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Names that the config makes one, in the order in which the library looks for a value of theirs.

    What the config says, whether or not the model has them apart. `model` may be on the meta device.
    """
    groups: dict[str, list[str]] = {}
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())


def settle(model: PreTrainedModel, tensors: Mapping[str, StoredTensor], placements: Mapping[str, Placement]) -> Settled:
    """How the values that the library would load get into the memory that a model in use has.

    Args:
        model: in use; not on the meta device.
        tensors: what a folder holds.
        placements: where it goes, of `weight_map.place`.

    Raises CheckpointError where the folder has names apart that are the same memory of the model, and for a file that
    cannot be read.
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
        # a value is called by the name that it is stored under
        values = dict.fromkeys(names, first)
        for name in given[1:]:
            if not _equal(tensors[key_of[first]], key_of[first], tensors[key_of[name]], key_of[name], state[name]):
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


def _equal(one: StoredTensor, one_key: str, other: StoredTensor, other_key: str, target: torch.Tensor) -> bool:
    """Whether two stored tensors of the target's shape are equal once they are loaded, by the library's own measure."""
    row_nbytes = target[:1].numel() * target.element_size()
    rows = max(1, _COMPARED_NBYTES // max(row_nbytes, 1))
    path: Path = one.file
    try:
        with safe_open(one.file, framework="pt") as one_file:
            path = other.file
            with safe_open(other.file, framework="pt") as other_file:
                slices = one_file.get_slice(one_key), other_file.get_slice(other_key)
                return all(
                    torch.equal(*[part[first : first + rows].to(target.dtype) for part in slices])
                    for first in range(0, target.shape[0], rows)
                )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), f"cannot be read: {error}") from error
