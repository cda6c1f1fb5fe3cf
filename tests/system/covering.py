"""Covering arrays: few cells that together hold every combination of values of any `strength` dimensions.

Greedy over all possible cells: the next one is the one that holds most of what is not held yet, the first of them where
several do. So the same dimensions give the same cells, and a combination that no possible cell holds is not asked for.
Meant for spaces that can be listed (some 100,000 cells). Knows nothing of what is tested; used by `test_matrix.py`.
"""

from __future__ import annotations

import heapq
from itertools import combinations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, str]
Combination = tuple[tuple[str, str], ...]


def all_cells(dimensions: Mapping[str, Sequence[str]], possible: Callable[[Cell], bool]) -> list[Cell]:
    """Every possible cell, the last dimension varying fastest."""
    found = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [cell for cell in found if possible(cell)]


def combinations_of(cell: Cell, strength: int) -> set[Combination]:
    """What a cell holds: its values of every `strength` dimensions."""
    return set(combinations(cell.items(), strength))


def covering(cells: Sequence[Cell], strength: int) -> list[Cell]:
    """Some of `cells` that hold every combination of `strength` values that any of them holds, in order of choice."""
    held = [combinations_of(cell, strength) for cell in cells]
    left = set().union(*held)
    # what a cell adds only falls, so one that still heads the queue when counted anew is the best
    queue = [(-len(added), number) for number, added in enumerate(held)]
    heapq.heapify(queue)
    chosen = []
    while left:
        _, number = heapq.heappop(queue)
        held[number] &= left
        entry = (-len(held[number]), number)
        if queue and queue[0] < entry:
            heapq.heappush(queue, entry)
            continue
        chosen.append(cells[number])
        left -= held[number]
    return chosen
