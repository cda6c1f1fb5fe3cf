"""Work that goes on for as long as all instances of a fleet live; real ones are in `test_up.py` and `test_cli.py`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fdasync.local import LocalFleet
from fdasync.local_child import ChildEnded


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

    async with asyncio.timeout(10.0):
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
