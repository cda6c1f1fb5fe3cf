"""A simulated fleet: its machines, its router, and the record of their acts. Played by `simulation.py`."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from fdasync_fleet.messages import Answered, Ended, SampleEnd
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.process import ProcessWire
from fdasync_fleet.testing.sim.transport import SimFabric

from fdasync.errors import EngineFailed
from fdasync.testing.sim.process import SimProcess
from tests.support.sim_fleet.checks import check_trace
from tests.support.sim_fleet.machine import Machine

if TYPE_CHECKING:
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.wire import Frame
    from fdasync_fleet.messages import Message

    from tests.support.sim_fleet.workload import InstancePlan, PdWorkload

_QUIET_S = 400.0


class _Router(Router):
    """Remembers the instance that answered each request, or sent whole samples of it, and the request's name there."""

    answered: dict[str, tuple[str, str]]
    began: dict[str, tuple[str, str]]

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        ends = isinstance(message, SampleEnd | Ended | Answered)
        request = self.dispatch._by_name.get(message.request) if ends else None
        if request is not None and not isinstance(message, Ended):
            self.began[request.request_id] = (peer.name, message.request)
        if request is not None and not isinstance(message, SampleEnd):
            super().on_message(peer, message, payload)
            if request.done.done() and request.error is None:
                self.answered[request.request_id] = (peer.name, message.request)
            return
        super().on_message(peer, message, payload)


class Fleet:
    """All machines and the routers, which live in one process.

    Attributes:
        machines: present and past ones.
        routers: one, or two.
        versions: weights id that each version named last.
        steady: no update has begun.
        answered: the instance that answered each request, and the request's name there.
        began: the instance that last sent a whole sample of each request, and the request's name there.
        aborting: an update may have aborted requests.
        updates: number of updates that began.
        current: the version that all answers must be of; None while an update is under way, after a failed one, and
            where two routers may update.
    """

    def __init__(self, work: PdWorkload, folder: str) -> None:
        self.work = work
        self.folder = folder
        self.network = SimNetwork(Random(f"network {work.seed}"), work.conditions)
        self.fabric = SimFabric(Random(f"fabric {work.seed}"), work.faults)
        self.process = SimProcess("router")
        self.versions = {0: work.shape.weights_id}
        self.machines: list[Machine] = []
        self.outcomes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.answered: dict[str, tuple[str, str]] = {}
        self.began: dict[str, tuple[str, str]] = {}
        self.aborting = False
        self.updates = 0
        self.steady = True
        self.current: int | None = 0 if work.routers == 1 else None
        self._random = Random(f"versions {work.seed}")
        self.wires = [ProcessWire(self.network, self.process) for _ in range(work.routers)]
        self.router_died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        addresses = [plan.address for plan in work.instances]
        self.routers = [
            _Router(addresses, work.router, links=work.links, wire=wire, seed=work.seed + number)
            for number, wire in enumerate(self.wires)
        ]
        for router in self.routers:
            router.answered, router.began = self.answered, self.began

    def machine(self, plan: InstancePlan) -> Machine:
        """Add a machine, with the latest weights or with older ones."""
        version = self._random.choice((max(self.versions), *self.versions, 0))
        self.counts["old_weights"] += version != self.current
        machine = Machine(
            plan, self.network, self.fabric, self.work.links, weights_id=self.versions[version], version=version
        )
        self.machines.append(machine)
        return machine

    async def wait(self, task: asyncio.Task[None]) -> None:
        """Wait until the task or the router's process has ended."""
        await asyncio.wait([task, self.router_died], return_when=asyncio.FIRST_COMPLETED)
        if self.router_died.done():
            task.cancel()
        else:
            task.result()  # of a task that is done

    def kill_router(self) -> None:
        self.process.stop()
        for wire in self.wires:
            self.network.kill(wire)
        if not self.router_died.done():
            self.router_died.set_result(None)

    # -- the end --------------------------------------------------------------------------------------

    async def quiet(self) -> None:
        """Wait until no machine holds anything, and check that. No request may be live."""
        until = asyncio.get_running_loop().time() + _QUIET_S
        well = [machine for machine in self.machines if machine.is_well]
        for machine in well:
            # of a router that has died, or brings it up to date
            while machine.engine.stats().updating and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            # the router may have found no way to wake and to resume it
            try:
                await machine.process.start(machine.engine.wake(), "wake")
                await machine.process.start(machine.engine.resume(), "resume")
            except EngineFailed:
                # a rank of it is silent, which the deadline of its step tells only now
                if not machine.failing:
                    raise
        while any(machine.held() for machine in well) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.5)
            well = [machine for machine in well if machine.is_well]
        for machine in well:
            machine.check_idle()
        for machine in self.machines:
            if machine.problem is not None:
                raise machine.problem
            fine = machine.failing or machine.dead or machine.gone or machine.engine.state == "running"
            assert fine, f"{machine.name} is {machine.engine.state}: {machine.engine._failure!r}"
        if self.router_died.done():
            return
        for router in self.routers:
            assert router.failure is None
            assert not router.dispatch.num_held, f"the router still has {router.live}"
            assert not router.commands.is_updating, "an update has not ended"
            await router.dispatch.wait_open(0.0)
            for member in router.table.instances.values():
                assert not member.live, f"{member.address} has {member.live} requests, says the router"
                assert not member.tokens, f"{member.address} has {member.tokens} tokens, says the router"

    async def aclose(self) -> None:
        self.process.go_on()
        for router in self.routers:
            await self.process.start(router.aclose(), "close")
        for machine in self.machines:
            await machine.aclose()
        for machine in self.machines:
            check_trace(machine)

    def count(self) -> None:
        self.counts["unequal"] += self.work.unequal
        self.counts["two_routers"] += self.work.routers > 1
        widths = {len(machine.ranks) for machine in self.machines}
        self.counts["groups"] += widths != {1}
        self.counts["unequal_widths"] += len(widths) > 1
        for machine in self.machines:
            # a broken rank must show in the engine's failure, by its number
            self.counts["ranks_blamed"] += len(machine.ranks) > 1 and "rank " in str(machine.engine._failure)
            stats = machine.engine.stats().scheduler
            names = ("steps", "preemptions", "evictions", "hit_tokens", "leases_granted", "leases_denied",
                     "leases_dropped", "received_blocks")  # fmt: skip
            self.counts.update({name: getattr(stats, name) for name in names})
        self.counts.update(self.fabric.counts)
        self.counts["frames_lost"] += self.network.lost
