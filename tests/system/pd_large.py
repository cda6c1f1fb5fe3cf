"""A large fleet in virtual time: how many requests get through, how long leases take, what the scheduler costs.

Instances are engines with links, transports and routers as they are; only their models are cheap. Some of them die and
stand still. Used by `test_pd_large.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork
from fdasync_fleet.testing.sim.process import ProcessTransport, ProcessWire
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults

from fdasync import EngineConfig, Instance, SamplingParams
from fdasync.errors import InstanceLost
from fdasync.events.actions import AskLease
from fdasync.events.catalog import LeaseAnswered
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import Oracle, SyntheticConfig
from fdasync.scheduler.state.config import LeaseRules
from fdasync.testing import check_sample
from fdasync.testing.sim.process import SimProcess

if TYPE_CHECKING:
    from fdasync.events.actions import Action
    from fdasync.result import Result
    from fdasync.scheduler import Scheduler

MODEL = SyntheticConfig(
    num_moe_layers=1, num_experts=64, vocab_size=1000, max_context_tokens=512, block_tokens=16, num_blocks=256,
    step_s=0.02, token_s=2e-5, copy_s=0.0005, jitter=0.2,
)  # fmt: skip
_LINKS = LinkConfig(beat_s=3.0, lost_s=12.0)
_RULES = LeaseRules(ttl_s=15.0)
_CHECKED = 50


class Report(msgspec.Struct, kw_only=True):
    """Attributes:
    goodput: output tokens a second of virtual time, of requests that came whole.
    lease_ms: median and 99th percentile from the question to its answer, in virtual time.
    scheduler_share: of the CPU time.
    """

    requests: int
    outcomes: dict[str, int]
    goodput: float
    lease_ms: tuple[float, float]
    leases: int
    scheduler_share: float
    virtual_s: float
    cpu_s: float


class _Clocked:
    """A scheduler whose time is taken."""

    def __init__(self, scheduler: Scheduler, spent: list[float]) -> None:
        self._handle = scheduler.handle
        self._spent = spent

    def handle(self, events: Any) -> Any:
        began = time.process_time()
        actions = self._handle(events)
        self._spent[0] += time.process_time() - began
        return actions


class _Node(Instance):
    """An instance in a process of its own, whose questions are timed."""

    def __init__(self, fleet: LargeFleet, name: str, role: Any) -> None:
        config = EngineConfig(
            runner="synthetic", process="inline", role=role, num_blocks=MODEL.num_blocks, host_blocks=128,
            max_running=32, max_step_tokens=512, leases=_RULES, seed=len(fleet.nodes),
        )  # fmt: skip
        self.process = SimProcess(name)
        self.wire = ProcessWire(fleet.network, self.process)
        self.transport = ProcessTransport(fleet.fabric, self.process, lambda *_: None)
        runner = SyntheticRunner(msgspec.structs.replace(MODEL, seed=len(fleet.nodes)), config.runner_limits())
        super().__init__(
            config, listen=f"ipc:///run/{name}", name=name, links=_LINKS, wire=self.wire, transports=[self.transport],
            runner=runner,
        )  # fmt: skip
        self.fleet = fleet
        self.asked: dict[tuple[int, int], float] = {}
        self.dead = False

    def perform(self, action: Action) -> None:
        if isinstance(action, AskLease):
            self.asked[action.group, action.attempt] = asyncio.get_running_loop().time()
        super().perform(action)

    async def begin(self) -> None:
        await self.process.start(self.start(), "start")
        driver = self.engine._runtime.driver
        assert driver is not None
        clocked = _Clocked(driver.scheduler, self.fleet.scheduler_s)
        driver.scheduler.handle = clocked.handle  # type: ignore[method-assign]
        publish = self.engine.bus.publish

        def timed(event: Any) -> Any:
            if isinstance(event, LeaseAnswered):
                began = self.asked.pop((event.group, event.attempt))
                if event.granted:
                    self.fleet.lease_s.append(asyncio.get_running_loop().time() - began)
            return publish(event)

        self.engine.bus.publish = timed  # type: ignore[method-assign]


class LargeFleet:
    """See the module."""

    def __init__(self, pairs: int, requests: int, span_s: float, seed: int = 1) -> None:
        self.random = Random(seed)
        self.network = SimNetwork(Random(seed + 1), NetworkConditions(delay_s=(0.0001, 0.001), drop=0.001))
        self.fabric = SimFabric(Random(seed + 2), SimFaults(fail=0.001, corrupt=0.001))
        self.oracle = Oracle(MODEL)
        self.scheduler_s = [0.0]
        self.lease_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.pairs, self.requests, self.span_s = pairs, requests, span_s
        self.nodes: list[_Node] = []

    async def play(self) -> Report:
        cpu = time.process_time()
        loop = asyncio.get_running_loop()
        for number in range(self.pairs):
            self.nodes += [_Node(self, f"p{number}", "prefill"), _Node(self, f"d{number}", "decode")]
        for node in self.nodes:
            await node.begin()
        router = Router(
            [node.address for node in self.nodes], RouterConfig(), links=_LINKS,
            wire=ProcessWire(self.network, SimProcess("router")), seed=1,
        )  # fmt: skip
        await router.start()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._incidents())
            for number in range(self.requests):
                group.create_task(self._call(router, number))
        spent = loop.time() - began
        await self._quiet()
        await router.aclose()
        for node in self.nodes:
            node.process.go_on()
            await node.process.start(node.aclose(), "close")
        lease_s = sorted(self.lease_s)
        cpu_s = time.process_time() - cpu
        return Report(
            requests=self.requests,
            outcomes=dict(self.outcomes),
            goodput=self.tokens / spent,
            lease_ms=(1e3 * lease_s[len(lease_s) // 2], 1e3 * lease_s[len(lease_s) * 99 // 100]),
            leases=len(lease_s),
            scheduler_share=self.scheduler_s[0] / cpu_s,
            virtual_s=spent,
            cpu_s=cpu_s,
        )

    async def _incidents(self) -> None:
        """One in 25 dies, as many stand still for longer than their leases live."""
        chosen = self.random.sample(self.nodes, max(len(self.nodes) // 25, 1) * 2)
        for number, node in enumerate(chosen):
            await asyncio.sleep(self.span_s / len(chosen) * self.random.random())
            node.process.stop()
            if number % 2:
                asyncio.get_running_loop().call_later(25.0, node.process.go_on)
            else:
                node.dead = True
                self.network.kill(node.wire)
                self.fabric.kill(node.transport)

    async def _call(self, router: Router, number: int) -> None:
        random = Random(number)
        await asyncio.sleep(random.random() * self.span_s)
        shared = [(number % 40) * 7 % 1000] * 48
        prompt = (*shared, *[random.randrange(1000) for _ in range(random.randint(1, 150))])
        params = SamplingParams(max_tokens=random.randint(1, 32), seed=number, temperature=1.0, logprobs="raw")
        try:
            result = await router.complete(prompt, params, deadline_s=300.0)
        except InstanceLost:
            self.outcomes["InstanceLost"] += 1
            return
        self.outcomes[result.finish_reason] += 1
        self._check(result, prompt, params, whole=number % _CHECKED == 0)

    def _check(self, result: Result, prompt: tuple[int, ...], params: SamplingParams, *, whole: bool) -> None:
        (sample,) = result.samples
        self.tokens += len(sample.token_ids)
        if whole:
            check_sample(sample, prompt, params, self.oracle)
        else:
            assert sample.routing is not None
            assert len(sample.token_ids) == params.max_tokens
            assert len(sample.routing.array) == len(prompt) + params.max_tokens - 1

    async def _quiet(self) -> None:
        """All that is left comes back."""
        await asyncio.sleep(60.0)
        for node in self.nodes:
            if not node.dead:
                node.engine.check()
                stats = node.engine.stats()
                counters = stats.scheduler
                assert not stats.live
                assert (counters.hand_offs, counters.leased, counters.running) == (0, 0, 0)
                assert counters.free_blocks + counters.idle_blocks == counters.num_blocks
                assert not len(node.transport.offers)
