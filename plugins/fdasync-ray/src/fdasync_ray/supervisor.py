"""The actor of one instance: it starts `fdasync serve` as a child that dies with it, and tells how the child does.

Ray runs the loop of an async actor in a second Python thread, so no engine may live in the actor itself. The kernel
kills the child when that thread ends, and Ray ends the actor with its node. The actor also writes weights from the
object store to its node's memory, in a thread of its own since gigabytes are copied. Started by `fleet.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import TYPE_CHECKING

import msgspec
from fdasync_fleet.cli.local.child import Child, ChildEnded, in_words
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import connect

from fdasync.errors import FdasyncError
from fdasync.ipc.deadlines import Within, wait_within
from fdasync_ray.config import Current, Published, Told
from fdasync_ray.weights import NodeFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.cli.local.child import Plan
    from fdasync_fleet.link.keys import FleetKeys

    from fdasync_ray.weights import Copied

_START_S = 10.0
_READ_S = 600.0
_CONNECT_S = 30.0


class Supervisor:
    """See the module. All methods run on the actor's loop, and none of them raises an error of this package: each is
    told in words, because an error's class and fields would not survive the way between processes.

    Args:
        plan: of the child.
        listen: its address; "": that by which Ray knows this node.
        uid: of the fleet, for its folder on this node.
        keys: of the fleet's links.
    """

    def __init__(self, plan: Plan, listen: str, uid: str, keys: FleetKeys) -> None:
        self._listen = listen
        self._keys = keys
        # in memory until this process ends: the child reads it like any file of keys
        file = os.memfd_create(f"{plan.name}.keys")
        os.fchmod(file, 0o600)
        os.write(file, msgspec.json.encode(keys))  # blocking: memory
        links = msgspec.structs.replace(plan.links, keys=f"/proc/{os.getpid()}/fd/{file}")
        self._plan = msgspec.structs.replace(plan, links=links)
        self._child: Child | None = None
        self._folder = NodeFolder(uid, plan.config.model, plan.config.runner)
        self._placing = asyncio.Lock()

    async def node(self) -> str:
        """Ray's id of this actor's node: returns as soon as the actor has its place."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def start(self) -> Told:
        """Start the child, and wait until it takes requests or has ended."""
        limit_s = self._plan.config.start_deadline_s + _START_S
        try:
            self._child = Child(self._plan, self._listen or _node_address(), lambda _child: None)
            async with Within(limit_s):
                await asyncio.shield(self._child.ready)
        except (ChildEnded, OSError) as error:
            return Told(state="ended", problem=str(error))
        except TimeoutError:
            return Told(state="loading", problem=f"{self._plan.name} was not ready within {limit_s:g} s")
        return self._told()

    async def watch(self, limit_s: float) -> Told:
        """How the child does when it has ended, or when the time is over."""
        if self._child is not None:
            await wait_within([self._child.exited], limit_s)
        return self._told()

    def _told(self) -> Told:
        child = self._child
        if child is None:
            return Told(state="ended", problem=f"{self._plan.name} was not started")
        if not child.exited.done():
            return Told(state="ready", address=child.address, pid=child.pid)
        status = child.exited.result()  # a process that was reaped
        line = f": {child.lines[-1]}" if child.lines else ""
        problem = f"{child.name} {in_words(status)}{line}"
        return Told(state="ended", address=child.address, pid=child.pid, status=status, problem=problem)

    async def place(self, published: Sequence[Published]) -> dict[str, str]:
        """Have these weights in this node's memory, and no older ones. Returns problems in words, by path."""
        problems = {}
        async with self._placing:
            for one in published:
                try:
                    await self._place(one)
                except TimeoutError:
                    problems[one.path] = f"it could not be read from the object store within {_READ_S:g} s"
                except Exception as error:
                    # of Ray, whose object may be lost, or of the node, whose memory may be full; Ray's have many lines
                    problems[one.path] = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._folder.keep_only([one.path for one in published])
        return problems

    async def _place(self, one: Published) -> None:
        if self._folder.has(one.path):
            return
        # Ray reads an object once for all actors of a node
        async with Within(_READ_S):
            weights = await one.parts[0]
        # threads: gigabytes are copied, in an actor, which is no engine; the thread gives the lock back when it has
        # written, also where nobody waits for it any more
        await asyncio.to_thread(self._folder.write_once, one.path, weights)

    async def has(self, path: str) -> bool:
        """Whether this node has weights, so that `read` can give them to another node."""
        return self._folder.has(path)

    async def read(self, path: str) -> Copied:
        """Weights of this node, for an instance that cannot read them from their publisher."""
        return self._folder.read(path)

    async def update(self, current: Current) -> str:
        """Bring the child alone to the fleet's weights, before it has met a router. Returns a problem, or ""."""
        if self._child is None:
            return "it was not started"
        try:
            async with connect([self._child.address], RouterConfig(connect_s=_CONNECT_S), keys=self._keys) as router:
                await router.update_weights(current.version, current.path)
        except FdasyncError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def drain(self) -> None:
        """Have the child take no new requests, and end when it has none."""
        if self._child is not None:
            self._child.drain()

    async def aclose(self) -> str:
        """End the child, and kill it if it does not end. Returns a problem, or ""."""
        try:
            if self._child is not None:
                await self._child.aclose()
        except FdasyncError as error:
            return str(error)
        self._folder.close()
        return ""


def _node_address() -> str:
    """Where other nodes reach this one, at a free port."""
    import ray

    host = ray.util.get_node_ip_address()
    return f"tcp://[{host}]:0" if ipaddress.ip_address(host).version == 6 else f"tcp://{host}:0"
