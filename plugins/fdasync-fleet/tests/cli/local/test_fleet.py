"""Work that goes on for as long as all instances of a fleet live; real ones are in `test_up.py` and `test_main.py`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fdasync_fleet.cli.local.child import ChildEnded
from fdasync_fleet.cli.local.fleet import LocalFleet


async def test_work_ends_with_its_result_or_with_the_first_instance_that_ends() -> None:
    loop = asyncio.get_running_loop()
    children: list[Any] = [SimpleNamespace(name=name, exited=loop.create_future(), lines=["said"]) for name in "ab"]
    fleet = LocalFleet([])
    fleet.children = children
    cancelled = False

    async def long() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        finally:
            cancelled = True

    async def short() -> int:
        return 7

    async def fails() -> None:
        raise ZeroDivisionError("by zero")

    async with asyncio.timeout(300):
        assert await fleet.while_alive(short()) == 7
        with pytest.raises(ZeroDivisionError):
            await fleet.while_alive(fails())
        work = asyncio.ensure_future(fleet.while_alive(long()))
        await asyncio.sleep(0)
        children[1].exited.set_result(-9)
        with pytest.raises(ChildEnded, match=r"b .*said") as caught:
            await work
        assert (caught.value.name, caught.value.status) == ("b", -9)
        assert cancelled
        # whatever else it would have brought
        with pytest.raises(ChildEnded):
            await fleet.while_alive(short())


async def test_one_that_ends_while_others_load_ends_the_waiting() -> None:
    loop = asyncio.get_running_loop()
    plan: Any = SimpleNamespace(config=SimpleNamespace(start_deadline_s=60.0))
    children: list[Any] = [
        SimpleNamespace(name=name, ready=loop.create_future(), exited=loop.create_future(), lines=["said"], state="")
        for name in "ab"
    ]
    fleet = LocalFleet([plan])
    fleet.children = children
    async with asyncio.timeout(300):
        waiting = asyncio.ensure_future(fleet.ready())
        children[0].ready.set_result(None)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        children[0].exited.set_result(-9)
        with pytest.raises(ChildEnded, match=r"a was ended by SIGKILL: said"):
            await waiting
        children[0].exited = loop.create_future()
        children[1].ready.set_result(None)
        await fleet.ready()
