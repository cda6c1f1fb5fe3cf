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

The oldest generation of the garbage collector goes over the whole simulation, which no router holds: its rounds
(`gc2` of the conditions) do not count, but for a router that is alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.fleet.scale_instance import MAX_REQUESTS, NUM_BLOCKS, decode_s
from benchmarks.fleet.scale_meter import Meter, MeteredLoop
from benchmarks.fleet.scale_replay import replay
from benchmarks.fleet.scale_work import Work
from benchmarks.fleet.scale_world import Plan, World
from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.child import Child
from benchmarks.lib.report import Report
from fdasync.testing.sim.loop import run_sim

if TYPE_CHECKING:
    from benchmarks.fleet.scale_replay import Recording

ROUTER_US_AIM, HIT_AIM, GOOD_AIM, MEMORY_AIM_NBYTES = 150.0, 0.95, 0.98, 2e9


def play(report: Report, name: str, plan: Plan) -> World:
    """Run a plan; its facts go to the conditions."""
    meter = Meter()

    async def main() -> World:
        world = World(plan, meter)
        await world.start()
        # from here on: what requests cost, not what links do
        meter.ns.clear()
        loop.metered_gc()
        try:
            await world.run()
        finally:
            await world.aclose()
        return world

    loop = MeteredLoop(meter)
    began = time.perf_counter()
    world = run_sim(main(), loop)
    facts = report.conditions[name] = world.facts() | {"real_s": round(time.perf_counter() - began, 1)}
    print(f"  {name}: {facts}", file=sys.stderr, flush=True)
    return world


def request_us(world: World) -> float:
    """CPU of all routers for each request, without rounds of the oldest generation."""
    return (world.meter.ns.total() - world.meter.ns["gc2"]) / 1000 / world.requests


def alone_us(report: Report, recording: Recording | None) -> float:
    """As `request_us`, of a router that is alone; the collector goes over nothing but its objects, so all rounds
    count."""
    assert recording is not None
    meter, ends = replay(recording)
    report.conditions["alone"] = {"outcomes": dict(ends), "us_a_request": meter.us_each(ends.total())}
    return meter.ns.total() / 1000 / ends.total()


def router_nbytes(instances: int) -> int:
    """Measured in a process of its own."""
    with Child("benchmarks.fleet.scale_memory", str(instances), str(NUM_BLOCKS)) as child:
        return int(child.line())


def full_at(us: float, work: Work) -> float:
    """Busy instances that take all of a core, at so much CPU for each request."""
    instance_per_s = MAX_REQUESTS / decode_s(MAX_REQUESTS) / statistics.mean(work.answer_tokens)
    return 1e6 / us / instance_per_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--instances", type=at_least_one, default=512, help="of the fleet")
    parser.add_argument("--requests", type=at_least_one, default=100_000, help="of the calm run, about")
    parser.add_argument("--repeat", type=at_least_one, default=1, help="calm runs, of which the median counts")
    options = parser.parse_args()
    report = Report(f"One router, {options.instances} instances")

    calm = Plan(instances=options.instances, work=Work(requests=options.requests), recorded=True)
    us_all, alone_all = [], []
    for _ in range(options.repeat):
        world = play(report, "calm", calm)
        us_all.append(request_us(world))
        hits = world.hit_tokens / max(world.ideal.hit_tokens, 1)
        recording = world.routers[0].recording
        # the simulation is gone before its router is alone
        del world
        alone_all.append(alone_us(report, recording))
        del recording
    us = report.add(f"router_us_{options.instances}", us_all, aim=ROUTER_US_AIM)
    report.add(f"router_alone_us_{options.instances}", alone_all, aim=ROUTER_US_AIM)
    report.add("hit_share", [hits], aim=HIT_AIM)
    report.add("full_at_instances", [full_at(us, calm.work)])

    tenth = Work(requests=max(options.requests // 10, 1), streams=1.0)
    world = play(report, "streams", Plan(instances=options.instances, work=tenth))
    report.add("token_us", [(request_us(world) - us) * world.requests / max(world.answer_tokens, 1)])
    del world

    half = Work(requests=max(options.requests // 2, 1))
    world = play(report, "failing", Plan(instances=options.instances, work=half, routers=2, failing=0.01))
    report.add("goodput_failing", [world.good / world.requests], aim=GOOD_AIM)
    del world

    report.add("router_nbytes", [router_nbytes(options.instances)], aim=MEMORY_AIM_NBYTES)
    report.finish(options.json_path)
