"""Starts a fleet on a Ray cluster, and keeps it whole: `async with RayFleet(config) as fleet`.

Each instance is an actor in a placement group of its own (`supervisor.py`), whose one bundle keeps a group of
tensor-parallel ranks on one node. The node with the fewest instances is asked for first. A task for each instance
starts it again when it ends or its node dies, where there is room. The fleet ends with the process that has this
object: its actors are not detached. `command.py` and embedders use it; Ray must be connected (`ray.init`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fdasync.cli.local.child import Plan
from fdasync.cli.local.restarts import Restarts
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, FdasyncError
from fdasync.ipc.deadlines import wait_within
from fdasync_ray.client import FleetClient, answer, registry_name
from fdasync_ray.config import NAMESPACE, ROLES, Member
from fdasync_ray.registry import Registry
from fdasync_ray.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cli.local.child import Role
    from fdasync_ray.config import Current, FleetConfig, Told, View

_WATCH_S = 10.0
_SOON_S = 3.0
_CLOSE_S = 30.0
_ROOM_S = 1.0
_UPDATE_S = 900.0
# beyond an engine's own start deadline
_START_S = 30.0


class Slot:
    """One place of a fleet and the task that keeps an instance in it; `RayFleet` alone changes it.

    Attributes:
        name, role: as "d0" and "decode".
        state: "placing", "loading", "ready", "draining", "waiting" (to be started again), "ended", "failed".
        node: of its actor; "" without one.
        wanted: the node that was asked for.
        problem: of its last end, in words; "".
        starts: how often it was started.
    """

    def __init__(self, name: str, role: Role, restarts: Restarts) -> None:
        self.name, self.role = name, role
        self.state = "placing"
        self.node = self.wanted = self.problem = ""
        self.starts = 0
        self.restarts = restarts
        self.leaving = asyncio.Event()
        self.actor: Any = None
        self.group: Any = None
        self.task: asyncio.Task[None] | None = None


class _Lost(FdasyncError):
    """An instance, its actor or its node is gone."""


class _NoRoom(FdasyncError):
    """The cluster has no place for an instance now; one that comes later is taken."""


class RayFleet(FleetClient):
    """See the module. A `FleetClient` of itself.

    Args:
        config: what to start.
        tell: called with lines for people: what ended, and what happens then.

    Attributes:
        config: as given.
        slots: the fleet's places, by name.
    """

    def __init__(self, config: FleetConfig, tell: Callable[[str], None] = lambda _line: None) -> None:
        """Raises ConfigError."""
        config.check()
        super().__init__(config.name, None)
        self.config = config
        self.slots: dict[str, Slot] = {}
        self._tell = tell
        # one after the other, so that each sees where those before it go
        self._choosing = asyncio.Lock()

    async def __aenter__(self) -> RayFleet:
        """Start all instances, and wait until they take requests. Raises ConfigError if one cannot start, or a fleet of
        this name runs already; DeadlineExceeded if the cluster has no room."""
        try:
            await self.start()
            await self.whole(self.config.engine.start_deadline_s + _START_S)
        except BaseException:
            # what has started must end, whatever ended the start
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the registry and all instances; returns before they are ready. Call `aclose` in any case."""
        uid = secrets.token_hex(8)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": registry_name(self.name), "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
        try:
            self._registry = ray.remote(Registry).options(**options).remote(uid)  # blocking: one message
        except ValueError:
            raise ConfigError("name", f"a fleet {self.name!r} runs in this cluster already") from None
        self._uid = await answer(self._registry.uid.remote(), "starting the registry")
        for role, count in self.config.counts().items():
            self._grow(role, count)

    async def whole(self, limit_s: float) -> tuple[Member, ...]:
        """Wait until every place has an instance that takes requests; returns them. Raises ConfigError when a place was
        given up; DeadlineExceeded, which names the others."""

        def look(view: View) -> tuple[Member, ...] | None:
            for slot in self.slots.values():
                if slot.state == "failed":
                    raise ConfigError("instances", slot.problem)
            there = {one.name for one in view.members if not one.draining}
            return view.members if {slot.name for slot in self.slots.values()} <= there else None

        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while True:
            try:
                # a place that is given up changes no view
                return await self.until(look, "", min(1.0, max(until - loop.time(), 0.0)))
            except DeadlineExceeded:
                if loop.time() >= until:
                    lacking = [f"{one.name} ({one.state})" for one in self.slots.values() if one.state != "ready"]
                    raise DeadlineExceeded(f"starting {', '.join(lacking)}", limit_s) from None

    async def scale(self, *, limit_s: float = 900.0, **counts: int) -> None:
        """Have so many instances of the roles that are named, as `scale(decode=8)`, and wait for it.

        Those that leave are the last ones of their role. They take no new requests, and end when theirs have ended, or
        after the configuration's `drain_s`. Raises BadInput; ConfigError and DeadlineExceeded as `whole`.
        """
        wanted = {role: counts.get(role, self._count(role)) for role in ROLES}
        if unknown := counts.keys() - set(ROLES):
            raise BadInput("counts", f"{min(unknown)!r} is no role", limit=", ".join(ROLES))
        try:
            msgspec.structs.replace(self.config, **wanted).check()
        except ConfigError as error:
            raise BadInput("counts", error.problem) from None
        leaving: list[Slot] = []
        for role, count in wanted.items():
            mine = [slot for slot in self.slots.values() if slot.role == role]
            leaving += mine[count:]
            self._grow(role, count - len(mine))
        for slot in leaving:
            del self.slots[slot.name]
            slot.leaving.set()
        tasks = [slot.task for slot in leaving if slot.task is not None]
        if tasks:
            await wait_within(tasks, min(self.config.drain_s + _CLOSE_S, limit_s))
        for slot in leaving:
            if slot.task is not None and not slot.task.done():
                slot.task.cancel()
        await self.whole(limit_s)

    def _count(self, role: Role) -> int:
        return sum(slot.role == role for slot in self.slots.values())

    def _grow(self, role: Role, count: int) -> None:
        numbers = (f"{role[0]}{number}" for number in range(10_000))
        for _ in range(count):
            name = next(name for name in numbers if name not in self.slots)
            slot = self.slots[name] = Slot(name, role, Restarts(self.config.restart))
            slot.task = asyncio.create_task(self._keep(slot), name=f"fdasync-{name}")

    async def aclose(self) -> None:
        """End all instances at once, and their actors; idempotent. `drain` before to let requests end."""
        tasks = [slot.task for slot in self.slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        registry, self._registry = self._registry, None
        if registry is not None:
            ray.kill(registry)

    async def drain(self) -> bool:
        """Have all instances leave, prefill instances first; True: all ended their requests."""
        for roles in (("prefill",), ("decode", "mixed")):
            slots = [slot for slot in self.slots.values() if slot.role in roles]
            for slot in slots:
                slot.leaving.set()
            tasks = [slot.task for slot in slots if slot.task is not None]
            if tasks:
                await wait_within(tasks, self.config.drain_s + _CLOSE_S)
        return all(slot.state == "ended" and not slot.problem for slot in self.slots.values())

    # -- one instance ---------------------------------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Have an instance in a place until it leaves, or is given up."""
        loop = asyncio.get_running_loop()
        while not slot.leaving.is_set():
            ready_at, has_room = None, True
            try:
                await self._start(slot)
                ready_at = loop.time()
                await self._watch(slot)
                slot.state = "ended"
                return
            except (FdasyncError, ray.exceptions.RayError) as error:
                # Ray's errors have many lines
                slot.problem = str(error).partition("\n")[0]
                has_room = not isinstance(error, _NoRoom)
            finally:
                await self._end(slot)
            if has_room:
                wait_s = slot.restarts.ended(loop.time(), ready_at)
                if wait_s is None:
                    slot.state = "failed"
                    self._tell(f"{slot.problem}; {slot.name} is given up")
                    return
                self._tell(f"{slot.problem}; {slot.name} is started again in {wait_s:g} s")
            else:
                wait_s = _ROOM_S
            slot.state = "waiting"
            leaving = asyncio.ensure_future(slot.leaving.wait())
            await wait_within([leaving], wait_s)
            leaving.cancel()
        slot.state = "ended"

    async def _start(self, slot: Slot) -> None:
        """Place an instance, start it, bring it to the fleet's weights, and have it join. Raises _Lost."""
        config, lost_node = self.config, slot.node
        slot.starts, slot.state, slot.node = slot.starts + 1, "placing", ""
        plan = Plan(
            name=slot.name,
            role=slot.role,
            config=msgspec.structs.replace(config.engine, role=slot.role),
            transport=config.transport,
            drain_s=config.drain_s,
            extra=config.serve_options,
        )
        async with self._choosing:
            slot.wanted = ""
            # threads: Ray answers `ray.nodes` by a blocking call alone, and this process is no engine
            slot.wanted = await asyncio.to_thread(self._choose, lost_node)
        # the target is a wish: Ray takes another node where it is full, and waits where all are
        slot.group = placement_group([config.bundle()], "STRICT_PACK", _soft_target_node_id=slot.wanted or None)
        place = PlacementGroupSchedulingStrategy(slot.group, 0)
        resources = {"num_cpus": config.cpus, "num_gpus": config.gpus, "resources": dict(config.resources)}
        supervisor = ray.remote(Supervisor).options(**resources, scheduling_strategy=place, max_concurrency=16)
        slot.actor = supervisor.remote(plan, config.listen, self._uid)
        try:
            slot.node = await answer(slot.actor.node.remote(), f"placing {slot.name}", config.place_s)
        except DeadlineExceeded as error:
            raise _NoRoom(f"no node has room for {slot.name} ({error})") from None
        slot.state = "loading"
        await answer(self._registry.watch.remote(slot.name, slot.actor), "telling the registry")
        told: Told = await answer(
            slot.actor.start.remote(), f"starting {slot.name}", config.engine.start_deadline_s + _START_S
        )
        if told.state != "ready":
            raise _Lost(told.problem)
        member = Member(name=slot.name, role=slot.role, address=told.address, pid=told.pid, node=slot.node)
        placed: tuple[str, ...] = ()
        has: Current | None = None
        while True:
            view: View = await answer(self._registry.join.remote(member, placed, has), "joining")
            if member in view.members:
                break
            await self._tell_actor(slot.actor.place.remote(view.published), f"placing weights for {slot.name}")
            placed = tuple(one.path for one in view.published)
            if view.current is not None and view.current != has:
                await self._tell_actor(slot.actor.update.remote(view.current), f"updating {slot.name}")
            has = view.current
        slot.state, slot.problem = "ready", ""

    async def _tell_actor(self, reference: Any, what: str) -> None:
        if problem := await answer(reference, what, _UPDATE_S):
            raise _Lost(f"{what}: {problem}")

    def _choose(self, lost_node: str) -> str:
        """The node that has most room for an instance by what it has and how many of ours are there; "": none has."""
        ours = Counter(slot.node or slot.wanted for slot in self.slots.values())
        bundle = self.config.bundle()
        fits = [
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"]
            and node["NodeID"] != lost_node
            and all(
                node["Resources"].get(name, 0) >= amount * (ours[node["NodeID"]] + 1) for name, amount in bundle.items()
            )
        ]
        return min(fits, key=lambda node: (ours[node], node), default="")

    async def _watch(self, slot: Slot) -> None:
        """Return when an instance left as it was asked to. Raises _Lost when it ended by itself, or is out of reach."""
        leaving = asyncio.ensure_future(slot.leaving.wait())
        asked = False
        try:
            while True:
                watching = asyncio.ensure_future(self._look(slot, 1.0 if asked else _WATCH_S))
                others = [] if asked else [leaving]
                # bounded by `_look`'s own deadline
                await asyncio.wait([watching, *others], return_when=asyncio.FIRST_COMPLETED)
                if leaving.done() and not asked:
                    asked = True
                    slot.state = "draining"
                    await answer(self._registry.drain.remote(slot.name), "telling the registry")
                    await answer(slot.actor.drain.remote(), f"draining {slot.name}")
                told = await watching
                if told.state != "ended":
                    continue
                if asked:
                    slot.problem = told.problem if told.status else ""
                    return
                raise _Lost(told.problem)
        finally:
            leaving.cancel()

    async def _look(self, slot: Slot, limit_s: float) -> Told:
        try:
            told: Told = await answer(slot.actor.watch.remote(limit_s), f"watching {slot.name}", limit_s + _SOON_S)
        except ray.exceptions.ActorUnavailableError:
            try:
                # a connection may break while both of its ends live
                told = await answer(slot.actor.watch.remote(0.0), f"watching {slot.name}", _SOON_S)
            except (DeadlineExceeded, ray.exceptions.RayError):
                raise _Lost(f"node {slot.node[:8]} of {slot.name} is out of reach") from None
        except ray.exceptions.RayActorError:
            raise _Lost(f"the actor of {slot.name}, on node {slot.node[:8]}, has ended") from None
        return told

    async def _end(self, slot: Slot) -> None:
        """Take an instance out of the registry, end its actor, and give its place back. Never raises."""
        actor, group, slot.actor, slot.group = slot.actor, slot.group, None, None
        try:
            if self._registry is not None:
                await answer(self._registry.leave.remote(slot.name), "leaving")
            if actor is not None and slot.node:
                limit_s = self.config.engine.close_deadline_s + _CLOSE_S if not slot.problem else _SOON_S
                await answer(actor.aclose.remote(), f"ending {slot.name}", limit_s)
        except (FdasyncError, ray.exceptions.RayError):
            # it is killed below, and its child with it
            pass
        finally:
            if actor is not None:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)
