"""Whole fleets behind a router in virtual time, under random work, network conditions, faults and deaths."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.sim_engine.simulation import SimulationFailed
from tests.support.sim_fleet import callers as pd_callers
from tests.support.sim_fleet.simulation import simulate_pd
from tests.support.sim_fleet.workload import PdWorkload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.testing.pytest_plugin import SimSeeds

_SLOW_SEEDS = 5000
_LATE_SEEDS = 1000
# of them, for several processes to share
_PARTS = 10
# a prompt's log-probs of the weights before; a request that ended while its samples were handed over; a hand-off that
# started anew; a rank that is silent at the end; an update that is under way at the end
_FOUND = (1590, 541, 4120, 410, 2253)


def play(seeds: Iterable[int], *, late: bool = False) -> tuple[Counter[str], Counter[str]]:
    outcomes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in seeds:
        report = simulate_pd(seed, late=late)
        outcomes.update(report.outcomes)
        counts.update(report.counts)
    return outcomes, counts


def words(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))


@pytest.mark.ci
def test_pd_simulation(pd_seeds: SimSeeds):
    outcomes, counts = play(pd_seeds)
    pd_seeds.notes += [words(outcomes), words(counts)]
    if pd_seeds.tried >= 40:
        # a simulation that no longer gets into trouble proves nothing
        assert not {"stop", "length", "abort", "deadline", "cancelled", "InstanceLost", "TooLong"} - outcomes.keys()
        incidents = ("kill", "freeze", "part", "drain", "join", "update", "pause", "die", "fail", "corrupt", "stall",
                    "old_weights", "unequal", "left_out", "groups",
                    "unequal_widths", "rank_dies", "rank_hangs", "ranks_blamed", "two_routers", "label",
                    "abort_all", "wake")  # fmt: skip
        work = (
            "handed_over",
            "scored",
            "leases_granted",
            "leases_denied",
            "leases_dropped",
            "received_blocks",
            "preemptions",
        )
        assert all(counts[name] for name in (*work, *incidents))


@pytest.mark.heavy("whole fleets under faults in orders that nobody wrote down")
def test_pd_simulation_of_a_few_seeds():
    outcomes, _ = play(range(_SLOW_SEEDS, _SLOW_SEEDS + 4))
    assert {"stop", "length"} <= outcomes.keys()


@pytest.mark.ci
@pytest.mark.parametrize("seed", _FOUND)
def test_pd_simulation_of_seeds_that_found_something(seed: int):
    play([seed])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_pd_simulation_of_many_seeds(part: int, request: pytest.FixtureRequest):
    """`--pd-seeds` says how many in all."""
    count = request.config.getoption("--pd-seeds")
    play(range(part, _SLOW_SEEDS if count is None else count, _PARTS))


@pytest.mark.ci
def test_pd_simulation_on_a_late_loop():
    outcomes, _ = play(range(8), late=True)
    assert {"stop", "length"} <= outcomes.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_pd_simulation_on_a_late_loop_of_many_seeds(part: int, request: pytest.FixtureRequest):
    only = request.config.getoption("--pd-seed")
    play(range(8 + part, _LATE_SEEDS, _PARTS) if only is None else (only,), late=True)


def of_two_routers(count: int) -> list[int]:
    """Seeds whose fleets have two routers that change weights, and more, at once."""
    found = (seed for seed in itertools.count() if (work := PdWorkload.draw(seed)).routers == 2 and not work.calm)
    return list(itertools.islice(found, count))


@pytest.mark.ci
def test_two_routers_control_one_fleet():
    """Both update, label, pause, put to sleep, wake and abort, while instances die and come, and requests of both are
    in flight: no request outlasts its deadline, every barrier opens, and what each result says is one valid history."""
    _, counts = play(of_two_routers(14))
    kinds = ("update", "label", "pause", "wake", "abort_all", "kill", "results", "updates_refused")
    assert all(counts[kind] for kind in kinds), words(counts)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_two_routers_control_one_fleet_for_many_seeds(part: int):
    play(of_two_routers(1500)[part::_PARTS])


@pytest.mark.ci
def test_a_seed_gives_the_same_fleet_again():
    assert PdWorkload.draw(3) == PdWorkload.draw(3)
    assert simulate_pd(3) == simulate_pd(3)
    assert simulate_pd(3) != simulate_pd(4)


def test_a_failing_fleet_names_its_seed(monkeypatch):
    def wrong(*args, **kwargs):
        raise AssertionError("something is wrong")

    monkeypatch.setattr(pd_callers, "check_served", wrong)
    with pytest.raises(SimulationFailed, match=r"seed 5: AssertionError: something is wrong\n.*--pd-seed 5") as caught:
        simulate_pd(5)
    assert caught.value.seed == 5
