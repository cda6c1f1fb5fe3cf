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
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork

from benchmarks.fleet.scale_instance import NAMESPACE, VOCAB_SIZE, Pace, StandIn
from benchmarks.fleet.scale_meter import Meter, MeteredRouter, MeteredWire
from benchmarks.fleet.scale_replay import Recording, RecordingWire
from benchmarks.fleet.scale_work import Ideal, Source, Work, between
from fdasync.errors import FdasyncError
from fdasync.request import SamplingParams
from fdasync.testing.sim.process import SimProcess

if TYPE_CHECKING:
    from fdasync.result import Result

LINKS = LinkConfig()
_CONNECT_S = 60.0
_AGAIN_S = 0.1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    instances, rack: number of instances, and how many stand in one rack.
    routers: number of routers; each dials all instances.
    work: the workload.
    pace: what steps cost.
    failing: share of the instances that are down at a time, in the mean.
    down_s: how long an instance, a rack's power or its switch is gone.
    recorded: keep what the first router gets, for `scale_replay.py`.
    racks, switches, dead_routers: racks that lose power, racks that are cut off, routers that die, in the run.
    """

    instances: int
    rack: int = 32
    routers: int = 1
    work: Work = Work()
    pace: Pace = Pace()
    failing: float = 0.0
    down_s: float = 8.0
    racks: int = 0
    switches: int = 0
    dead_routers: int = 0
    recorded: bool = False
    seed: int = 0


class RouterSide:
    """One router, in a process of its own."""

    def __init__(self, world: World, number: int) -> None:
        self.process = SimProcess(f"router{number}")
        world.meter.watch(self.process)
        addresses = [one.address for one in world.instances]
        config = RouterConfig(require="all", connect_s=_CONNECT_S)
        self.recording: Recording | None = None
        if world.plan.recorded and number == 0:
            self.recording = Recording(addresses, config, number)
            self.wire: MeteredWire = RecordingWire(world.network, self.process, self.recording)
        else:
            self.wire = MeteredWire(world.network, self.process)
        self.wire.meter = world.meter
        self.died: asyncio.Future[None] = world.loop.create_future()
        self.router = MeteredRouter(addresses, config, links=LINKS, wire=self.wire, seed=number)
        self.router.meter = world.meter

    def die(self, network: SimNetwork) -> None:
        self.process.stop()
        network.kill(self.wire)
        if not self.died.done():
            self.died.set_result(None)


class World:
    """See the module. Made and run on one loop.

    Attributes:
        outcomes: how requests ended.
        good: requests that ended whole within their deadline.
        hit_tokens: prompt tokens that instances had, of requests that ended well.
        faults: what failed.
    """

    def __init__(self, plan: Plan, meter: Meter) -> None:
        self.plan, self.meter = plan, meter
        self.loop = asyncio.get_running_loop()
        self.network = SimNetwork(random.Random(f"network {plan.seed}"), NetworkConditions(room=1 << 20))
        self.source = Source(plan.work, plan.seed, VOCAB_SIZE)
        self.ideal = Ideal(NAMESPACE, plan.pace.block_tokens)
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.requests = self.good = self.hit_tokens = self.prompt_tokens = self.answer_tokens = 0
        self.spent_s: list[float] = []
        self._hash = hashlib.sha256()
        self._processes = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._rng = random.Random(f"faults {plan.seed}")
        self.instances = [self._instance(number) for number in range(plan.instances)]
        self.routers = [RouterSide(self, number) for number in range(plan.routers)]

    @property
    def digest(self) -> str:
        """Of all ends, in order."""
        return self._hash.hexdigest()

    def _instance(self, number: int) -> StandIn:
        self._processes += 1
        name = f"i{number}"
        return StandIn(self.network, self.network.wire(name), name, self._processes, self.plan.pace, LINKS)

    # -- the run --------------------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.gather(*[side.process.start(side.router.start(), "start") for side in self.routers])

    async def run(self) -> None:
        """All groups arrive and end."""
        work = self.plan.work
        rng = random.Random(f"arrivals {self.plan.seed}")
        faults = self.loop.create_task(self._break())
        groups = []
        gap_s = work.samples * sum(work.turns) / 2 / work.per_s
        for group in range(work.groups):
            groups.append(self.loop.create_task(self._group(group)))
            await asyncio.sleep(rng.expovariate(1 / gap_s))
        await asyncio.gather(*groups)
        faults.cancel()
        await asyncio.wait([faults])
        if not faults.cancelled():
            faults.result()  # of a task that is done

    async def aclose(self) -> None:
        for side in self.routers:
            side.process.go_on()
        await asyncio.gather(*[side.process.start(side.router.aclose(), "close") for side in self.routers])
        await asyncio.gather(*[one.links.aclose(0.0) for one in self.instances])
        await asyncio.gather(*self._closing)
        for one in self.instances:
            if one.failures:
                raise one.failures[0]

    async def _group(self, group: int) -> None:
        rng = self.source.rng(2, group)
        prompt = self.source.prompt(group)
        streams = bool(rng.random() < self.plan.work.streams)
        samples = [self._sample(group, number, list(prompt), streams) for number in range(self.plan.work.samples)]
        await asyncio.gather(*samples)

    async def _sample(self, group: int, number: int, tokens: list[int], streams: bool) -> None:
        work = self.plan.work
        rng = self.source.rng(3, group, number)
        for turn in range(between(rng, work.turns)):
            if turn:
                await asyncio.sleep(float(rng.uniform(*work.tool_s)))
                tokens += self.source.tool(rng)
            result = await self._ask(
                f"{group}.{number}.{turn}", group, tokens, between(rng, work.answer_tokens), streams
            )
            if result is None:
                return
            tokens += result.token_ids
            self.ideal.add(tokens)

    async def _ask(self, name: str, group: int, tokens: list[int], answer: int, streams: bool) -> Result | None:
        """One request, sent again if its router dies."""
        self.requests += 1
        self.prompt_tokens += len(tokens)
        ideal = self.ideal.ask(tokens)
        # callers have arrays; a router takes any sequence
        prompt = array("i", tokens)
        params = SamplingParams(max_tokens=answer, temperature=1.0, seed=1)
        began, until = self.loop.time(), self.loop.time() + self.plan.work.deadline_s
        outcome, result = "deadline", None
        while result is None and self.loop.time() < until:
            sides = [side for side in self.routers if not side.died.done()]
            side = sides[group % len(sides)]
            call = self._stream if streams else self._complete
            left_s = until - self.loop.time()
            task = side.process.start(call(side, prompt, params, left_s), "stream" if streams else "complete")
            await asyncio.wait([task, side.died], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # what it held is gone with its process
                self.outcomes["router died"] += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            outcome, result = task.result()  # of a task that is done
            break
        self.outcomes[outcome] += 1
        spent_s = self.loop.time() - began
        self._hash.update(f"{name} {outcome} {spent_s:.9f}\n".encode())
        if result is None or outcome != "length":
            self.ideal.hit_tokens -= ideal
            return None
        self.good += 1
        self.spent_s.append(spent_s)
        self.answer_tokens += answer
        self.hit_tokens += result.samples[0].cached.device
        return result

    async def _complete(
        self, side: RouterSide, prompt: array[int], params: SamplingParams, left_s: float
    ) -> tuple[str, Result | None]:
        if side.recording is not None:
            side.recording.call(prompt, params, left_s)
        try:
            result = await side.router.complete(prompt, params, deadline_s=left_s)
        except FdasyncError as error:
            return type(error).__name__, None
        return str(result.samples[0].finish_reason), result

    async def _stream(
        self, side: RouterSide, prompt: array[int], params: SamplingParams, left_s: float
    ) -> tuple[str, Result | None]:
        try:
            async with side.router.generate(prompt, params, deadline_s=left_s) as stream:
                async for _ in stream:
                    pass
            result = stream.result
        except FdasyncError as error:
            return type(error).__name__, None
        return str(result.samples[0].finish_reason), result

    # -- what fails -----------------------------------------------------------------------------------

    async def _break(self) -> None:
        """Instances die one by one; racks, switches and routers at even times of the run."""
        plan, rng = self.plan, self._rng
        length_s = plan.work.requests / plan.work.per_s
        what = ["rack"] * plan.racks + ["switch"] * plan.switches + ["router"] * plan.dead_routers
        rng.shuffle(what)
        times = [(length_s * (number + 1) / (len(what) + 1), kind) for number, kind in enumerate(what)]
        if plan.failing:
            rate = plan.failing * plan.instances / plan.down_s
            when = rng.expovariate(rate)
            while when < length_s:
                times.append((when, "instance"))
                when += rng.expovariate(rate)
        tasks: set[asyncio.Task[None]] = set()
        began = self.loop.time()
        try:
            for when, kind in sorted(times):
                await asyncio.sleep(max(began + when - self.loop.time(), 0.0))
                tasks.add(self.loop.create_task(self._fault(kind)))
            if tasks:
                await asyncio.gather(*tasks)
            # until the run is over
            await asyncio.sleep(1e6)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _fault(self, kind: str) -> None:
        plan, rng = self.plan, self._rng
        self.faults[kind] += 1
        if kind == "router":
            alive = [side for side in self.routers if not side.died.done()]
            if len(alive) > 1:
                rng.choice(alive).die(self.network)
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
        for number in numbers:
            closing = self.instances[number].die()
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        await asyncio.sleep(plan.down_s)
        for number in numbers:
            self.instances[number] = self._instance(number)

    def facts(self) -> dict[str, Any]:
        """What happened, for the conditions of a report."""
        spent_s = sorted(self.spent_s)
        at = {f"p{part}_s": round(spent_s[len(spent_s) * part // 100], 3) for part in (50, 99)} if spent_s else {}
        return {
            "requests": self.requests,
            "good": self.good,
            "outcomes": dict(self.outcomes),
            "faults": dict(self.faults),
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "hit_tokens": self.hit_tokens,
            "ideal_hit_tokens": self.ideal.hit_tokens,
            "virtual_s": round(self.loop.time(), 1),
            "digest": self.digest[:16],
            **at,
        }
