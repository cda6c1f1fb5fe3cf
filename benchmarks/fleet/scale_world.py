"""A fleet in virtual time: stand-in instances in racks, real routers, callers, and what fails.

Callers live outside of the routers' processes, as clients of an HTTP front do: if their router dies they ask another
one again. Everything is drawn from a seed, so two runs of one plan decide the same (`World.digest`). Knows no figures:
`fleet_scale.py` makes them of a finished world.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork

from benchmarks.fleet.scale_instance import BLOCK_TOKENS, NAMESPACE, VOCAB_SIZE, StandIn
from benchmarks.fleet.scale_meter import Meter, MeteredRouter, MeteredWire
from benchmarks.fleet.scale_replay import ROUTER, Got, Recording, RecordingWire, ask
from benchmarks.fleet.scale_work import Ideal, Source, Work, between
from fdasync.request import SamplingParams
from fdasync.testing.sim.process import SimProcess

if TYPE_CHECKING:
    from fdasync.result import Result

_AGAIN_S = 0.1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    instances, rack: number of instances, and how many stand in one rack.
    routers: number of routers; each dials all instances.
    work: the workload.
    failing: share of the instances that are down at a time, in the mean. If it is not 0, a rack loses power as well,
        one is cut off, and a router dies.
    down_s: how long an instance, a rack's power or its switch is gone.
    recorded: keep what the first router gets, for `scale_replay.py`.
    """

    instances: int
    rack: int = 32
    routers: int = 1
    work: Work = Work()
    failing: float = 0.0
    down_s: float = 8.0
    recorded: bool = False
    seed: int = 0


class RouterSide:
    """One router, in a process of its own."""

    def __init__(self, world: World, number: int) -> None:
        self.process = SimProcess(f"router{number}")
        world.meter.watched.add(self.process)
        addresses = [one.address for one in world.instances]
        self.recording: Recording | None = None
        self.wire = MeteredWire(world.network, self.process)
        if world.plan.recorded and number == 0:
            self.recording = Recording(addresses)
            self.wire = RecordingWire(world.network, self.process, self.recording)
        self.wire.meter = world.meter
        self.died: asyncio.Future[None] = world.loop.create_future()
        self.router = MeteredRouter(addresses, ROUTER, wire=self.wire, seed=number)
        self.router.meter = world.meter


class World:
    """See the module. Made and run on one loop.

    Attributes:
        instances: those that stand in the racks now.
        routers: all, dead ones too.
        requests: number of requests that callers made.
        good: requests that ended whole within their deadline.
        outcomes: how requests ended.
        hit_tokens: prompt tokens that instances had, of requests that ended well.
        answer_tokens: tokens of their answers.
        ideal: what an ideal fleet would have had.
        faults: what failed.
    """

    def __init__(self, plan: Plan, meter: Meter) -> None:
        self.plan, self.meter = plan, meter
        self.loop = asyncio.get_running_loop()
        self.network = SimNetwork(random.Random(f"network {plan.seed}"), NetworkConditions(room=1 << 20))
        self.ideal = Ideal(NAMESPACE, BLOCK_TOKENS)
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.requests = self.good = self.hit_tokens = self.answer_tokens = 0
        self._source = Source(plan.work, plan.seed, VOCAB_SIZE)
        self._hash = hashlib.sha256()
        self._processes = 0
        self._rng = random.Random(f"faults {plan.seed}")
        self.instances = [self._instance(number) for number in range(plan.instances)]
        self.routers = [RouterSide(self, number) for number in range(plan.routers)]

    @property
    def digest(self) -> str:
        """Of all ends, in order."""
        return self._hash.hexdigest()[:16]

    def _instance(self, number: int) -> StandIn:
        self._processes += 1
        return StandIn(self.network, f"i{number}", self._processes)

    # -- the run --------------------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.gather(*[side.process.start(side.router.start(), "start") for side in self.routers])

    async def run(self) -> None:
        """All groups arrive and end."""
        work = self.plan.work
        rng = random.Random(f"arrivals {self.plan.seed}")
        gap_s = work.samples * sum(work.turns) / 2 / work.per_s
        faults = self.loop.create_task(self._break()) if self.plan.failing else None
        async with asyncio.TaskGroup() as groups:
            for group in range(work.groups):
                groups.create_task(self._group(group))
                await asyncio.sleep(rng.expovariate(1 / gap_s))
        if faults is not None:
            faults.cancel()
            await asyncio.wait([faults])
            if not faults.cancelled():
                faults.result()  # of a task that is done

    async def aclose(self) -> None:
        for side in self.routers:
            side.process.go_on()
        await asyncio.gather(*[side.process.start(side.router.aclose(), "close") for side in self.routers])
        await asyncio.gather(*[one.links.aclose(0.0) for one in self.instances])
        for one in self.instances:
            if one.failures:
                raise one.failures[0]

    async def _group(self, group: int) -> None:
        rng = self._source.rng(2, group)
        prompt = self._source.prompt(group)
        streams = bool(rng.random() < self.plan.work.streams)
        samples = [self._sample(group, number, list(prompt), streams) for number in range(self.plan.work.samples)]
        await asyncio.gather(*samples)

    async def _sample(self, group: int, number: int, tokens: list[int], streams: bool) -> None:
        work = self.plan.work
        rng = self._source.rng(3, group, number)
        for turn in range(between(rng, work.turns)):
            if turn:
                await asyncio.sleep(float(rng.uniform(*work.tool_s)))
                tokens += self._source.tool(rng)
            name = f"{group}.{number}.{turn}"
            result = await self._ask(name, group, tokens, between(rng, work.answer_tokens), streams)
            if result is None:
                return
            tokens += result.token_ids
            self.ideal.add(tokens)

    async def _ask(self, name: str, group: int, tokens: list[int], answer: int, streams: bool) -> Result | None:
        """One request, sent again if its router dies."""
        self.requests += 1
        ideal = self.ideal.ask(tokens)
        # callers have arrays; a router takes any sequence
        prompt = array("i", tokens)
        params = SamplingParams(max_tokens=answer, temperature=1.0, seed=1)
        began, until = self.loop.time(), self.loop.time() + self.plan.work.deadline_s
        outcome, result = "deadline", None
        while result is None and self.loop.time() < until:
            sides = [side for side in self.routers if not side.died.done()]
            side = sides[group % len(sides)]
            call = self._call(side, (prompt, params, until - self.loop.time()), streams)
            task = side.process.start(call, "stream" if streams else "complete")
            await asyncio.wait([task, side.died], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # what it held is gone with its process
                self.outcomes["router died"] += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            outcome, result = task.result()  # of a task that is done
            break
        self.outcomes[outcome] += 1
        self._hash.update(f"{name} {outcome} {self.loop.time() - began:.9f}\n".encode())
        if result is None or outcome != "length":
            self.ideal.hit_tokens -= ideal
            return None
        self.good += 1
        self.answer_tokens += answer
        self.hit_tokens += result.samples[0].cached.device
        return result

    async def _call(
        self, side: RouterSide, call: tuple[array[int], SamplingParams, float], streams: bool
    ) -> tuple[str, Result | None]:
        if side.recording is not None:
            side.recording.got.append(Got(self.loop.time(), call=call))
        return await ask(side.router, *call, streams=streams)

    # -- what fails -----------------------------------------------------------------------------------

    async def _break(self) -> None:
        """Instances die one by one; a rack, a switch and a router at even times of the run."""
        plan, rng = self.plan, self._rng
        length_s = plan.work.requests / plan.work.per_s
        kinds = ["rack", "switch", "router"]
        rng.shuffle(kinds)
        times = [(length_s * (number + 1) / (len(kinds) + 1), kind) for number, kind in enumerate(kinds)]
        rate = plan.failing * plan.instances / plan.down_s
        when = rng.expovariate(rate)
        while when < length_s:
            times.append((when, "instance"))
            when += rng.expovariate(rate)
        began = self.loop.time()
        async with asyncio.TaskGroup() as faults:
            for when, kind in sorted(times):
                await asyncio.sleep(max(began + when - self.loop.time(), 0.0))
                faults.create_task(self._fault(kind))

    async def _fault(self, kind: str) -> None:
        plan, rng = self.plan, self._rng
        self.faults[kind] += 1
        if kind == "router":
            alive = [side for side in self.routers if not side.died.done()]
            if len(alive) > 1:
                side = rng.choice(alive)
                side.process.stop()
                self.network.kill(side.wire)
                side.died.set_result(None)
            return
        first = rng.randrange(plan.instances)
        numbers = [first]
        if kind != "instance":
            rack = first // plan.rack
            numbers = list(range(rack * plan.rack, min((rack + 1) * plan.rack, plan.instances)))
        if kind == "switch":
            pairs = [(self.instances[number].wire, side.wire) for number in numbers for side in self.routers]
            for one, other in pairs:
                self.network.partition(one, other)
            await asyncio.sleep(plan.down_s)
            for one, other in pairs:
                self.network.heal(one, other)
            return
        numbers = [number for number in numbers if not self.instances[number].wire.dead]
        await asyncio.gather(*[self.instances[number].die() for number in numbers])
        await asyncio.sleep(plan.down_s)
        for number in numbers:
            self.instances[number] = self._instance(number)

    def facts(self) -> dict[str, Any]:
        """What happened, for the conditions of a report."""
        return {
            "requests": self.requests,
            "outcomes": dict(self.outcomes),
            "faults": dict(self.faults),
            "virtual_s": round(self.loop.time(), 1),
            "digest": self.digest,
            "us_a_request": self.meter.us_each(self.requests),
        }
