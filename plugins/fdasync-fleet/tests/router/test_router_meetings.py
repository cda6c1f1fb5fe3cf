"""Control calls of several callers that meet on one router of two instances: some order of them explains what came, and
the instances are alike.

The meetings and what explains them are in `tests/support/weights_play/meetings.py`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.support.weights_play.calls import CALLS
from tests.support.weights_play.meetings import Meeting, all_of, check, drawn
from tests.support.weights_play.meetings_fleet import FleetStage
from tests.support.weights_play.play import write_folders

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.weights_play.meetings import Opens

_PAIRS = list(itertools.product(CALLS, repeat=2))
# for several processes to share
_PARTS = 10
_RANDOM = 20_000


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FleetStage]:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return lambda: FleetStage(root)


def test_some_calls_that_meet(stage: Opens) -> None:
    for seed in range(30):
        check(drawn(seed), stage)


@pytest.mark.parametrize(
    ("first", "second"), [("update", "sleep"), ("join", "sleep"), ("leave", "sleep"), ("join", "join")]
)
def test_instances_take_two_changes_in_one_order(first: str, second: str, stage: Opens) -> None:
    """One of them slept, and the other one was running: the sleep overtook the end of the first call at one of them."""
    for turn in range(16, 40):
        check(Meeting(((first,), (second,)), (0, turn)), stage)


def test_a_change_waits_for_a_join_that_its_caller_gave_up(stage: Opens) -> None:
    for turn in range(48):
        outcome = check(Meeting((("join", "update"),), (0,), cancels=((0, 0, turn),)), stage)
        assert outcome.made[1].result == ""


def test_a_sleep_behind_a_wake_that_an_equal_sleep_met_still_comes(stage: Opens) -> None:
    """It was one with the sleep before the wake, and all instances ran in the end."""
    for turn in range(2, 12):
        outcome = check(Meeting((("sleep",), ("wake", "sleep")), (0, turn), cancels=((1, 0, turn + 2),)), stage)
        assert outcome.made[-1].result == ""
        assert outcome.state.doing == "asleep"


@pytest.mark.ci
def test_any_two_calls_meet_at_many_turns(stage: Opens) -> None:
    results = set()
    for first, second in _PAIRS:
        for outcome in all_of(((first,), (second,)), stage, busy=False, cancels=False, step=4):
            results |= {made.result for made in outcome.made}
    # of meetings that never refuse a call nothing is learnt
    assert {"", "UpdateUnderWay", "WeightsDiffer", "Asleep"} <= results


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("busy", [False, True])
def test_any_two_calls_meet_and_are_cancelled_at_many_turns(part: int, busy: bool, stage: Opens) -> None:
    cancelled = 0
    for first, second in _PAIRS[part::_PARTS]:
        for outcome in all_of(((first,), (second,)), stage, busy=busy, cancels=True, step=5):
            cancelled += any(made.result == "cancelled" for made in outcome.made)
    assert cancelled > 100


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_any_two_calls_meet_at_every_turn(part: int, stage: Opens) -> None:
    for first, second in _PAIRS[part::_PARTS]:
        for _ in all_of(((first,), (second,)), stage, busy=False, cancels=False):
            pass


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_four_and_five_calls_of_random_callers(part: int, stage: Opens) -> None:
    for seed in range(part, _RANDOM, _PARTS):
        check(drawn(seed), stage)
