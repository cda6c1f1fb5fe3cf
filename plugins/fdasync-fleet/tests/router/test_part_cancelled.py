"""An update in parts whose task is cancelled answers the call that it performs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fdasync_fleet.router.control import ControlPlane
from fdasync_fleet.router.weights.part_update import PartUpdate
from fdasync_fleet.verbs import Verbs, name_of, verb

from fdasync.errors import EngineClosed


def test_a_part_under_way_is_answered_when_the_router_closes() -> None:
    async def play() -> None:
        plane = ControlPlane.__new__(ControlPlane)
        plane._config = SimpleNamespace(command_s=5.0)

        async def make_room(_change):
            pass

        asked = asyncio.Event()

        async def ask_all(command, _limit_s, _present=None):
            if name_of(command) == "update_part":
                asked.set()
                await asyncio.Event().wait()
            return []

        plane._make_room, plane._ask_all = make_room, ask_all
        plane._success = lambda _outcomes, **_drops: []
        parts = PartUpdate()
        task = asyncio.create_task(plane._play_parts(parts, verb(Verbs.begin_update, "keep")))
        await asyncio.wait([parts.begun])
        caller = asyncio.create_task(parts.ask(verb(Verbs.update_part, None)))
        await asyncio.wait_for(asked.wait(), 300)
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(caller, 300)

    asyncio.run(play())
