"""The named actor of a fleet: who its members are, and which weights it has. Runs in a process of Ray's.

`client.py` reads and follows it; `fleet.py`, which starts it, tells it who came and went. It dies with the process that
started the fleet. Knows no requests and starts nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.ipc.deadlines import Within
from fdasync_ray.config import Current, Member, Published, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.link.keys import FleetKeys

# an update that fails leaves the fleet with the folder before
_KEPT = 2


class Registry:
    """See the module; the methods are called from other processes, and each runs on the actor's one loop.

    Args:
        uid: random, part of the fleet's folders.
        keys: of the fleet's links; whoever reads them can be an instance or a router.
    """

    def __init__(self, uid: str, keys: FleetKeys) -> None:
        self._uid = uid
        self._keys = keys
        self._members: dict[str, Member] = {}
        self._supervisors: dict[str, Any] = {}
        self._published: tuple[Published, ...] = ()
        self._current: Current | None = None
        self._serial = 0
        self._made = 0
        self._changed = asyncio.Event()

    async def uid(self) -> str:
        return self._uid

    async def keys(self) -> FleetKeys:
        return self._keys

    async def watch(self, name: str, supervisor: Any) -> None:
        """An instance starts: weights that are published from now on are given to its actor, too."""
        self._supervisors[name] = supervisor

    async def join(self, member: Member, placed: Sequence[str], current: Current | None) -> View:
        """Add a member, unless its node lacks published weights or it has older weights than the fleet: then the view
        that is returned has no such member, and the caller brings it up to date and asks again."""
        if self._current == current and {one.path for one in self._published} <= set(placed):
            self._members[member.name] = member
            self._change()
        return self._view()

    async def drain(self, name: str) -> None:
        """A member takes no new requests from now on."""
        if name in self._members:
            self._members[name] = msgspec.structs.replace(self._members[name], draining=True)
            self._change()

    async def leave(self, name: str) -> None:
        """A member is gone, or an instance that never joined; idempotent."""
        self._supervisors.pop(name, None)
        if self._members.pop(name, None) is not None:
            self._change()

    async def view(self, seen: int = -1, limit_s: float = 0.0) -> View:
        """The state, as soon as it is another than `seen`, or when the time is over."""
        if self._serial == seen and limit_s > 0:
            try:
                async with Within(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self._view()

    async def new_path(self) -> str:
        """A name that no other weights of this fleet have or had."""
        self._made += 1
        return f"{self._uid}/{self._made}"

    async def publish(self, published: Published) -> list[Any]:
        """Keep weights, and return the actors that must place them. All but the last ones are forgotten."""
        kept = tuple(one for one in self._published[1 - _KEPT :] if one.path != published.path)
        if self._current is not None:
            # whatever is tried next, whoever joins needs the served weights
            served = tuple(one for one in self._published if one.path == self._current.path and one not in kept)
            kept = (*served, *kept)
        self._published = (*kept, published)
        self._change()
        return list(self._supervisors.values())

    async def serve(self, current: Current) -> None:
        """The fleet's instances have been updated to these weights; nobody needs earlier published weights."""
        self._current = current
        paths = [one.path for one in self._published]
        if current.path in paths:
            self._published = self._published[paths.index(current.path) :]
        self._change()

    async def forget(self, path: str) -> None:
        """Nobody can have these weights any more, and they are not in use: who joins needs no copy."""
        if self._current is None or self._current.path != path:
            self._published = tuple(one for one in self._published if one.path != path)
            self._change()

    def _view(self) -> View:
        members = tuple(sorted(self._members.values(), key=lambda member: member.name))
        return View(serial=self._serial, members=members, published=self._published, current=self._current)

    def _change(self) -> None:
        self._serial += 1
        self._changed.set()
        self._changed = asyncio.Event()
