"""Of a test that is marked `ci(after=N)` the N cases that stay in `make test` differ in kind."""

from __future__ import annotations

from itertools import product

from tests.support.rings import kept


def of(*lists: list[object]) -> list[dict[str, object]]:
    """The cases of lists, as pytest puts them in order."""
    return [{str(at): value for at, value in enumerate(case)} for case in product(*lists)]


def test_of_one_list_the_first_cases_stay():
    assert kept(of(["a", [], {}, "b"]), 3) == [0, 1, 2]
    assert kept(of([5, 6]), 3) == [0, 1]


def test_of_several_lists_every_value_stays_before_one_stays_twice():
    cases = of([True, False], ["x", "y", "z"], [{}, {}])
    three = [cases[place] for place in kept(cases, 3)]
    assert {case["0"] for case in three} == {True, False}
    assert {case["1"] for case in three} == {"x", "y", "z"}
    assert len({id(case["2"]) for case in three}) == 2


def test_of_values_that_come_again_each_stays_once_first():
    errors = [ValueError, ValueError, KeyError, ValueError, OSError]
    cases = [{"given": number, "error": error} for number, error in enumerate(errors)]
    assert kept(cases, 3) == [0, 2, 4]
    assert sorted(kept(cases, 5)) == [0, 1, 2, 3, 4]


def test_lists_of_one_length_do_not_walk_in_step():
    cases = of([0, 1], [2, 3], [4, 5, 6])
    six = [cases[place] for place in kept(cases, 6)]
    assert {(case["0"], case["1"]) for case in six} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert len({(case["1"], case["2"]) for case in six}) == 6
