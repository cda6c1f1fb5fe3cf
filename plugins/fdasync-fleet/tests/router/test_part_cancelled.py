"""An update in parts answers each of its calls: the last one behind its claims, and also one that a close cuts off."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from fdasync_fleet.router.control import ControlPlane
from fdasync_fleet.router.weights.part_update import PartUpdate
from fdasync_fleet.verbs import Verbs, name_of, verb

from fdasync.errors import EngineClosed


class _Plane:
    """An update in parts that stays at `stop`, a verb or "claims": their end. Calls of instances return at once."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.stopped, self.go_on = asyncio.Event(), asyncio.Event()
        self.parts = PartUpdate()
        plane = ControlPlane.__new__(ControlPlane)
        plane._config = SimpleNamespace(command_s=5.0)
        plane._claimed_room, plane._ask_all = self._claimed_room, self._ask_all
        plane._success = lambda _outcomes, **_drops: []
        self.task = asyncio.create_task(plane._play_parts(self.parts, verb(Verbs.begin_update, "keep")))

    async def reach(self) -> asyncio.Task[None]:
        """Until it stays there; returns the caller that waits."""
        await asyncio.wait([self.parts.begun])
        word = verb(Verbs.update_part, None) if self._stop == "update_part" else verb(Verbs.abandon_update)
        caller = asyncio.create_task(self.parts.ask(word))
        await asyncio.wait_for(self.stopped.wait(), 300)
        return caller

    @asynccontextmanager
    async def _claimed_room(self, **_options):
        yield 0
        await self._stay("claims")

    async def _ask_all(self, command, _limit_s, _present=None):
        await self._stay(name_of(command))
        return []

    async def _stay(self, where: str) -> None:
        if where == self._stop:
            self.stopped.set()
            await self.go_on.wait()


@pytest.mark.parametrize("stop", ["update_part", "abandon_update", "claims"])
async def test_a_call_under_way_is_answered_when_the_router_closes(stop: str) -> None:
    plane = _Plane(stop)
    caller = await plane.reach()
    plane.task.cancel()
    await asyncio.wait([plane.task])
    with pytest.raises(EngineClosed):
        await asyncio.wait_for(caller, 300)


async def test_the_last_call_is_answered_behind_the_claims() -> None:
    plane = _Plane("claims")
    caller = await plane.reach()
    # turns of the loop, in which an answer would come
    for _ in range(5):
        await asyncio.sleep(0)
    assert not caller.done()
    plane.go_on.set()
    await asyncio.wait_for(caller, 300)
    await plane.task
