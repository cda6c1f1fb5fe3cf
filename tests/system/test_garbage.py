"""What has ended is gone at once: no reference cycles, which only the garbage collector would find, in long stops."""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import EngineConfig, SamplingParams
from fdasync.testing import synthetic_engine, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=8, n=2)


@contextmanager
def cycles() -> Iterator[list[Any]]:
    """Objects of ours that nobody has any more within the block, and that are still there at its end."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [thing for thing in gc.garbage if type(thing).__module__.startswith("fdasync")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_cycles_are_found():
    class Ring:
        def __init__(self) -> None:
            self.me = self

    Ring.__module__ = "fdasync.rings"
    with cycles() as found:
        Ring()
    assert [type(thing) for thing in found] == [Ring]


@pytest.mark.ci
async def test_requests_leave_no_cycles():
    async with synthetic_engine() as engine:
        await engine.complete([1, 2, 3], PARAMS)
        with cycles() as found:
            for first in range(5):
                await engine.complete([first] * 20, PARAMS)
                async with engine.generate([first] * 20, PARAMS) as stream:
                    async for _ in stream:
                        pass
                async with engine.generate([first] * 30, SamplingParams(max_tokens=64)) as stream:
                    # aborted
                    await anext(stream)
            del stream
            await until(lambda: engine.stats().live == 0)
    assert found == []


@pytest.mark.ci
async def test_requests_between_instances_leave_no_cycles(tmp_path: Path):
    addresses = [f"ipc://{tmp_path}/{role}" for role in ("prefill", "decode")]
    configs = [
        EngineConfig(
            runner="synthetic",
            runner_config={"num_blocks": 64, "block_tokens": 16},
            process="inline",
            host_blocks=64,
            role=role,
            leases=LEASES,
        )
        for role in ("prefill", "decode")
    ]
    prefill, decode = [
        Instance(config, listen=address, links=LINKS) for config, address in zip(configs, addresses, strict=True)
    ]
    async with prefill, decode, fdasync.connect(addresses, links=LINKS) as router:
        await router.complete([1, 2, 3], PARAMS)
        with cycles() as found:
            for first in range(5):
                await router.complete([first] * 40, PARAMS)
                async with router.generate([first] * 40, SamplingParams(max_tokens=500)) as stream:
                    await anext(stream)
            del stream
            await until(lambda: decode.engine.stats().live == 0)
            # what a turn of the loop still refers to
            await asyncio.sleep(0)
        assert decode.engine.stats().scheduler.leases_granted == 11
    assert found == []
