"""Checks recorded rows against a model, and lays them out for one forward pass of a trainer.

Knows no hooks and no passes: arrays in, arrays out. Called by `batch.py`.
"""

from __future__ import annotations

from operator import index as as_integer
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import BadInput, RoutingMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync_trainer.replay.force import RouterSite
    from fdasync_trainer.replay.layout import Spans

Array = np.ndarray[Any, np.dtype[Any]]


class Rows(msgspec.Struct, frozen=True):
    """One sequence's checked rows.

    Attributes:
        array: integers [n, L, K], layers as in the model.
        start: position of the first row.
    """

    array: Array
    start: int


class Table(msgspec.Struct, frozen=True):
    """Rows of one pass, and counts of its tokens.

    Attributes:
        ids: int16 or int32 [L, T, K]; a token without a row has -1 in every column.
        replayed, live, padding: tokens with a row, real tokens without a row, other tokens; they add up to T.
    """

    ids: Array
    replayed: int
    live: int
    padding: int


def checked_rows(
    routing: Sequence[Any], sites: Mapping[int, RouterSite], top_k: Sequence[int], request_ids: Sequence[str]
) -> list[Rows | None]:
    """Check rows against the model, whatever the batch. Copies rows only to change the order of their layers.

    Args:
        routing: per sequence a `fdasync.Routing` or None.
        sites: the model's MoE layers, ascending.
        top_k: experts per token of each of these layers.
        request_ids: a name for each sequence, for errors; may be empty.

    Raises:
        RoutingMismatch: no routing record, other layers, another number of experts, another K, ids that are not
            integers, out of range or twice in a row.
        BadInput: another number of names than of sequences.
    """
    if request_ids and len(request_ids) != len(routing):
        raise BadInput("request_ids", f"has {len(request_ids)} entries", limit=f"{len(routing)} sequences")
    names = list(request_ids) or [""] * len(routing)
    return [
        None if given is None else _checked(given, index, name, sites, top_k)
        for index, (given, name) in enumerate(zip(routing, names, strict=True))
    ]


def table_of(
    rows: Sequence[Rows | None],
    spans: Spans,
    num_layers: int,
    top_k: int,
    num_experts: int,
    request_ids: Sequence[str],
    *,
    partial: bool = False,
) -> Table:
    """Lay rows out for a pass.

    Raises:
        BadInput: another number of sequences than of records.
        RoutingMismatch: rows past the end of their sequence; unless `partial`, rows that reach neither its last token
            nor the one before.
    """
    if len(rows) != len(spans.lengths):
        hint = "one entry per sequence, None for one that routes live; or give layout="
        raise BadInput("routing", f"has {len(rows)} entries", limit=f"the batch's {len(spans.lengths)}", hint=hint)
    ids = np.full((num_layers, spans.total, top_k), -1, dtype=np.int16 if num_experts <= 2**15 else np.int32)
    replayed = 0
    for index, record in enumerate(rows):
        if record is None:
            continue
        length, count = int(spans.lengths[index]), len(record.array)
        end = record.start + count
        # a rollout has no row of its last token, which it did not forward; other records may have one
        if end > length or (end < length - 1 and not partial):
            hint = "" if end > length else "; partial=True takes rows that end early"
            raise RoutingMismatch(
                f"has rows of positions {record.start} to {end}, and the sequence {length} tokens{hint}",
                sequence=index,
                request_id=request_ids[index] if request_ids else "",
                position=max(length, record.start) if end > length else end,
            )
        first = int(spans.offsets[index]) + record.start
        ids[:, first : first + count] = record.array.transpose(1, 0, 2)
        replayed += count
    real = int(spans.lengths.sum())
    return Table(ids, replayed, real - replayed, spans.total - real)


def _checked(given: Any, index: int, name: str, sites: Mapping[int, RouterSite], top_k: Sequence[int]) -> Rows:
    def wrong(problem: str, layer: int = -1, position: int = -1) -> RoutingMismatch:
        return RoutingMismatch(problem, sequence=index, request_id=name, layer=layer, position=position)

    try:
        array, start, uneven = np.asarray(given.array), _whole(given.start), given.top_k_by_layer
        layer_ids, num_experts = [_whole(layer) for layer in given.layer_ids], _whole(given.num_experts)
    except (AttributeError, TypeError, ValueError) as error:
        raise wrong(f"is no routing record: {error}") from error
    layers = list(sites)
    if array.dtype.kind not in "iu" or array.ndim != 3:
        raise wrong(f"has rows of dtype {array.dtype} and shape {array.shape}, not integers [n, L, K]")
    if sorted(layer_ids) != layers:
        odd = sorted(set(layer_ids) ^ set(layers))
        raise wrong(f"has rows of layers {layer_ids}, the model experts in {layers}", layer=odd[0] if odd else -1)
    if array.shape[1] != len(layers):
        raise wrong(f"has rows of {array.shape[1]} layers and names {len(layers)}")
    for layer, site in sites.items():
        if site.num_experts != num_experts:
            raise wrong(f"is of {num_experts} experts, the model has {site.num_experts}", layer)
    if array.shape[2] != max(top_k):
        raise wrong(f"has {array.shape[2]} experts per token, the model chooses {max(top_k)}")
    order = np.argsort(layer_ids)
    if uneven is not None and len(uneven) != len(layers):
        raise wrong(f"tells the experts per token of {len(uneven)} layers and names {len(layers)}")
    for place, column in enumerate(order):
        if uneven is not None and uneven[column] != top_k[place]:
            problem = f"has {uneven[column]} experts per token, the model chooses {top_k[place]}"
            raise wrong(problem, layers[place])
    if start < 0:
        raise wrong(f"starts at position {start}")
    if layer_ids != layers:
        array = array[:, order]
    bad = _impossible(array, top_k, num_experts)
    if bad is not None:
        row, place = bad
        ids = array[row, place, : top_k[place]].tolist()
        outside = [i for i in ids if not 0 <= i < num_experts]
        problem = f"expert {outside[0]} does not exist" if outside else "an expert twice"
        raise wrong(f"{problem} in {ids} (of {num_experts} experts)", layers[place], start + row)
    return Rows(array, start)


def _whole(value: Any) -> int:
    """An integer of any type, but no bool and no float. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError(f"{value} is no integer")
    return as_integer(value)


def _impossible(array: Array, top_k: Sequence[int], num_experts: int) -> tuple[int, int] | None:
    """The first (row, layer place) with ids outside [0, num_experts), or one id twice."""
    found: list[tuple[int, int]] = []
    for k in sorted(set(top_k)):
        places = np.flatnonzero(np.asarray(top_k) == k)
        part = np.sort(array[:, places, :k], axis=-1)
        bad = (part[..., 0] < 0) | (part[..., -1] >= num_experts) | (part[..., 1:] == part[..., :-1]).any(axis=-1)
        if bad.any():
            row, place = np.argwhere(bad)[0]
            found.append((int(row), int(places[place])))
    return min(found, default=None)
