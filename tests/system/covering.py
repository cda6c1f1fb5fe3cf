"""Covering arrays: few cells that together hold every combination of values of any `strength` dimensions.

Greedy over all possible cells: the next one is the one that holds most of what is not held yet, the first of them where
several do. So the same dimensions give the same cells, and a combination that no possible cell holds is not asked for.
Meant for spaces that can be listed (some 100,000 cells). Knows nothing of what is tested; used by `test_matrix.py`.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

Cell = dict[str, str]
Combination = tuple[tuple[str, str], ...]


def all_cells(
    dimensions: Mapping[str, Sequence[str]], possible: Callable[[Cell], bool], read: Sequence[str] | None = None
) -> list[Cell]:
    """Every possible cell, the last dimension varying fastest. `read`: the dimensions that `possible` looks at; None:
    it may look at all."""
    names = list(dimensions)
    places = [names.index(name) for name in (names if read is None else read)]
    known: dict[tuple[str, ...], bool] = {}
    found = []
    for values in product(*dimensions.values()):
        key = tuple([values[place] for place in places])
        if key not in known:
            known[key] = possible(dict(zip(names, values, strict=True)))
        if known[key]:
            found.append(dict(zip(names, values, strict=True)))
    return found


def combinations_of(cell: Cell, strength: int) -> set[Combination]:
    """What a cell holds: its values of every `strength` dimensions."""
    return set(combinations(cell.items(), strength))


def covering(cells: Sequence[Cell], strength: int) -> list[Cell]:
    """Some of `cells`, which have the same dimensions, that hold every combination of `strength` values that any of
    them holds, in order of choice."""
    if not cells:
        return []
    held = _numbered(cells, strength)
    left = np.ones(held.max(initial=-1) + 1, bool)
    # of what is left, how much each cell holds
    counts = np.full(len(cells), len(held))
    chosen = []
    while left.any():
        # the first of the largest
        number = int(counts.argmax())
        chosen.append(cells[number])
        for column in held[left[held[:, number]]]:
            counts -= column == column[number]
        left[held[:, number]] = False
    return chosen


def _numbered(cells: Sequence[Cell], strength: int) -> NDArray[np.int64]:
    """[choices of dimensions, cells]: a number for each combination of values; equal ones have equal numbers."""
    values = []
    for name in cells[0]:
        known: dict[str, int] = {}
        values.append(np.array([known.setdefault(cell[name], len(known)) for cell in cells]))
    columns: list[NDArray[np.int64]] = []
    first = 0
    for several in combinations(values, strength):
        column = np.zeros(len(cells), np.int64)
        for one in several:
            column = column * (one.max() + 1) + one
        column = np.unique(column, return_inverse=True)[1] + first
        columns.append(column)
        first = int(column.max()) + 1
    return np.stack(columns) if columns else np.empty((0, len(cells)), np.int64)
