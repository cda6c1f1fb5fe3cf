"""Whole engines in virtual time under random work and faults, and the tools that this stands on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
import uvloop

from tests.support.sim_engine import simulation as simulation_module
from tests.support.sim_engine.simulation import SimulationFailed, outcomes_of, simulate
from tests.support.sim_engine.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fdasync.testing.pytest_plugin import SimSeeds

_FEW_SEEDS = 8


@pytest.mark.ci
def test_simulation(sim_seeds: SimSeeds):
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in sim_seeds:
        report = simulate(seed)
        outcomes.update(report.outcomes)
        numbers = msgspec.structs.asdict(report)
        totals.update({name: value for name, value in numbers.items() if name != "outcomes"})
    said = {name: round(value) for name, value in totals.items()}
    sim_seeds.notes += [
        ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())),
        ", ".join(f"{count} {name}" for name, count in said.items()),
    ]
    if sim_seeds.tried >= 40:
        # a simulation that no longer gets into trouble proves nothing
        missing = {"stop", "length", "abort", "deadline", "failed", "cancelled", "closed"} - outcomes.keys()
        assert not missing
        work = ("preemptions", "evictions", "hit_tokens", "dropped_tokens", "rows", "long_runs", "accepted_tokens")
        assert all(totals[name] for name in work)


@pytest.mark.heavy("whole engines under faults in orders that nobody wrote down")
def test_simulation_of_a_few_seeds():
    outcomes: Counter[str] = Counter()
    for seed in range(_FEW_SEEDS):
        outcomes.update(simulate(seed).outcomes)
    assert {"stop", "length", "abort", "deadline", "cancelled", "closed"} <= outcomes.keys()


#: on which what real timers, threads and files do is in play
_LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}


_REAL_SEEDS = 1000
_LATE_SEEDS = 2000


# of them, for several processes to share
_PARTS = 4


def in_real_time(name: str, seeds: Iterable[int], folder: Path, config: pytest.Config) -> tuple[Counter[str], ...]:
    """Play these seeds, or the one that was asked for; every other one on a file store."""
    only = config.getoption("--sim-seed")
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in seeds if only is None else (only,):
        report = simulate(seed, loop=_LOOPS[name], folder=folder / str(seed) if seed % 2 else None)
        outcomes.update(report.outcomes)
        numbers = msgspec.structs.asdict(report)
        totals.update({name: value for name, value in numbers.items() if name != "outcomes"})
    return outcomes, totals


@pytest.mark.ci
@pytest.mark.parametrize("name", _LOOPS)
def test_simulation_in_real_time(name: str, tmp_path: Path, request: pytest.FixtureRequest):
    first = 0 if name == "uvloop" else 20
    outcomes, totals = in_real_time(name, range(first, first + 20), tmp_path, request.config)
    if request.config.getoption("--sim-seed") is None:
        assert not {"stop", "length", "abort", "deadline", "closed"} - outcomes.keys()
        work = ("rows", "hit_tokens", "preemptions", "evictions", "written_blocks", "swapped_in_blocks")
        assert all(totals[name] for name in work), totals


@pytest.mark.nightly
@pytest.mark.parametrize("name", _LOOPS)
@pytest.mark.parametrize("part", range(_PARTS))
def test_simulation_in_real_time_of_many_seeds(part: int, name: str, tmp_path: Path, request: pytest.FixtureRequest):
    _, totals = in_real_time(name, range(part, _REAL_SEEDS, _PARTS), tmp_path, request.config)
    assert totals["rows"]


@pytest.mark.ci
def test_simulation_on_a_late_loop(request: pytest.FixtureRequest):
    only = request.config.getoption("--sim-seed")
    outcomes = outcomes_of(range(20), only, late=True)
    if only is None:
        assert not {"stop", "length", "abort", "deadline", "cancelled"} - outcomes.keys(), outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_simulation_on_a_late_loop_of_many_seeds(part: int, request: pytest.FixtureRequest):
    only = request.config.getoption("--sim-seed")
    assert outcomes_of(range(20 + part, _LATE_SEEDS, _PARTS), only, late=True)


@pytest.mark.ci
def test_a_seed_gives_the_same_simulation_again():
    assert Workload.draw(3) == Workload.draw(3)
    assert simulate(3) == simulate(3)
    assert simulate(3, late=True) == simulate(3, late=True)
    assert simulate(3) != simulate(4)


def test_a_failing_simulation_names_its_seed(monkeypatch):
    def wrong(*args, **kwargs):
        raise AssertionError("something is wrong")

    monkeypatch.setattr(simulation_module, "check_sample", wrong)
    with pytest.raises(SimulationFailed, match=r"seed 5: AssertionError: something is wrong\n.*--sim-seed 5") as caught:
        simulate(5)
    assert caught.value.seed == 5
