"""Control calls of several callers that meet on one engine: some order of them explains what came, at every turn.

The meetings and what explains them are in `tests/support/weights_play/meetings.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from tests.support.weights_play.calls import CALLS, CONTROL, Call
from tests.support.weights_play.meetings import Meeting, all_of, check, drawn
from tests.support.weights_play.meetings_engine import EngineStage
from tests.support.weights_play.play import write_folders

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.weights_play.meetings import Opens

_PAIRS = list(itertools.product(CALLS, repeat=2))
_TRIPLES = list(itertools.product(CONTROL, repeat=3))
# for several processes to share
_PARTS = 10
_RANDOM = 100_000


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], EngineStage]:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return lambda: EngineStage(root)


def test_some_calls_that_meet(stage: Opens) -> None:
    for seed in range(200):
        check(drawn(seed), stage)


@pytest.mark.ci
def test_any_two_calls_meet_at_every_turn(stage: Opens) -> None:
    results = set()
    for first, second in _PAIRS:
        for outcome in all_of(((first,), (second,)), stage, busy=False, cancels=False):
            results |= {made.result for made in outcome.made}
    # of meetings that never refuse a call nothing is learnt
    assert {"", "UpdateUnderWay", "WeightsDiffer", "Asleep", "WeightsRejected"} <= results


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("busy", [False, True])
def test_any_two_calls_meet_and_are_cancelled_at_every_turn(part: int, busy: bool, stage: Opens) -> None:
    cancelled = 0
    for first, second in _PAIRS[part::_PARTS]:
        for outcome in all_of(((first,), (second,)), stage, busy=busy, cancels=True):
            cancelled += any(made.result == "cancelled" for made in outcome.made)
    assert cancelled > 100


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("busy", [False, True])
def test_any_three_calls_meet_at_every_turn(part: int, busy: bool, stage: Opens) -> None:
    """While a request runs: of the cancels, those of every tenth three."""
    for number, (first, second, other) in enumerate(_TRIPLES[part::_PARTS]):
        for _ in all_of(((first, second), (other,)), stage, busy=busy, cancels=not busy or number % 10 == 0):
            pass


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_four_and_five_calls_of_random_callers(part: int, stage: Opens) -> None:
    for seed in range(part, _RANDOM, _PARTS):
        check(drawn(seed), stage)


def test_a_call_that_does_something_else_is_found(stage: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Call(CALLS["label"].run, lambda model: model.relabel(4))
    monkeypatch.setitem(CALLS, "label", wrong)
    with pytest.raises(AssertionError, match="no order of the calls explains"):
        check(Meeting((("pause",), ("label",)), (0, 1)), stage)


def test_a_call_that_never_ends_is_found(stage: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALLS, "label", Call(lambda *_: asyncio.Event().wait(), lambda _: ""))
    with pytest.raises(AssertionError, match="label of caller 1 never ended"):
        check(Meeting((("pause",), ("label",)), (0, 1)), stage)


def test_a_caller_that_gives_up_when_its_join_has_ended_ends_no_other_join(stage: Opens) -> None:
    """It ended the join that another caller had begun in the same turn."""
    outcome = check(Meeting((("join",), ("join",)), (0, 7), cancels=((0, 0, 8),)), stage)
    assert [made.result for made in outcome.made] == ["cancelled", ""]
