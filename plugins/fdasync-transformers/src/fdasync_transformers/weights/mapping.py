"""Maps tensors on disk to their places in the model: names, rows of fused expert weights, shapes.

Uses the library's own conversion table (`transformers.conversion_mapping`), but copies into existing parameters instead
of replacing them, so that a weight update keeps every address. Reads no tensor data: it checks names and shapes. Called
by `loading.py` and `update.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fdasync.errors import CheckpointError, UnsupportedModel
from fdasync_transformers.weights.placement import Placement
from fdasync_transformers.weights.shards import FLOATS
from fdasync_transformers.weights.ties import tied_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from fdasync_transformers.weights.shards import StoredTensor


class Located(NamedTuple):
    """The places of given names.

    Attributes:
        placements: by name, in the order to read them.
        ignored: names that the library leaves out.
        unknown: names without a place in the model.
    """

    placements: dict[str, Placement]
    ignored: list[str]
    unknown: list[str]


def locate(model: PreTrainedModel, names: Iterable[str]) -> Located:
    """Find the place of each name of a checkpoint, or of the model's own state dict.

    `model` may be on the meta device. Raises UnsupportedModel for a conversion that this loader does not know.
    """
    state = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    placements: dict[str, Placement] = {}
    homeless: list[str] = []
    # some renamings expect the library's order
    for key in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            homeless.append(key)
        elif pattern is None:
            placements[key] = Placement(name)
        else:
            placements[key] = _expert_placement(model, key, name, pattern, of_pattern[pattern])
    unknown = _not_ignored(homeless, [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"])
    return Located(placements, [key for key in homeless if key not in unknown], unknown)


def place(model: PreTrainedModel, table: Mapping[str, StoredTensor], folder: Path) -> dict[str, Placement]:
    """Placement of every stored tensor that the model uses, in the order to read them.

    `model` may be on the meta device. Names that the config ties are places of their own here (`ties.py`). Raises
    CheckpointError for missing, unexpected and misshapen tensors, and for two tensors of one place; UnsupportedModel
    for a conversion that this loader does not know.
    """
    state = model.state_dict()
    placements, _, unknown = locate(model, table)
    for key, placement in placements.items():
        stored = table[key]
        problem = misfit(stored.shape, stored.dtype in FLOATS, placement, state[placement.target])
        if problem:
            raise CheckpointError(str(stored.file), f"{key} {problem}")
    if met := meeting(placements):
        one, other = met
        problem = f"holds {other}, and {table[one].file.name} {one}: both are {placements[one].target}"
        raise CheckpointError(str(table[other].file), problem)
    _check_complete(model, state, placements, folder)
    if unknown:
        raise CheckpointError(
            str(table[unknown[0]].file),
            f"holds {len(unknown)} tensors that the model has no place for: {', '.join(unknown[:3])}",
        )
    return placements


def meeting(placements: Mapping[str, Placement], names: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Two tensors of the same place, or of a place and a part of it; None if there are none.

    `names` maps the names of the model's tensors to the first name of their memory.
    """
    places: dict[Placement, str] = {}
    in_parts: dict[str, str] = {}
    for key, placement in placements.items():
        target = placement.target if names is None else names[placement.target]
        where = placement._replace(target=target)
        other = places.get(where) or places.get(Placement(target))
        if other is None and placement.row < 0:
            other = in_parts.get(target)
        if other is not None:
            return other, key
        places[where] = key
        if placement.row >= 0:
            in_parts[target] = key
    return None


def destination(placement: Placement, parameter: torch.Tensor) -> torch.Tensor:
    """The view of the model's tensor that a stored tensor is copied into."""
    if placement.row < 0:
        return parameter
    return parameter[placement.row].chunk(placement.parts, 0)[placement.part]


def misfit(shape: tuple[int, ...], is_float: bool, placement: Placement, target: torch.Tensor) -> str:
    """Why a tensor cannot be copied to its place, for people; "" if it can be."""
    wanted = tuple(target.shape)
    if placement.row >= 0:
        if placement.row >= wanted[0]:
            return f"is expert {placement.row}, the config has {wanted[0]}"
        wanted = (wanted[1] // placement.parts, *wanted[2:])
    if shape != wanted:
        return f"has shape {shape}, the config asks for {wanted}"
    if is_float != target.is_floating_point():
        return f"is of another kind than the model's {str(target.dtype).removeprefix('torch.')}"
    return ""


def _expert_placement(model: PreTrainedModel, key: str, target: str, pattern: str, rule: WeightConverter) -> Placement:
    kinds = [type(operation) for operation in rule.operations]
    dims = [operation.dim for operation in rule.operations if hasattr(operation, "dim")]
    merged = kinds == [MergeModulelist] and dims == [0]
    joined = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), key) if merged or joined else None
    if found is None:
        raise UnsupportedModel(
            str(model.config.model_type), f"{key} needs a conversion that this loader does not know ({rule.operations})"
        )
    parts = len(rule.source_patterns) if joined else 1
    return Placement(target, int(found.group(1)), rule.source_patterns.index(pattern) if joined else 0, parts)


def _check_complete(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], folder: Path
) -> None:
    pieces: dict[str, int] = {}
    whole: dict[str, int] = {}
    for placement in placements.values():
        pieces[placement.target] = pieces.get(placement.target, 0) + 1
        target = state[placement.target]
        whole[placement.target] = 1 if placement.row < 0 else int(target.shape[0]) * placement.parts
    given = set(pieces)
    for names in tied_groups(model):
        # one name of a group is enough
        given.update(names if given.intersection(names) else ())
    missing = _not_ignored(sorted(state.keys() - given), list(model._keys_to_ignore_on_load_missing or ()))
    if missing:
        raise CheckpointError(str(folder), f"{len(missing)} tensors are missing: {', '.join(missing[:3])}")
    for name, count in pieces.items():
        if count != whole[name]:
            raise CheckpointError(str(folder), f"{name} has {count} of {whole[name]} pieces: some experts are missing")


def _not_ignored(names: list[str], patterns: list[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
