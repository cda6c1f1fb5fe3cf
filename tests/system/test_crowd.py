"""Everything at once on one engine, in virtual time: groups with log-probs of their prompts and chosen positions,
pauses, resumes, updates, sleeps and wakes in each mode, aborts, cancels, deadlines, stores, drafts and faults."""

from __future__ import annotations

import pytest

from tests.support.sim_engine.crowd import crowded
from tests.support.sim_engine.simulation import outcomes_of
from tests.support.sim_engine.workload import Workload

_FEW, _MANY = 20, 3000
# of the many, for several processes to share
_PARTS = 6


@pytest.mark.ci
def test_everything_at_once(request: pytest.FixtureRequest):
    only = request.config.getoption("--sim-seed")
    outcomes = outcomes_of(range(_FEW), only, crowd=True)
    if only is None:
        assert not {"stop", "length", "abort", "deadline", "cancelled"} - outcomes.keys(), outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_everything_at_once_of_many_seeds(part: int, request: pytest.FixtureRequest):
    only = request.config.getoption("--sim-seed")
    assert outcomes_of(range(_FEW + part, _FEW + _MANY, _PARTS), only, crowd=True)


def test_a_crowd_draws_everything():
    works = [crowded(Workload.draw(seed)) for seed in range(100)]
    controls = [one for work in works for one in work.controls]
    assert {one.kind for one in controls} == {
        "pause", "resume", "update", "parts", "sleep", "wake", "reset", "abort_all", "hash"
    }  # fmt: skip
    assert {one.pause for one in controls} == {"in_place", "retract", "wait", "abort"}
    groups = [plan.params for work in works for plan in work.requests if plan.params.n > 1]
    assert any(
        params.chosen_positions_start is not None and params.prompt_logprobs_start is not None for params in groups
    )
    assert works[7] == crowded(Workload.draw(7))
