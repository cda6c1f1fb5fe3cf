"""Plays a workload on a fleet of instances behind a router, in virtual time, and holds what comes of it to the oracle.

Each request ends exactly once, by its deadline and the router's grace, with the oracle's tokens, log-probs and rows, or
with an error that says that it may be tried again; rows are of the passes whose KV is in use, whichever instance made
it. The books of every instance balance after every turn; when all is quiet nobody holds anything; traces replay.
Instances are killed, stopped and parted in the middle of all that. A broken rule raises `SimulationFailed`.

Called by tests: `simulate_pd(seed)`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from fdasync.pd.messages import Ended
from fdasync.pd.router import Router
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing.leaks import no_leaks
from fdasync.testing.loop import run_sim
from fdasync.testing.network import SimNetwork
from fdasync.testing.pd_callers import Callers
from fdasync.testing.pd_checks import check_trace
from fdasync.testing.pd_machine import Machine
from fdasync.testing.pd_trouble import Trouble
from fdasync.testing.pd_workload import PdWorkload
from fdasync.testing.sim_process import ProcessWire, SimProcess
from fdasync.testing.sim_transport import SimFabric
from fdasync.testing.simulation import SimulationFailed

if TYPE_CHECKING:
    from fdasync.pd.messages import Message
    from fdasync.pd.peer import Peer
    from fdasync.pd.wire import Frame
    from fdasync.testing.pd_workload import InstancePlan

_QUIET_S = 400.0


class PdReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation was made of, to see that it exercised something.

    Attributes:
        outcomes: finish reasons of samples, and errors by name.
        counts: of leases, blocks, incidents, retries.
    """

    outcomes: dict[str, int]
    counts: dict[str, int]
    virtual_s: float


def simulate_pd(seed: int) -> PdReport:
    """Draw the workload of this seed, play it, check it. Raises SimulationFailed."""
    try:
        work = PdWorkload.draw(seed)
        with no_leaks(), tempfile.TemporaryDirectory() as folder:
            for incident in work.incidents:
                path = Path(folder, str(incident.weights_id))
                path.mkdir(exist_ok=True)
                (path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": incident.weights_id}))
            return run_sim(Fleet(work, folder).play())
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        again = f"pytest tests/test_pd_simulation.py --pd-seed {seed}"
        raise SimulationFailed(seed, f"{type(first).__name__}: {first}", again) from first


class _Router(Router):
    """Remembers who answered which request, under which name."""

    answered: dict[str, tuple[str, str]]

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        if isinstance(message, Ended) and (request := self.dispatch.find_try(message.request)) is not None:
            super().on_message(peer, message, payload)
            if request.done.done() and request.error is None:
                self.answered[request.request_id] = (peer.name, message.request)
            return
        super().on_message(peer, message, payload)


class Fleet:
    """All machines, the router, and who asks it.

    Attributes:
        machines: those that are or were there.
        versions: weights id of each version.
        answered: who answered which request, under which name.
        aborting: an update may have aborted somebody.
        updates: that began so far; current: the version that all answers must be of, None while one is under way, or
            where the last one failed.
    """

    def __init__(self, work: PdWorkload, folder: str) -> None:
        self.work = work
        self.folder = folder
        self.network = SimNetwork(Random(f"network {work.seed}"), work.weather)
        self.fabric = SimFabric(Random(f"fabric {work.seed}"), work.faults)
        self.process = SimProcess("router")
        self.versions = {0: work.shape.weights_id}
        self.machines: list[Machine] = []
        self.outcomes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.answered: dict[str, tuple[str, str]] = {}
        self.aborting = False
        self.updates = 0
        self.current: int | None = 0
        self._random = Random(f"versions {work.seed}")

    def machine(self, plan: InstancePlan) -> Machine:
        """Another one, with the latest weights or with older ones."""
        version = self._random.choice((max(self.versions), *self.versions, 0))
        self.counts["old_weights"] += version != self.current
        machine = Machine(
            plan, self.network, self.fabric, self.work.links, weights_id=self.versions[version], version=version
        )
        self.machines.append(machine)
        return machine

    async def play(self) -> PdReport:
        try:
            return await self._play()
        except BaseException:
            # who stands still cannot be cancelled
            for process in (self.process, *[machine.process for machine in self.machines]):
                process.go_on()
            raise

    async def _play(self) -> PdReport:
        work = self.work
        self.router_died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wire = ProcessWire(self.network, self.process)
        for plan in work.instances:
            await self.machine(plan).start()
        addresses = [plan.address for plan in work.instances]
        self.router = _Router(addresses, work.router, links=work.links, wire=self.wire, seed=work.seed)
        self.router.answered = self.answered
        await self.process.start(self.router.start(), "start")
        trouble, callers = Trouble(self), Callers(self)
        async with asyncio.TaskGroup() as group:
            for incident in work.incidents:
                group.create_task(trouble.play(incident), name=incident.kind)
            for number, asked in enumerate(work.requests):
                # its caller lives in the router's process
                group.create_task(self.wait(self.process.start(callers.call(number, asked), f"caller-{number}")))
        await self._quiet()
        await self._close()
        self._count()
        return PdReport(
            outcomes=dict(self.outcomes),
            counts={name: int(count) for name, count in self.counts.items()},
            virtual_s=asyncio.get_running_loop().time(),
        )

    async def wait(self, task: asyncio.Task[None]) -> None:
        """Until it has ended, or the router's process has."""
        await asyncio.wait([task, self.router_died], return_when=asyncio.FIRST_COMPLETED)
        if self.router_died.done():
            task.cancel()
        else:
            task.result()  # of a task that is done

    def kill_router(self) -> None:
        self.process.stop()
        self.network.kill(self.wire)
        if not self.router_died.done():
            self.router_died.set_result(None)

    # -- the end --------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Nobody asks for anything: soon nobody holds anything."""
        until = asyncio.get_running_loop().time() + _QUIET_S
        well = [machine for machine in self.machines if machine.is_well]
        for machine in well:
            # the router may have found no way to tell it so
            await machine.process.start(machine.engine.resume(), "resume")
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
        router = self.router
        if self.router_died.done():
            return
        assert not router.dispatch.num_held, f"the router still has {router.live}"
        for member in router.fleet.members.values():
            assert not member.live, f"{member.address} has {member.live} requests, says the router"
            assert not member.tokens, f"{member.address} has {member.tokens} tokens, says the router"

    async def _close(self) -> None:
        self.process.go_on()
        await self.process.start(self.router.aclose(), "close")
        for machine in self.machines:
            await machine.aclose()
        for machine in self.machines:
            check_trace(machine)

    def _count(self) -> None:
        self.counts["unequal"] += self.work.unequal
        for machine in self.machines:
            stats = machine.engine.stats().scheduler
            names = ("steps", "preemptions", "evictions", "hit_tokens", "leases_granted", "leases_denied",
                     "leases_dropped", "received_blocks")  # fmt: skip
            self.counts.update({name: getattr(stats, name) for name in names})
        self.counts.update(self.fabric.counts)
        self.counts["frames_lost"] += self.network.lost
