"""What one router carries: a fleet of hundreds of instances in virtual time, with a real router.

    python -m benchmarks fleet_scale --instances 512 --requests 100000

Instances are stand-ins that speak the real messages; their steps take what an engine's take on one H200. The router is
the product's, and its CPU is measured callback by callback (`scale_meter.py`): what the network's simulation,
the callers and the instances take is not in it. Three runs of one seed: **calm**, whose callers want results alone;
**streams**, a tenth of it, whose callers read each delta; **failing**, half of it, with two routers, 1 % of the
instances down at a time, a rack that loses power, one that is cut off, and a router that dies.

- `router_us_N`: CPU of the router for a request of the calm run, its share of heartbeats and of news of blocks
  included. What the metering itself takes is measured and taken off.
- `router_alone_us_N`: the same requests, frames and times, given once more to a router that is alone
  (`scale_replay.py`): in the simulation the instances' steps run between its callbacks and take its caches, and
  rounds of the garbage collector go over their objects, which makes the figure above larger than that of a router on a
  core of its own.
- `token_us`: what each token costs beyond that where it is read.
- `hit_share`: prompt tokens that instances had, over those that one instance with all blocks would have had.
- `goodput_failing`: requests that ended whole in time, of all that came.
- `router_nbytes`: what a router knows of so many instances of 20,000 blocks, none of them the same.
- `full_at_instances`: busy instances of 256 running requests that take all of one core of a router, results alone.

The oldest generation of the garbage collector goes over the whole simulation, which no router holds: its time is told
apart (`gc2_us`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.fleet.scale_memory import Memory
from benchmarks.fleet.scale_meter import Meter, MeteredLoop
from benchmarks.fleet.scale_replay import replay
from benchmarks.fleet.scale_work import Work
from benchmarks.fleet.scale_world import LINKS, Plan, World
from benchmarks.lib.report import Report, calibrate_us
from fdasync.testing.sim.loop import run_sim

if TYPE_CHECKING:
    from benchmarks.fleet.scale_instance import Pace
    from benchmarks.fleet.scale_replay import Recording

ROUTER_US_AIM, HIT_AIM, GOOD_AIM, MEMORY_AIM_NBYTES = 150.0, 0.95, 0.98, 2e9
_ROOT = Path(__file__).parents[2]
_BLOCKS = 20_000
_RUNNING = 256


def play(report: Report, name: str, plan: Plan) -> tuple[World, Meter]:
    """Run a plan; its facts go to the conditions."""
    meter = Meter()

    async def main() -> World:
        world = World(plan, meter)
        await world.start()
        # from here on: what requests cost, not what links do
        meter.reset()
        loop.metered_gc()
        try:
            await world.run()
        finally:
            await world.aclose()
        return world

    loop = MeteredLoop(meter)
    began = time.perf_counter()
    world = run_sim(main(), loop)
    facts = world.facts() | {"real_s": round(time.perf_counter() - began, 1)}
    facts["us_a_request"] = {
        kind: round(ns / 1000 / world.requests, 2) for kind, ns in sorted(meter.ns.items(), key=lambda one: -one[1])
    }
    report.conditions[name] = facts
    print(f"  {name}: {facts}", file=sys.stderr, flush=True)
    return world, meter


def request_us(world: World, meter: Meter) -> float:
    """CPU of all routers for each request, without rounds of the oldest generation."""
    return (sum(meter.ns.values()) - meter.ns["gc2"]) / 1000 / world.requests


def alone_us(report: Report, recording: Recording | None) -> float:
    """As `request_us`, of a router that is alone; the collector goes over nothing but its objects, so all rounds
    count."""
    assert recording is not None
    replayed = replay(recording, LINKS)
    if not replayed.same:
        raise RuntimeError("the router that is alone did not send the same")
    us_a_request = {kind: round(ns / 1000 / replayed.calls.total(), 2) for kind, ns in replayed.meter.ns.most_common()}
    report.conditions["alone"] = {"outcomes": dict(replayed.calls), "us_a_request": us_a_request}
    return replayed.us


def measure_memory(instances: int) -> Memory:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fleet.scale_memory", str(instances), str(_BLOCKS), "0.0"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, timeout=900)
    return msgspec.json.decode(done.stdout, type=Memory)


def full_at(us: float, work: Work, pace: Pace) -> float:
    """Busy instances that take all of a core, at so much CPU for each request."""
    instance_per_s = _RUNNING / pace.decode_s(_RUNNING) / statistics.mean(work.answer_tokens)
    return 1e6 / us / instance_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=512, help="of the fleet (default 512)")
    parser.add_argument("--requests", type=int, default=100_000, help="of the calm run, about (default 100,000)")
    parser.add_argument("--per-s", type=float, default=2000.0, help="requests that arrive in a second (default 2,000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    parser.add_argument("--repeat", type=int, default=1, help="calm runs, of which the median counts (default 1)")
    parser.add_argument("--json", metavar="FILE", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if options.instances < 1 or options.requests < 1 or options.per_s <= 0 or options.repeat < 1:
        parser.error("instances, requests, requests a second and calm runs are at least 1")
    report = Report(f"One router, {options.instances} instances")
    report.conditions |= {"seed": options.seed, "calibration_us": round(calibrate_us(), 1)}
    work = Work(requests=options.requests, per_s=options.per_s)
    plan = Plan(instances=options.instances, work=work, seed=options.seed)

    us_all, gc2_all, alone_all = [], [], []
    for _ in range(options.repeat):
        world, meter = play(report, "calm", msgspec.structs.replace(plan, recorded=True))
        us_all.append(request_us(world, meter))
        gc2_all.append(meter.us("gc2") / world.requests)
        hits, good = world.hit_tokens / max(world.ideal.hit_tokens, 1), world.good / world.requests
        recording = world.routers[0].recording
        # the simulation is gone before its router is alone
        del world, meter
        alone_all.append(alone_us(report, recording))
        del recording
    us = report.add(f"router_us_{options.instances}", us_all, aim=ROUTER_US_AIM)
    report.add(f"router_alone_us_{options.instances}", alone_all, aim=ROUTER_US_AIM)
    report.add("hit_share", [hits], aim=HIT_AIM)
    report.add("goodput_calm", [good])
    report.add("gc2_us", gc2_all)
    report.add("full_at_instances", [full_at(us, work, plan.pace)])

    tenth = msgspec.structs.replace(work, requests=max(options.requests // 10, 1), streams=1.0)
    world, meter = play(report, "streams", msgspec.structs.replace(plan, work=tenth))
    report.add("token_us", [(request_us(world, meter) - us) * world.requests / max(world.answer_tokens, 1)])
    del world, meter

    half = msgspec.structs.replace(work, requests=max(options.requests // 2, 1))
    failing = msgspec.structs.replace(plan, work=half, routers=2, failing=0.01, racks=1, switches=1, dead_routers=1)
    world, _ = play(report, "failing", failing)
    report.add("goodput_failing", [world.good / world.requests], aim=GOOD_AIM)
    del world

    memory = measure_memory(options.instances)
    report.add("router_nbytes", [float(memory.nbytes)], aim=MEMORY_AIM_NBYTES)
    report.add("news_block_us", [memory.block_us])
    report.finish(options.json_path)
