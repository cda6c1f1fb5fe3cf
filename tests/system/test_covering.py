"""Covering arrays hold what they must, and little more."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.helpers import case_settings
from tests.system.covering import Cell, Combination, all_cells, combinations_of, covering

BITS = dict.fromkeys("abcdefgh", ("0", "1"))


def union(cells: list[Cell], strength: int) -> set[Combination]:
    return {held for cell in cells for held in combinations_of(cell, strength)}


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    strength=st.integers(1, 4),
    forbidden=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), max_size=4
    ),
)
@case_settings(100)
def test_it_holds_every_combination_that_a_possible_cell_holds(
    sizes: list[int], strength: int, forbidden: list[tuple[int, int, int, int]]
) -> None:
    dimensions = {f"d{number}": [str(value) for value in range(size)] for number, size in enumerate(sizes)}

    def possible(cell: Cell) -> bool:
        return not any(
            cell.get(f"d{one}") == str(value) and cell.get(f"d{other}") == str(its)
            for one, value, other, its in forbidden
        )

    cells = all_cells(dimensions, possible)
    assert all(possible(cell) for cell in cells)
    chosen = covering(cells, strength)
    assert all(cell in cells for cell in chosen)
    # worked out apart from the code under test: any choice of dimensions, any values that occur there together
    for names in combinations(dimensions, strength):
        wanted = {tuple(cell[name] for name in names) for cell in cells}
        assert {tuple(cell[name] for name in names) for cell in chosen} == wanted
    # none for nothing: each held something that those before it did not
    for number, cell in enumerate(chosen):
        assert combinations_of(cell, strength) - union(chosen[:number], strength)
    assert covering(cells, strength) == chosen


@pytest.mark.parametrize(("strength", "most"), [(1, 2), (2, 10), (3, 20), (8, 256)])
def test_it_is_small(strength: int, most: int) -> None:
    cells = all_cells(BITS, bool)
    chosen = covering(cells, strength)
    assert len(chosen) <= most
    assert len(union(chosen, strength)) == len(union(cells, strength))


def test_every_cell_is_listed_once() -> None:
    cells = all_cells({"a": "12", "b": "xyz"}, lambda cell: cell != {"a": "2", "b": "y"})
    assert ["".join(cell.values()) for cell in cells] == ["1x", "1y", "1z", "2x", "2z"]
    assert covering([], 2) == []
