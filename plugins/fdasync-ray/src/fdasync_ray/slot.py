"""One place of a fleet, and the task that keeps an instance in it: placed, started, watched, started again, ended.

A place has a placement group of one bundle, so a group of tensor-parallel ranks is on one node. The node with the
fewest instances is asked for first. Runs in the process of the `RayFleet`; `fleet.py` makes places and has them leave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import ray
from fdasync_fleet.cli.local.child import Plan
from fdasync_fleet.cli.local.options import LinkOptions
from fdasync_fleet.cli.local.restarts import Restarts
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fdasync.errors import DeadlineExceeded, FdasyncError
from fdasync.ipc.deadlines import wait_within
from fdasync_ray.client import answer
from fdasync_ray.config import Member, Published
from fdasync_ray.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.cli.local.child import Role
    from fdasync_fleet.link.keys import FleetKeys

    from fdasync_ray.config import Current, FleetConfig, Told, View

_WATCH_S = 4.0
_SOON_S = 3.0
_ROOM_S = 1.0
_UPDATE_S = 900.0
_POLL_S = 0.02
# a process that imports this package, on a node that may be busy
_ACTOR_S = 60.0
#: beyond an engine's own start deadline
START_S = 30.0
#: beyond an instance's own deadlines for draining and closing
CLOSE_S = 30.0


class Shared:
    """What the places of a fleet have in common.

    Attributes:
        config, keys, uid: of the fleet.
        registry: its named actor.
        tell: called with lines for people.
        slots: places whose task runs, leaving ones too.
        choosing: held while a node is chosen: one after the other, so that each sees where earlier ones go.
    """

    def __init__(self, config: FleetConfig, tell: Callable[[str], None]) -> None:
        self.config, self.tell = config, tell
        self.keys: FleetKeys | None = None
        self.uid = ""
        self.registry: Any = None
        self.slots: list[Slot] = []
        self.choosing = asyncio.Lock()


class _Lost(FdasyncError):
    """An instance, its actor or its node is gone."""


class _Full(FdasyncError):
    """The cluster has no place for an instance now; a place that comes later is taken."""


class Slot:
    """See the module.

    Attributes:
        name, role: as "d0" and "decode".
        state: "placing", "loading", "ready", "draining", "waiting" (to be started again), "ended", "failed".
        node: of its actor; "" without one.
        wanted: the node that was asked for.
        problem: of its last end, in words; "".
        full_since: when the cluster was asked for room that it has not given yet, in the loop's time; None: it has.
        leaving: set it to have the instance drain, and the task end.
        task: keeps the instance; ends when it has left, or was given up. Cancel it to end the instance at once.
    """

    def __init__(self, name: str, role: Role, shared: Shared) -> None:
        self.name, self.role = name, role
        self.state = "placing"
        self.node = self.wanted = self.problem = ""
        self.full_since: float | None = None
        self._told_full = self._is_silent = False
        self.leaving = asyncio.Event()
        self._shared = shared
        self._restarts = Restarts(shared.config.restart)
        self._actor: Any = None
        self._group: Any = None
        self.task = asyncio.create_task(self._keep(), name=f"fdasync-{name}")
        shared.slots.append(self)
        self.task.add_done_callback(lambda _task: shared.slots.remove(self))

    async def _keep(self) -> None:
        """Have an instance in this place until it leaves, or is given up."""
        loop, tell = asyncio.get_running_loop(), self._shared.tell
        while not self.leaving.is_set():
            ready_at, is_full = None, False
            try:
                if await self._started():
                    ready_at = loop.time()
                    await self._watch()
                else:
                    self.problem = ""
                self.state = "ended"
                return
            except (FdasyncError, ray.exceptions.RayError) as error:
                # Ray's errors have many lines
                self.problem = str(error).partition("\n")[0]
                is_full = isinstance(error, _Full)
            finally:
                await self._end()
            if is_full:
                wait_s = _ROOM_S
                if not self._told_full:
                    self._told_full = True
                    tell(f"{self.problem}; it waits for room")
            else:
                delay_s = self._restarts.ended(loop.time(), ready_at)
                if delay_s is None:
                    self.state = "failed"
                    tell(f"{self.problem}; {self.name} is given up")
                    return
                wait_s = delay_s
                tell(f"{self.problem}; {self.name} is started again in {wait_s:g} s")
            self.state = "waiting"
            leaving = asyncio.ensure_future(self.leaving.wait())
            await wait_within([leaving], wait_s)
            leaving.cancel()
        self.state = "ended"

    async def _started(self) -> bool:
        """`_start`; False: the place was asked to leave meanwhile."""
        starting, leaving = asyncio.ensure_future(self._start()), asyncio.ensure_future(self.leaving.wait())
        try:
            # bounded by the deadlines of `_start`
            await asyncio.wait([starting, leaving], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # of a task that is done
                return True
            return False
        finally:
            for task in (starting, leaving):
                task.cancel()
            await asyncio.wait([starting, leaving])

    async def _start(self) -> None:
        """Place an instance, start it, bring it to the fleet's weights, and have it join. Raises _Full, _Lost, other
        errors of this package and of Ray's."""
        shared, config = self._shared, self._shared.config
        lost_node, self.node, self.state, self._is_silent = self.node, "", "placing", False
        plan = Plan(
            name=self.name,
            role=self.role,
            config=config.config_of(self.name, self.role),
            links=LinkOptions(transport=config.transport, drain_s=config.drain_s),
            extra=config.serve_options,
        )
        async with shared.choosing:
            self.wanted = ""
            # threads: Ray answers `ray.nodes` by a blocking call alone, and this process is no engine
            self.wanted = await asyncio.to_thread(self._choose, lost_node)
        await self._take_room()
        place = PlacementGroupSchedulingStrategy(self._group, 0)
        resources = {"num_cpus": config.cpus, "num_gpus": config.gpus, "resources": dict(config.resources)}
        supervisor = ray.remote(Supervisor).options(**resources, scheduling_strategy=place, max_concurrency=16)
        self._actor = supervisor.remote(plan, config.listen, shared.uid, shared.keys)
        self.node = await answer(self._actor.node.remote(), f"starting the actor of {self.name}", _ACTOR_S)
        self.state = "loading"
        shared.tell(f"{self.name} ({self.role}) loads on node {self.node[:8]}")
        await answer(shared.registry.watch.remote(self.name, self._actor), "telling the registry")
        told: Told = await answer(
            self._actor.start.remote(), f"starting {self.name}", config.engine.start_deadline_s + START_S
        )
        if told.state != "ready":
            raise _Lost(told.problem)
        await self._join(Member(name=self.name, role=self.role, address=told.address, pid=told.pid, node=self.node))
        self.state, self.problem = "ready", ""
        shared.tell(f"{self.name} ({self.role}) is ready at {told.address} on node {self.node[:8]}")

    async def _take_room(self) -> None:
        """Have a placement group. Raises _Full."""
        # the target is a wish: Ray takes another node where it is full, and waits where all are
        bundles, target = [self._shared.config.bundle()], self.wanted or None
        # blocking: one message
        self._group = placement_group(bundles, "STRICT_PACK", _soft_target_node_id=target)
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._shared.config.place_s, _POLL_S
        self.full_since = loop.time() if self.full_since is None else self.full_since
        # threads: Ray answers by a blocking call alone
        while not await asyncio.to_thread(self._group.wait, 0):
            if loop.time() >= until:
                raise _Full(f"no node has room for {self.name}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ROOM_S)
        self.full_since, self._told_full = None, False

    async def _join(self, member: Member) -> None:
        """Become a member as soon as the instance has the fleet's weights. Raises _Lost."""
        registry = self._shared.registry
        placed: tuple[str, ...] = ()
        has: Current | None = None
        while True:
            view: View = await answer(registry.join.remote(member, placed, has), "joining")
            if member in view.members:
                return
            await self._place(view)
            placed = tuple(one.path for one in view.published)
            if view.current is not None and view.current != has:
                what = f"updating {self.name}"
                if problem := await answer(self._actor.update.remote(view.current), what, _UPDATE_S):
                    raise _Lost(f"{what}: {problem}")
            has = view.current

    async def _place(self, view: View) -> None:
        """Have all published weights on the instance's node: from who published them, or, if that process has ended,
        from another node. Weights that are nowhere any more are forgotten, unless the fleet serves with them: then it
        raises _Lost."""
        what = f"placing weights for {self.name}"
        problems = await answer(self._actor.place.remote(view.published), what, _UPDATE_S)
        if not problems:
            return
        published = [await self._elsewhere(one) if one.path in problems else one for one in view.published]
        problems = await answer(self._actor.place.remote(published), what, _UPDATE_S)
        for path, problem in problems.items():
            if view.current is not None and view.current.path == path:
                raise _Lost(f"{what}: {path}: {problem}")
            await answer(self._shared.registry.forget.remote(path), "telling the registry")
            self._shared.tell(f"{path} was never served and cannot be had any more: {problem}")

    async def _elsewhere(self, published: Published) -> Published:
        """These weights as another node has them; as they were where none has."""
        for other in self._shared.slots:
            if other.state != "ready" or other.node == self.node or other._actor is None:
                continue
            try:
                if await answer(other._actor.has.remote(published.path), f"asking {other.name}", _SOON_S):
                    self._shared.tell(f"{self.name} has its weights from {other.name}: who published them has ended")
                    # it goes from node to node, and not through this process
                    return Published(published.path, (other._actor.read.remote(published.path),))
            except (FdasyncError, ray.exceptions.RayError):
                continue
        return published

    def _choose(self, lost_node: str) -> str:
        """The node that has most room for an instance by what it has and how many of ours are there; "": none has."""
        ours = Counter(slot.node or slot.wanted for slot in self._shared.slots)
        bundle = self._shared.config.bundle()
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

    async def _watch(self) -> None:
        """Return when an instance left as it was asked to. Raises _Lost when it ended by itself, or is out of reach."""
        leaving = asyncio.ensure_future(self.leaving.wait())
        watching: asyncio.Future[Told] | None = None
        asked = False
        try:
            while True:
                watching = asyncio.ensure_future(self._look(1.0 if asked else _WATCH_S))
                others = [] if asked else [leaving]
                # bounded by `_look`'s own deadline
                await asyncio.wait([watching, *others], return_when=asyncio.FIRST_COMPLETED)
                if leaving.done() and not asked:
                    asked = True
                    self.state = "draining"
                    await answer(self._shared.registry.drain.remote(self.name), "telling the registry")
                    await answer(self._actor.drain.remote(), f"draining {self.name}")
                told = await watching
                if told.state != "ended":
                    continue
                if asked:
                    self.problem = told.problem if told.status else ""
                    return
                raise _Lost(told.problem)
        finally:
            leaving.cancel()
            if watching is not None and not watching.done():
                watching.cancel()
                await asyncio.wait([watching])

    async def _look(self, limit_s: float) -> Told:
        """What the actor tells, when its instance has ended or the time is over. Raises _Lost, after a second try: a
        connection may break, or a node stand still for seconds, while both ends live."""
        for wait_s in (limit_s, 0.0):
            try:
                told: Told = await answer(self._actor.watch.remote(wait_s), f"watching {self.name}", wait_s + _SOON_S)
                return told
            except (DeadlineExceeded, ray.exceptions.ActorUnavailableError):
                continue
            except ray.exceptions.RayActorError:
                raise _Lost(f"the actor of {self.name}, on node {self.node[:8]}, has ended") from None
        self._is_silent = True
        raise _Lost(f"node {self.node[:8]} of {self.name} is out of reach")

    async def _end(self) -> None:
        """Take an instance out of the registry, end its actor, and give its place back. Never raises."""
        actor, group, self._actor, self._group = self._actor, self._group, None, None
        try:
            if self._shared.registry is not None:
                await answer(self._shared.registry.leave.remote(self.name), "leaving")
            if actor is not None and self.node and not self._is_silent:
                close_s = self._shared.config.engine.close_deadline_s
                limit_s = close_s + CLOSE_S if not self.problem else _SOON_S
                await answer(actor.aclose.remote(), f"ending {self.name}", limit_s)
        except (FdasyncError, ray.exceptions.RayError):
            # it is killed below, and its child with it
            pass
        finally:
            # threads: Ray's control store answers by blocking calls alone, and may be slow where nodes are lost
            await asyncio.to_thread(_give_back, actor, group)


def _give_back(actor: Any, group: Any) -> None:
    if actor is not None:
        ray.kill(actor)
    if group is not None:
        remove_placement_group(group)
