"""Stores in a process of their own: closing, and blocks that are checked in the child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from fdasync.cache.store.base import DONE, MISS, Item, StoreUsage
from fdasync.cache.store.block_format import BlockSchema, Section, object_key
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing.harness.leaks import children
from fdasync.testing.harness.processes import stop_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync.cache.store.process.proxy import ProcessStore

from tests.cache.store.process.odd_store import Bench, in_process, opened

# -- closing ----------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_closing_waits_for_what_runs_and_closes_the_store():
    async with opened() as bench:
        running = asyncio.ensure_future(bench.store.get_into([bench.item("odd/stubborn")]))
        await bench.until(lambda: bench.view()[0] != 0)
        closing = [asyncio.ensure_future(bench.store.aclose()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await bench.store.exists_prefix(["a"])
        await asyncio.wait(closing, timeout=0.05)
        assert not any(task.done() for task in [running, *closing])
        bench.go()
        await asyncio.gather(*closing)
        # the store had the last word
        with pytest.raises(StoreUnavailable, match=r"^store memory: it is closed"):
            running.result()
        assert children() == []
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await bench.store.usage()


@pytest.mark.ci
async def test_closing_has_a_deadline():
    async with opened(in_process(config={"close": "hang"}, close_deadline_s=0.2)) as bench:
        await bench.store.aclose()
        assert children() == []


@pytest.mark.ci
async def test_closing_a_stopped_child_has_the_deadline_too():
    async with opened(in_process(close_deadline_s=0.2)) as bench:
        stop_process(bench.store.pid)
        call = asyncio.ensure_future(bench.store.exists_prefix(["a"]))
        await asyncio.sleep(0)
        await bench.store.aclose()
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await call


@pytest.mark.ci
async def test_a_store_that_cannot_be_closed_says_so():
    bench = Bench(in_process(config={"close": "fail"}))
    await bench.store.open([bench.region])
    with pytest.raises(StoreUnavailable, match="closing it failed: its process ended with status 1"):
        await bench.store.aclose()
    await bench.store.aclose()
    assert children() == []
    bench.region.close()


@pytest.mark.ci
async def test_the_end_of_the_channel_closes_the_store():
    async with opened() as bench:
        pidfd = os.pidfd_open(bench.store.pid)
        # as if the engine had gone, but for the signal that the kernel would send
        assert bench.store._child is not None
        bench.store._child.process.channel.close()
        assert select.select([pidfd], [], [], 300.0)[0]
        os.close(pidfd)
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"


@pytest.mark.ci
async def test_keys_at_the_terminal_are_not_for_the_child():
    async with opened() as bench:
        assert os.getpgid(bench.store.pid) == bench.store.pid != os.getpgid(0)


def test_a_child_dies_with_its_engine(tmp_path):
    script = """
        import asyncio, uvloop
        from fdasync.cache.store.process.proxy import ProcessStore
        from fdasync.ipc.shared_memory import SharedRegion
        from fdasync.cache.store.base import Item, Part

        async def main():
            region = SharedRegion.create("r", 4096)
            store = ProcessStore("odd", {}, close_deadline_s=300.0)
            await store.open([region])
            # it cannot see the end of its channel
            call = asyncio.ensure_future(store.get_into([Item("odd/hang", (Part(0, 0, 1),))]))
            while region.view()[0] != ord("h"):
                await asyncio.sleep(0.001)
            print(store.pid, flush=True)
            await asyncio.sleep(600)

        uvloop.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
        assert select.select([pidfd], [], [], 300.0)[0]
        os.close(pidfd)


# -- blocks -----------------------------------------------------------------------------------------

SCHEMA = BlockSchema(
    layout="pages", kv_dtype="bfloat16", block_tokens=4,
    sections=(Section("kv", "bfloat16", (500,), 1000), Section("routing", "uint8", (4, 3), 12)),
    zeros=Part(0, 0, PAGE_NBYTES), trash=Part(0, PAGE_NBYTES, PAGE_NBYTES),
)  # fmt: skip


NAME = object_key(bytes(16), bytes(range(16)))


BLOCK = Item(NAME, (Part(0, 2 * PAGE_NBYTES, PAGE_NBYTES), Part(0, 3 * PAGE_NBYTES, 1000), Part(1, 24, 12)))


@contextlib.asynccontextmanager
async def with_blocks(store: ProcessStore) -> AsyncIterator[list[SharedRegion]]:
    regions = [SharedRegion.create("host", 5 * PAGE_NBYTES), SharedRegion.create("aux", PAGE_NBYTES)]
    try:
        await store.open(regions)
        yield regions
    finally:
        await store.aclose()
        for region in regions:
            region.close()


async def test_headers_and_checksums_are_made_in_the_child():
    store = in_process("memory", schema=SCHEMA)
    async with with_blocks(store) as regions:
        kv, rows = regions[0].view(3 * PAGE_NBYTES, 1000), regions[1].view(24, 12)
        kv[:], rows[:] = b"k" * 1000, b"r" * 12
        assert await store.put([BLOCK]) == [DONE]
        assert (await store.usage()) == StoreUsage(objects=1, nbytes=SCHEMA.object_nbytes)
        kv[:], rows[:] = bytes(1000), bytes(12)
        assert await store.get_into([BLOCK]) == [DONE]
        assert (bytes(kv), bytes(rows)) == (b"k" * 1000, b"r" * 12)
        assert store.capabilities.max_parts == 3
        with pytest.raises(StoreRejected, match="a block has"):
            await store.put([Item(NAME, BLOCK.parts[:2])])
        kv.release()
        rows.release()


async def test_damage_is_found_in_the_child():
    store = in_process(config={"flip": 2 * PAGE_NBYTES + 3}, schema=SCHEMA)
    async with with_blocks(store):
        assert await store.put([BLOCK]) == [DONE]
        [outcome] = await store.get_into([BLOCK])
        assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", "checksum")
        assert "routing" in outcome.problem
        assert await store.get_into([BLOCK]) == [MISS]


async def test_a_schema_that_cannot_be_stored_is_refused_at_the_start():
    import msgspec

    store = in_process("memory", schema=msgspec.structs.replace(SCHEMA, layout="x" * 4096))
    with pytest.raises(StoreRejected, match="a header cannot say"):
        async with with_blocks(store):
            pass
