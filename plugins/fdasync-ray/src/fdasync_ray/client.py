"""A fleet as any process of its cluster sees it: its members, routers that follow them, new weights for all.

    async with attach("fleet").router() as router:
        result = await router.complete(...)

Reads the named actor (`registry.py`). Needs `ray.init` before. The fleet itself is kept by `fleet.py`, which is a
client as well.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import ray
from fdasync_fleet.router.router import connect

from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, FdasyncError, PeerUnreachable, WeightsRejected
from fdasync.ipc.deadlines import Within
from fdasync.request import checked_version
from fdasync_ray.config import NAMESPACE, Current, Published
from fdasync_ray.weights import folder_path, packed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fdasync_fleet.link.keys import FleetKeys
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.router.router import Router

    from fdasync.request import WeightSource
    from fdasync_ray.config import Member, View

T = TypeVar("T")

_ANSWER_S = 30.0
_LOOK_S = 10.0
_AGAIN_S = 1.0
# copies of all weights from the object store to each node's memory
_PLACE_S = 900.0


async def answer(reference: Any, what: str, limit_s: float = _ANSWER_S) -> Any:
    """The result of a call of an actor. Raises DeadlineExceeded, and what Ray raises."""
    try:
        async with Within(limit_s):
            return await reference
    except TimeoutError:
        raise DeadlineExceeded(what, limit_s) from None


def registry_name(fleet: str) -> str:
    return f"fdasync:{fleet}"


def check_connected() -> None:
    """Raises ConfigError unless this process is connected to a cluster; Ray would start one in silence."""
    if not ray.is_initialized():
        raise ConfigError("ray", "this process is connected to no cluster", hint='ray.init(address="auto") comes first')


def attach(name: str = "fleet") -> FleetClient:
    """The fleet of this name in the cluster that this process is connected to. Raises BadInput if there is none,
    ConfigError without a cluster."""
    check_connected()
    try:
        # blocking: one call to Ray's control store
        return FleetClient(name, ray.get_actor(registry_name(name), namespace=NAMESPACE))
    except ValueError:
        raise BadInput("name", f"no fleet {name!r} runs in this cluster", hint="start it: fdasync ray up") from None


class FleetClient:
    """See the module; made by `attach`. May be sent to other processes of the cluster.

    Attributes:
        name: of the fleet.
    """

    def __init__(self, name: str, registry: Any) -> None:
        self.name = name
        self._registry = registry

    async def members(self) -> tuple[Member, ...]:
        """Instances that take requests or drain, by name. Raises DeadlineExceeded; RayActorError: the fleet is gone."""
        return (await self.view()).members

    async def keys(self) -> FleetKeys:
        """The keys of the fleet's links, for `fdasync.connect(addresses, keys=...)`. Raises as `members`."""
        keys: FleetKeys = await answer(self._registry.keys.remote(), "reading the registry")
        return keys

    async def view(self, seen: int = -1, limit_s: float = 0.0) -> View:
        """What the registry knows, as soon as its serial is another than `seen`, or when the time is over."""
        view: View = await answer(
            self._registry.view.remote(seen, limit_s), "reading the registry", limit_s + _ANSWER_S
        )
        return view

    async def until(self, done: Callable[[View], T | None], what: str, limit_s: float) -> T:
        """Wait until `done` returns something of a view. Raises DeadlineExceeded naming `what`."""
        loop = asyncio.get_running_loop()
        until, seen = loop.time() + limit_s, -1
        while True:
            view = await self.view(seen, min(max(until - loop.time(), 0.0), _LOOK_S))
            found = done(view)
            if found is not None:
                return found
            if loop.time() >= until:
                raise DeadlineExceeded(what, limit_s)
            seen = view.serial

    @asynccontextmanager
    async def router(
        self, config: RouterConfig | None = None, *, connect_s: float = 120.0, **options: Any
    ) -> AsyncIterator[Router]:
        """A router of this process over all members; it adds members that join and removes members that leave.

        Any number of processes may have one: a driver, an actor, a web service in front of HTTP clients. It has the
        fleet's keys. Raises DeadlineExceeded if no member is there within `connect_s`, and what `Router.start` raises.
        """
        keys = await self.keys()
        view = await self.until(
            lambda view: view if any(not one.draining for one in view.members) else None, "a first member", connect_s
        )
        addresses = [one.address for one in view.members if not one.draining]
        async with connect(addresses, config, **{"keys": keys, **options}) as router:
            following = asyncio.create_task(self._follow(router, set(addresses), view.serial), name="fdasync-follow")
            try:
                yield router
            finally:
                following.cancel()
                await asyncio.wait([following])

    async def _follow(self, router: Router, known: set[str], seen: int) -> None:
        """Keep a router's instances the same as the fleet's, until it is cancelled or the fleet has ended."""
        joining: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    view = await self.view(seen, _LOOK_S)
                except FdasyncError:
                    await asyncio.sleep(_AGAIN_S)
                    continue
                except ray.exceptions.RayError:
                    # the fleet has ended, and its members with it: the router says so to its callers
                    return
                seen, there = view.serial, {one.address for one in view.members}
                for address in known - there:
                    if address in joining:
                        joining.pop(address).cancel()
                    known.discard(address)
                    if any(one.address == address for one in router.table.instances.values()):
                        router.remove(address)
                for one in view.members:
                    if one.address not in known and not one.draining:
                        known.add(one.address)
                        joining[one.address] = asyncio.create_task(_join(router, one.address))
        finally:
            for task in joining.values():
                task.cancel()
            if joining:
                await asyncio.wait(joining.values())

    async def update_weights(
        self,
        router: Router,
        version: str | int,
        source: WeightSource,
        mode: Literal["abort", "keep"] = "abort",
    ) -> None:
        """Give new weights to all members through a router, and to instances that join later.

        Args:
            router: one of this fleet; see `Router.update_weights`.
            version: their label.
            source: a folder that every node has under the same path, or tensors `(name, dtype, shape, buffer)` in
                memory. Tensors go to Ray's object store once, from there once to each node, and there into a folder in
                memory. The buffers may be reused when this returns.

        Raises BadInput; WeightsRejected if a node cannot have the tensors, and changes nothing; and as
        `Router.update_weights`.
        """
        label = checked_version(version)
        updated = {one.address for one in router.table.instances.values()}
        if not isinstance(source, str) and not hasattr(source, "__fspath__"):
            source = await self.publish(source)
        await router.update_weights(label, source, mode)
        await answer(self._registry.serve.remote(Current(label, str(source))), "telling the registry")
        # who joined meanwhile has not been told of this update: this router, which may end soon, brings them to it
        late = [one.address for one in await self.members() if one.address not in updated and not one.draining]
        await asyncio.gather(*[_join(router, address) for address in late])

    async def publish(self, tensors: WeightSource) -> str:
        """Have tensors in the memory of every node of the fleet; returns the folder's path, for any router of it. Nodes
        that have no instance yet read them from this process's object, or, when it has ended, from another node.

        Raises BadInput; WeightsRejected if a node cannot have them.
        """
        weights = packed(tensors)
        path = folder_path(await answer(self._registry.new_path.remote(), "naming weights"))
        # this process owns the object, which ends with it
        # threads: Ray's call copies gigabytes, and this process is no engine
        reference = await asyncio.to_thread(ray.put, weights)
        published = Published(path, (reference,))
        supervisors = await answer(self._registry.publish.remote(published), "publishing weights")
        kept = (await self.view()).published
        placing = [answer(one.place.remote(kept), "placing weights on a node", _PLACE_S) for one in supervisors]
        for outcome in await asyncio.gather(*placing, return_exceptions=True):
            if isinstance(outcome, ray.exceptions.RayActorError):
                # its node died meanwhile; whoever takes its place gets them before it joins
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            if problem := outcome.get(path):
                raise WeightsRejected(f"{path}: {problem}")
        return path


async def _join(router: Router, address: str) -> None:
    """Add an instance. While it does not answer, the router goes on dialing it, and its stats say why it is unused."""
    try:
        await router.add(address)
    except (FdasyncError, PeerUnreachable):
        return
