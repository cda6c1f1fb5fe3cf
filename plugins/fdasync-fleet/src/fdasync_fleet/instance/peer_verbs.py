"""Performs what a router has an instance do: `Verbs` for one router's call. Called by `instance.py`.

Of several routers one at a time may make a change of `CHANGES`. A claim says which, and for how long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput, UpdateUnderWay
from fdasync_fleet.verbs import METHODS, Verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.engine import Engine
    from fdasync.request import GroupTensors, PauseMode, SleepMode, WakeTag, WeightsGroup
    from fdasync_fleet.link.peer import Peer


#: verbs that another router's claim refuses, and the change that each is of. A verb ends the claim that its router had
#: for this change as the call began. Any router may leave a group, since that ends a join
CHANGES = {
    "update_weights": "update_weights",
    "relabel": "relabel",
    **dict.fromkeys(("begin_update", "update_part", "end_update", "abandon_update"), "begin_update"),
    "join_group": "join_group",
    "sleep": "sleep",
    "wake": "wake",
}


class Claims:
    """Which router may change the instance.

    Attributes:
        joiner: the router for which a group is being joined.
    """

    def __init__(self) -> None:
        self.joiner: Peer | None = None
        self._holder: Peer | None = None
        self._until = 0.0
        self._change = ""
        self._number = 0

    def check(self, peer: Peer) -> None:
        """Raise UpdateUnderWay where another router may change the instance."""
        holder, now = self._holder, asyncio.get_running_loop().time()
        if holder is not None and holder is not peer and holder.is_up and now < self._until:
            raise UpdateUnderWay(f"of {holder.name}")

    def take(self, peer: Peer, change: str, limit_s: float) -> None:
        """Let no other router change anything for `limit_s`. Raises UpdateUnderWay."""
        self.check(peer)
        self._holder, self._change = peer, change
        self._until = asyncio.get_running_loop().time() + limit_s
        self._number += 1

    def of(self, peer: Peer, change: str) -> int:
        """The number of this router's claim for a change; 0: it has none."""
        return self._number if self._holder is peer and self._change == change else 0

    def release(self, peer: Peer, number: int | None = None) -> None:
        """End a claim of this router. `number`: only this one."""
        if self._holder is peer and number in (None, self._number):
            self._holder, self._until = None, 0.0


class PeerVerbs(Verbs):
    """See the module.

    Args:
        peer: the router.
        drain: drains the instance, within so many seconds.
    """

    def __init__(self, engine: Engine, claims: Claims, peer: Peer, drain: Callable[[float], Awaitable[object]]) -> None:
        self._engine = engine
        self._weights = engine.weights
        self._claims = claims
        self._peer = peer
        self._drain = drain

    async def perform(self, message: Any) -> Any:
        """Perform what a message calls; returns the method's value. Raises the method's errors."""
        method = METHODS[type(message)]
        change = CHANGES.get(method.name, "")
        if change:
            self._claims.check(self._peer)
        # weights that this instance lacks, or a late wake, may come while another change of the router has the claim
        claim = self._claims.of(self._peer, change)
        try:
            return await method.call(self, message, [])
        finally:
            # an update in parts that stays open keeps its claim, which is timed
            if claim and not self._weights.control.in_parts:
                self._claims.release(self._peer, claim)

    async def claim(self, change: str, limit_s: float) -> None:
        self._claims.take(self._peer, change, limit_s)

    async def release(self) -> None:
        self._claims.release(self._peer)

    async def update_weights(
        self,
        version: str,
        source: str | GroupTensors,
        mode: Any,
        order: int = 0,
        expected: str = "",
        weights_id: str = "",
    ) -> None:
        await self._weights.update(version, source, mode, order, expected or None, weights_id)

    async def relabel(self, version: str, order: int = 0) -> None:
        self._weights.relabel(version, order)

    async def begin_update(self, mode: Any) -> None:
        await self._weights.parts.begin(mode)

    async def update_part(self, part: GroupTensors) -> None:
        if not self._weights.control.in_parts:
            raise BadInput("part", "no update is open here")
        # a part goes on as its update has begun
        await self._weights.update(None, part, "abort")

    async def end_update(self, version: str, order: int = 0, expected: str = "", weights_id: str = "") -> None:
        await self._weights.parts.end(version, expected or None, order, weights_id)

    async def abandon_update(self) -> None:
        self._weights.parts.abandon()

    async def join_group(self, group: WeightsGroup) -> None:
        groups = self._weights.groups
        # a join that is refused because of another leaves that other as the joiner
        self._claims.joiner = self._claims.joiner if groups.joins else self._peer
        await groups.join(group)

    async def leave_group(self, name: str) -> None:
        await self._weights.groups.leave(name)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, level: int, mode: SleepMode, tags: tuple[WakeTag, ...]) -> None:
        # words that the message has checked
        await self._engine.sleep(level, mode, tags=tags or None)  # type: ignore[arg-type]

    async def wake(self, tags: tuple[WakeTag, ...] = ()) -> None:
        await self._engine.wake(tags or None)

    async def reset_cache(self) -> None:
        await self._engine.reset_cache()

    async def fingerprint(self) -> str:
        return await self._engine.weights_fingerprint()

    async def profile(self, seconds: float) -> str:
        (folder,) = (await self._engine.profile(seconds)).values()
        return folder

    async def drain(self, limit_s: float) -> None:
        await self._drain(limit_s)
