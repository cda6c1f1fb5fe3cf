"""The incidents of a simulated fleet: instances die, stand still, are cut off, come and go; weights change; all pause.

Every incident is undone in time, so that the fleet can come to rest. Called by `simulation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, get_args

import msgspec

from fdasync.errors import FdasyncError, UpdateUnderWay
from fdasync.request import PauseMode
from tests.support.sim_fleet.workload import STAMPS

if TYPE_CHECKING:
    from fdasync_fleet.router.router import Router

    from tests.support.sim_fleet.fleet import Fleet
    from tests.support.sim_fleet.machine import Machine
    from tests.support.sim_fleet.workload import Incident


class Incidents:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._made = 0

    async def play(self, incident: Incident) -> None:
        await asyncio.sleep(incident.at_s)
        fleet = self._fleet
        there = [machine for machine in fleet.machines if not machine.dead and not machine.gone]
        if not there:
            return
        if incident.kind in ("rank_dies", "rank_hangs"):
            there = [machine for machine in there if len(machine.ranks) > 1]
            if not there:
                return
        target = there[incident.target % len(there)]
        fleet.counts[incident.kind] += 1
        await getattr(self, f"_{incident.kind}")(incident, target, there)

    async def _kill(self, incident: Incident, target: Machine, _: list[Machine]) -> None:
        target.kill()
        if not incident.for_s:
            return
        await asyncio.sleep(incident.for_s)
        self._made += 1
        plan = target.plan
        base = plan.runner.stamp_base + self._made * 100 * STAMPS
        again = msgspec.structs.replace(
            plan, name=f"{plan.name}.{self._made}", runner=msgspec.structs.replace(plan.runner, stamp_base=base)
        )
        await self._fleet.machine(again).start()

    async def _router(self, _: Incident, __: Machine, ___: list[Machine]) -> None:
        self._fleet.kill_router()

    async def _freeze(self, incident: Incident, target: Machine, _: list[Machine]) -> None:
        target.freeze()
        await asyncio.sleep(incident.for_s)
        target.thaw()

    async def _part(self, incident: Incident, target: Machine, there: list[Machine]) -> None:
        fleet = self._fleet
        other = there[incident.other % len(there)]
        wire = fleet.wires[incident.router] if incident.target < 0 else target.wire
        if wire is other.wire:
            return
        fleet.network.partition(wire, other.wire)
        if incident.target >= 0:
            fleet.fabric.partition(target.transport, other.transport)
        await asyncio.sleep(incident.for_s)
        fleet.network.heal(wire, other.wire)
        if incident.target >= 0:
            fleet.fabric.heal(target.transport, other.transport)

    async def _drain(self, incident: Incident, target: Machine, _: list[Machine]) -> None:
        fleet = self._fleet

        async def drain() -> None:
            try:
                await fleet.routers[incident.router].drain(target.address, incident.for_s)
            except FdasyncError:
                # some request did not end in time, or the instance is gone
                fleet.counts["drains_failed"] += 1
            for router in fleet.routers:
                if router.table.find(target.address) is not None:
                    router.remove(target.address)

        target.leaving = True
        await fleet.wait(fleet.process.start(drain(), "drain"))
        if not target.dead:
            target.gone = True
            await target.aclose()

    async def _join(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        fleet = self._fleet
        assert incident.plan is not None
        machine = fleet.machine(incident.plan)
        await machine.start()

        async def add() -> None:
            for router in fleet.routers:
                try:
                    await router.add(machine.address)
                except FdasyncError:
                    fleet.counts["joins_failed"] += 1

        await fleet.wait(fleet.process.start(add(), "join"))

    async def _die(self, _: Incident, target: Machine, __: list[Machine]) -> None:
        target.break_down()

    async def _rank_dies(self, incident: Incident, target: Machine, _: list[Machine]) -> None:
        target.break_rank(incident.other, silent=False)

    async def _rank_hangs(self, incident: Incident, target: Machine, _: list[Machine]) -> None:
        target.break_rank(incident.other, silent=True)

    async def _pause(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        router = self._fleet.routers[incident.router]
        modes: tuple[PauseMode, ...] = get_args(PauseMode)
        mode = modes[incident.other % len(modes)]
        self._fleet.aborting = self._fleet.aborting or mode == "abort"

        # blocks leave the devices, and weights stay where updates find them
        sleeps = mode == "retract" and incident.other // len(modes) % 2 == 0

        async def pause() -> None:
            try:
                if sleeps:
                    await router.sleep(1, tags=["kv_cache"])
                else:
                    await router.pause(mode)
            except FdasyncError:
                self._fleet.counts["pauses_failed"] += 1
            await asyncio.sleep(incident.for_s)
            if incident.target % 2:
                with contextlib.suppress(FdasyncError):
                    await router.reset_cache()
            try:
                if sleeps:
                    await self._wake_soon(router)
                await router.resume()
            except FdasyncError:
                self._fleet.counts["resumes_failed"] += 1

        await self._fleet.wait(self._fleet.process.start(pause(), "pause"))

    async def _wake_soon(self, router: Router) -> None:
        """Also where an update is under way, or an instance does not answer for now."""
        for _ in range(200):
            try:
                await router.wake()
                return
            except FdasyncError:
                await asyncio.sleep(0.05)
        self._fleet.counts["wakes_failed"] += 1

    async def _update(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        fleet = self._fleet
        version = max(fleet.versions) + 1 if incident.label is None else incident.label
        fleet.versions[version] = incident.weights_id
        fleet.steady = False
        fleet.aborting = fleet.aborting or incident.mode == "abort"

        async def update() -> None:
            fleet.updates += 1
            before, fleet.current = fleet.current, None
            number = fleet.updates
            router = fleet.routers[incident.router]
            try:
                await router.update_weights(version, f"{fleet.folder}/{incident.weights_id}", incident.mode)
            except UpdateUnderWay:
                # the other update decides
                fleet.counts["updates_refused"] += 1
                fleet.updates -= 1
                fleet.current = before
            except FdasyncError:
                fleet.counts["updates_failed"] += 1
            else:
                if len(fleet.routers) == 1:
                    assert number == fleet.updates
                    fleet.current = version

        await fleet.wait(fleet.process.start(update(), "update"))

    async def _label(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        fleet = self._fleet

        async def relabel() -> None:
            try:
                await fleet.routers[incident.router].set_weight_version(incident.label or 0)
            except FdasyncError:
                fleet.counts["labels_failed"] += 1

        await fleet.wait(fleet.process.start(relabel(), "label"))

    async def _wake(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        """One that nobody asked for."""
        fleet = self._fleet

        async def wake() -> None:
            with contextlib.suppress(FdasyncError):
                await fleet.routers[incident.router].wake()

        await fleet.wait(fleet.process.start(wake(), "wake"))

    async def _abort_all(self, incident: Incident, _: Machine, __: list[Machine]) -> None:
        fleet = self._fleet
        fleet.aborting = True
        fleet.process.call(lambda: fleet.counts.update(aborted=fleet.routers[incident.router].abort_all()))
