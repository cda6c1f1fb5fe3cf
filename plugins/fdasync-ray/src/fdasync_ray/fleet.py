"""Starts a fleet on a Ray cluster, and keeps it whole: `async with RayFleet(config) as fleet`.

Each instance has a place with a task of its own (`slot.py`), which starts it again when it ends or its node dies, where
there is room. The fleet ends with the process that has this object: its actors are not detached. `up.py` and embedders
use it; Ray must be connected (`ray.init`).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import msgspec
import ray
from fdasync_fleet.link.keys import load_keys, new_keys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fdasync.errors import BadInput, ConfigError, DeadlineExceeded
from fdasync.ipc.deadlines import wait_within
from fdasync_ray.client import FleetClient, answer, check_connected, registry_name
from fdasync_ray.config import NAMESPACE, ROLES
from fdasync_ray.registry import Registry
from fdasync_ray.room import no_room
from fdasync_ray.slot import CLOSE_S, START_S, Shared, Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.cli.local.child import Role

    from fdasync_ray.config import FleetConfig, Member, View

_LOOK_S = 1.0


class RayFleet(FleetClient):
    """See the module. A `FleetClient` of itself.

    Args:
        config: what to start.
        tell: called with lines for people: what loads, is ready, ended, and what happens then.

    Attributes:
        config: as given.
        slots: the places that the fleet is to have, by name.
    """

    def __init__(self, config: FleetConfig, tell: Callable[[str], None] = lambda _line: None) -> None:
        """Raises ConfigError."""
        config.check()
        super().__init__(config.name, None)
        self.config = config
        self.slots: dict[str, Slot] = {}
        self._shared = Shared(config, tell)

    async def __aenter__(self) -> RayFleet:
        """Start all instances, and wait until they take requests. Raises what `start` and `whole` raise; then nothing
        is left."""
        try:
            await self.start()
            await self.whole(self.config.engine.start_deadline_s + START_S)
        except BaseException:
            # what has started must end, whatever ended the start
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the registry and all instances; returns before they are ready. Call `aclose` in any case.

        Raises ConfigError without a cluster, if a fleet of this name runs, or for the file of keys.
        """
        check_connected()
        shared = self._shared
        shared.keys = load_keys(self.config.keys) if self.config.keys else new_keys()
        shared.uid = secrets.token_hex(8)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": registry_name(self.name), "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
        try:
            # blocking: one message
            shared.registry = ray.remote(Registry).options(**options).remote(shared.uid, shared.keys)
        except ValueError:
            raise ConfigError(
                "name", f"a fleet {self.name!r} runs in this cluster already", hint="choose another (--name)"
            ) from None
        self._registry = shared.registry
        await answer(self._registry.uid.remote(), "starting the registry")
        for role, count in self.config.counts().items():
            self._grow(role, count)

    async def whole(self, limit_s: float) -> tuple[Member, ...]:
        """Wait until every place has an instance that takes requests; returns them.

        Raises ConfigError when a place was given up; NoRoom when the cluster has had none for the configuration's
        `room_s`; DeadlineExceeded, which names the places that lack one. Changes nothing: places stay wanted.
        """

        def look(view: View) -> tuple[Member, ...] | None:
            for slot in self.slots.values():
                if slot.state == "failed":
                    raise ConfigError("instances", slot.problem)
            there = {one.name for one in view.members if not one.draining}
            return view.members if {slot.name for slot in self.slots.values()} <= there else None

        loop = asyncio.get_running_loop()
        began, until = loop.time(), loop.time() + limit_s
        while True:
            try:
                # a place that is given up changes no view
                return await self.until(look, "", min(_LOOK_S, max(until - loop.time(), 0.0)))
            except DeadlineExceeded:
                now, room_s = loop.time(), min(self.config.room_s, limit_s)
                waiting = {name: since for name, slot in self.slots.items() if (since := slot.full_since) is not None}
                # a place may have waited since long before this call
                full = [name for name, since in waiting.items() if now - max(since, began) >= room_s]
                if full or (waiting and now >= until):
                    # threads: Ray's books are read by blocking calls alone, and this process is no engine
                    raise await asyncio.to_thread(no_room, waiting, self.config.bundle(), room_s) from None
                if now >= until:
                    lacking = [f"{one.name} ({one.state})" for one in self.slots.values() if one.state != "ready"]
                    raise DeadlineExceeded(f"starting {', '.join(lacking)}", limit_s) from None

    async def scale(self, *, limit_s: float = 900.0, **counts: int) -> bool:
        """Have so many instances of the roles that are named, as `scale(decode=8)`, and wait for it.

        The last instances of the role leave. They take no new requests, and end when their requests have ended, or
        after the configuration's `drain_s`. Returns False if their requests were cut short. Cancelling stops the
        waiting alone. Raises BadInput; and as `whole`.
        """
        if unknown := counts.keys() - set(ROLES):
            raise BadInput("counts", f"{min(unknown)!r} is no role", limit=", ".join(ROLES))
        wanted = {role: counts.get(role, self._count(role)) for role in ROLES}
        try:
            msgspec.structs.replace(self.config, **wanted).check()
        except ConfigError as error:
            raise BadInput("counts", error.problem, hint=error.hint) from None
        leaving: list[Slot] = []
        for role, count in wanted.items():
            mine = [slot for slot in self.slots.values() if slot.role == role]
            leaving += mine[count:]
            self._grow(role, count - len(mine))
        for slot in leaving:
            del self.slots[slot.name]
        drained = await _leave(leaving, min(self.config.drain_s + CLOSE_S, limit_s))
        for slot in leaving:
            slot.task.cancel()
        await self.whole(limit_s)
        return drained

    def _count(self, role: Role) -> int:
        return sum(slot.role == role for slot in self.slots.values())

    def _grow(self, role: Role, count: int) -> None:
        # a leaving instance has its name until it has left
        taken = {*self.slots, *(slot.name for slot in self._shared.slots)}
        names = (name for number in range(10_000) if (name := f"{role[0]}{number}") not in taken)
        for _, name in zip(range(count), names, strict=False):
            self.slots[name] = Slot(name, role, self._shared)

    async def aclose(self) -> None:
        """End all instances at once, and their actors; idempotent. `drain` before to let requests end."""
        tasks = [slot.task for slot in self._shared.slots]
        for task in tasks:
            task.cancel()
        if tasks:
            # bounded: each has deadlines of its own
            await asyncio.wait(tasks)
        registry, self._registry, self._shared.registry = self._registry, None, None
        if registry is not None:
            ray.kill(registry)

    async def drain(self) -> bool:
        """Have all instances leave, prefill instances first; True: all ended their requests."""
        drained = True
        for roles in (("prefill",), ("decode", "mixed")):
            slots = [slot for slot in self.slots.values() if slot.role in roles]
            drained = await _leave(slots, self.config.drain_s + CLOSE_S) and drained
        return drained


async def _leave(slots: list[Slot], limit_s: float) -> bool:
    """Have these leave; True: each ended its requests."""
    for slot in slots:
        slot.leaving.set()
    if slots:
        await wait_within([slot.task for slot in slots], limit_s)
    return all(slot.state == "ended" and not slot.problem for slot in slots)
