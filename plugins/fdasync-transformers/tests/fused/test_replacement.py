"""What replacements have in common: which candidate takes a place, what is told: `fused/replacement.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.replacement import Differs, Place, Replacement, foresee, replace

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Fails = dict[str, Exception]


class Played(Replacement[str]):
    """Two candidates, two cases; `fails`: what a candidate's second case raises. Notes what is tried and put."""

    what, which = "things", "things of"

    def __init__(self, places: list[Place], fails: Fails | None = None) -> None:
        self.places = places
        self.fails = fails or {}
        self.tried: list[tuple[str, str, int]] = []
        self.put_there: list[tuple[str, str]] = []

    def finds(self, model: Any) -> Iterator[Place]:
        yield from self.places

    def candidates(self, place: Place) -> tuple[str, str]:
        return "first", "second"

    def cases(self, place: Place) -> list[Callable[[str], None]]:
        def case(number: int, candidate: str) -> None:
            self.tried.append((place.name, candidate, number))
            if number and candidate in self.fails:
                raise self.fails[candidate]

        return [lambda candidate, number=number: case(number, candidate) for number in (0, 1)]

    def put(self, place: Place, candidate: str) -> None:
        self.put_there.append((place.name, candidate))


class Together(Played):
    together = True


def test_the_first_candidate_that_passes_every_case_takes_the_place() -> None:
    one = Played([Place("a", None, "A"), Place("b", None, "A")])
    done = replace(one, None)
    assert one.put_there == [("a", "first"), ("b", "first")]
    assert one.tried == [(name, "first", number) for name in "ab" for number in (0, 1)]
    assert (done.names, done.notes) == (["a", "b"], ())


@pytest.mark.parametrize("error", [Differs("differs"), BadInput("x", "is no float")])
def test_the_next_candidate_is_tried_where_one_differs(error: Exception) -> None:
    one = Played([Place("a", None, "A")], {"first": error})
    assert replace(one, None).names == ["a"]
    assert one.put_there == [("a", "second")]


def test_the_reason_is_that_of_the_candidate_that_came_furthest() -> None:
    one = Played([Place("a", None, "A")], {"first": Differs("far"), "second": Differs("as far")})
    assert replace(one, None).reasons == {"A": "far"}
    assert one.put_there == []


@pytest.mark.parametrize("error", [RuntimeError("not here"), KeyError("x")])
def test_what_a_proof_raises_is_a_reason(error: Exception) -> None:
    one = Played([Place("a", None, "A")], {"first": error})
    assert replace(one, None).reasons == {"A": f"cannot be compared: {type(error).__name__}: {error}"}


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_memory_that_runs_out_is_none(error: Exception) -> None:
    with pytest.raises(type(error), match="no room"):
        replace(Played([Place("a", None, "A")], {"first": error}), None)


def test_places_of_one_key_are_proven_once_and_agreed_on_once() -> None:
    asked: list[str] = []

    def agree(reason: str) -> str:
        asked.append(reason)
        return "rank 1 differs" if len(asked) > 1 else reason

    one = Played([Place(name, None, name, key=name in "ab") for name in "abcd"])
    done = replace(one, None, agree)
    # this rank has no reason of its own
    assert asked == ["", ""]
    assert {name for name, _, _ in one.tried} == {"a", "c"}
    assert done.names == ["a", "b"]
    assert done.notes == ("things of c, d are the library's own: rank 1 differs",)


def test_what_is_refused_is_not_tried_and_told_once_for_each_reason() -> None:
    refusals = {"12": "R", "3": "R", "A": "other", "B": ""}
    one = Played([Place(name, None, name, "Its", refusal) for name, refusal in refusals.items()])
    one.places.append(Place("A again", None, "A", refusal="a later reason"))
    done, foreseen = replace(one, None), foresee(one, None)
    assert done.names == foreseen.names == ["B"]
    assert {name for name, _, _ in one.tried} == {"B"}
    assert one.put_there == [("B", "first")]
    wanted = ("things of 3, 12 are the library's own: Its R", "things of A are the library's own: Its other")
    assert sorted(done.notes) == sorted(foreseen.notes) == sorted(wanted)


def test_where_all_go_together_one_that_stays_keeps_all() -> None:
    places = [Place("a", None, ""), Place("b", None, "", "layer 1", "has none"), Place("c", None, "")]
    one = Together(places)
    done, foreseen = replace(one, None), foresee(one, None)
    assert done.names == foreseen.names == []
    assert done.notes == foreseen.notes == ("things are the library's own: layer 1 has none",)
    assert {name for name, _, _ in one.tried} == {"a"}
