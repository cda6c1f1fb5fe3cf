"""Maps tensors on disk to their places in the model: names, rows of fused expert weights, shapes.

Uses the library's own conversion table (`names.py`), but copies into existing parameters instead of replacing them, so
that a weight update keeps every address. Reads no tensor data: it checks names and shapes. Called by `loading.py` and
`update.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transformers.core_model_loading import Concatenate, MergeModulelist, dot_natural_key

from fdasync.errors import CheckpointError
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.weights.conversions import planned
from fdasync_transformers.weights.kept.targets import KeptTarget
from fdasync_transformers.weights.names import Names
from fdasync_transformers.weights.placement import Placement
from fdasync_transformers.weights.shards import FLOATS
from fdasync_transformers.weights.ties import tied_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from fdasync_transformers.parallel.cuts import Cut
    from fdasync_transformers.weights.shards import StoredTensor


class Located(NamedTuple):
    """The places of given names.

    Attributes:
        placements: by name, in the order to read them.
        ignored: names that the library leaves out.
        beside: names of parts beside the language model (vision, audio).
        unknown: names without a place in the model.
        conversions: (name of the first tensor that is made, pattern, stored name) of names that the library converts
            together with others, in its order.
    """

    placements: dict[str, Placement]
    ignored: list[str]
    beside: list[str]
    unknown: list[str]
    conversions: list[tuple[str, str, str]]


class Placed(NamedTuple):
    """The places of a folder's tensors.

    Attributes:
        tensors: that the model uses, by name: stored ones, and tensors made of several stored ones.
        placements: of these, in the order to read them.
        beside: how many stored tensors belong to parts beside the language model.
    """

    tensors: dict[str, StoredTensor]
    placements: dict[str, Placement]
    beside: int


def locate(names: Names, keys: Iterable[str]) -> Located:
    """Find the place of each name of a checkpoint, or of the model's own state dict. The model may be on the meta
    device."""
    found = Located({}, [], [], [], [])
    # by stored name, the name in the whole model
    homeless: dict[str, str] = {}
    # some renamings expect the library's order
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = names.read(key)
        own = names.own(name) if name else None
        if own is None:
            homeless[key] = name or key
        elif pattern is None:
            found.placements[key] = Placement(own)
        elif expert := _expert_placement(names, key, own, pattern):
            found.placements[key] = expert
        else:
            found.conversions.append((name, pattern, key))
    if names.whole is not names.model and homeless:
        # a trainer of the language model alone has its names
        alone = locate(Names(names.model), homeless)
        found.placements.update(alone.placements)
        homeless = {key: name for key, name in homeless.items() if key not in alone.placements}
    for key, name in homeless.items():
        if names.is_beside(name) and (name in names.state or not names.ignores(key)):
            found.beside.append(key)
        else:
            (found.ignored if names.ignores(key) else found.unknown).append(key)
    return found


def place(names: Names, table: Mapping[str, StoredTensor], folder: Path) -> Placed:
    """Placement of every stored tensor that the model uses, in the order to read them.

    The model may be on the meta device. Names that the config ties are places of their own here (`ties.py`). Raises
    CheckpointError for missing, unexpected and misshapen tensors, and for two tensors of one place; UnsupportedModel
    for a conversion that the library cannot make.
    """
    located = locate(names, table)
    tensors = {key: table[key] for key in located.placements}
    placements = dict(located.placements)
    for key, stored in _converted(names, located.conversions, table).items():
        own = names.own(key)
        if own is not None:
            tensors[key], placements[key] = stored, Placement(own)
    for key, placement in placements.items():
        stored = tensors[key]
        problem = misfit(stored.shape, stored.dtype in FLOATS, placement, names.shapes[placement.target])
        if problem:
            raise CheckpointError(str(stored.file), f"{key} {problem}")
    if met := meeting(placements):
        one, other = met
        problem = f"holds {other}, and {tensors[one].file.name} {one}: both are {placements[one].target}"
        raise CheckpointError(str(tensors[other].file), problem)
    _check_complete(names.model, names.needed(table), placements, folder)
    if located.unknown:
        raise CheckpointError(
            str(table[located.unknown[0]].file),
            f"holds {len(located.unknown)} tensors that the model has no place for: {', '.join(located.unknown[:3])}",
        )
    return Placed(tensors, placements, len(located.beside))


def _converted(
    names: Names, conversions: Sequence[tuple[str, str, str]], table: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors that the library makes of others, by their names. Raises UnsupportedModel."""
    groups: dict[str, list[tuple[str, StoredTensor]]] = {}
    for name, pattern, key in conversions:
        groups.setdefault(name, []).append((pattern, table[key]))
    made: dict[str, StoredTensor] = {}
    for name, sources in groups.items():
        made |= planned(names.rule(sources[0][0]), name, sources, names.whole, names.state)
    return made


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


def destination(placement: Placement, parameter: torch.Tensor | Kept, cut: Cut | None = None) -> Target | KeptTarget:
    """Where in the model's tensor, or in this rank's part of it, a stored tensor is copied."""
    if isinstance(parameter, Kept):
        # blocks that share a scale lie wholly in a rank's part
        parts = (_inside(placement, part.detach(), cut) for part in (parameter.values, parameter.scales))
        return KeptTarget(parameter.form, *parts)
    return _inside(placement, parameter, cut)


def _inside(placement: Placement, parameter: torch.Tensor, cut: Cut | None) -> Target:
    whole = tuple(parameter.shape) if cut is None else cut.whole_shape(tuple(parameter.shape))
    if placement.row < 0:
        return Target(parameter, whole, cut)
    view = parameter[placement.row].chunk(placement.parts, 0)[placement.part]
    inside = None if cut is None else cut.inside_row(placement.parts)
    return Target(view, (whole[1] // placement.parts, *whole[2:]), inside)


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


def _expert_placement(names: Names, key: str, target: str, pattern: str) -> Placement | None:
    """The row of one expert's tensor; None for conversions of another kind."""
    rule = names.rule(pattern)
    kinds = [type(operation) for operation in rule.operations]
    dims = [operation.dim for operation in rule.operations if hasattr(operation, "dim")]
    merged = kinds == [MergeModulelist] and dims == [0]
    joined = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
    expert = names.number(key, pattern) if merged or joined else None
    if expert is None:
        return None
    parts = len(rule.source_patterns) if joined else 1
    return Placement(target, expert, rule.source_patterns.index(pattern) if joined else 0, parts)


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
