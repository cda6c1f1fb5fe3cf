"""A small fleet in virtual time: every request ends, prefixes are found, and a seed decides everything."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.fleet.fleet_scale import full_at, play, request_us, router_nbytes
from benchmarks.fleet.scale_meter import Meter
from benchmarks.fleet.scale_replay import replay
from benchmarks.fleet.scale_work import Work
from benchmarks.fleet.scale_world import Plan, World
from benchmarks.lib.report import Report

pytestmark = pytest.mark.ci

WORK = Work(requests=120, per_s=80.0, question_tokens=(64, 128), answer_tokens=(16, 48), system_tokens=64, tasks=4)


def played(**values: Any) -> World:
    return play(Report("a test"), "a run", Plan(work=WORK, **values))


def test_requests_end_where_their_prefixes_are() -> None:
    world = played(instances=6)
    assert world.requests == world.good == world.outcomes["length"] > 100
    assert world.hit_tokens > 0.9 * world.ideal.hit_tokens > 0
    assert world.faults.total() == 0
    assert request_us(world) > 0
    # what is not the router's is not in it: a stand-in's step is the loop's
    assert "_done" not in world.meter.ns


def test_a_router_that_is_alone_gets_the_same_and_does_the_same() -> None:
    world = played(instances=6, recorded=True)
    recording = world.routers[0].recording
    assert recording is not None
    for _ in range(2):
        meter, ends = replay(recording)
        assert ends == {"length": world.requests}
        assert meter.ns.total() > 0
    # a frame less, and it is not the same
    numbered = [got for got in recording.got if got.call is not None]
    recording.got.remove(numbered[-1])
    with pytest.raises(RuntimeError, match="did not send the same"):
        replay(recording)


def test_what_metering_takes_is_not_counted() -> None:
    meter = Meter()

    def work() -> None:
        for _ in range(1000):
            meter.away(time.perf_counter)

    least = []
    for _ in range(50):
        meter.run(work, ())
        least.append(meter.ns["work"])
        meter.ns.clear()
    # reading the thread's clock twice takes some 500 ns
    assert min(least) / 1000 < 250


@pytest.mark.parametrize("streams", [0.0, 1.0])
def test_one_seed_is_one_run_whatever_fails(streams: float) -> None:
    plan: dict[str, Any] = {"instances": 8, "rack": 4, "routers": 2, "failing": 0.05, "down_s": 0.5, "seed": 3}
    work = Work(**{name: getattr(WORK, name) for name in WORK.__struct_fields__} | {"streams": streams})
    runs = [play(Report("a test"), "a run", Plan(work=work, **plan)) for _ in range(2)]
    assert runs[0].digest == runs[1].digest
    assert runs[0].faults == runs[1].faults
    assert {"rack", "switch", "router"} <= set(runs[0].faults)
    # what a router spends has one name for each kind, not one for each task
    assert not [kind for kind in runs[0].meter.ns if kind.startswith("Task-")]
    assert "_again" in runs[0].meter.ns
    # each request ended once, well or with a name
    ends = runs[0].outcomes.total() - runs[0].outcomes["router died"]
    assert ends == runs[0].requests
    assert runs[0].good > 0.8 * runs[0].requests


def test_memory_is_of_what_was_learned() -> None:
    # 80,000 blocks, none of them the same
    assert 80_000 * 16 < router_nbytes(4) < 80_000 * 1000


def test_the_size_at_which_a_router_is_full_follows_from_its_cpu() -> None:
    assert full_at(100.0, WORK) == pytest.approx(2 * full_at(200.0, WORK))
