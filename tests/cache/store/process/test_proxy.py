"""Stores in a process of their own: the same answers, and every way for that process to end."""

from __future__ import annotations

import asyncio
import os

import pytest

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import Part
from fdasync.testing import StoreTests
from fdasync.testing.harness.leaks import native_threads
from fdasync.testing.harness.processes import stop_process
from tests.cache.store.process.odd_store import PART_NBYTES, in_process, opened

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.mark.heavy("the suite of stores against a store in a process")
class TestInProcess(StoreTests):
    """Memory, one process away."""

    examples = 6

    def make(self):
        return in_process("memory", respawn_s=0.05)

    def make_capped(self, max_nbytes):
        return in_process("memory", {"max_nbytes": max_nbytes})

    def make_broken(self):
        return in_process(config={"open": "reject"})


# -- verbs ------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_verbs_answer_from_another_process():
    async with opened() as bench:
        store = bench.store
        usage = await store.usage()
        assert usage.objects == store.pid != os.getpid()
        bench.view()[:] = b"a" * PART_NBYTES
        assert await store.put([bench.item("a"), bench.item("b")]) == [DONE, DONE]
        assert await store.put([bench.item("a"), bench.item("c")]) == [EXISTS, DONE]
        assert await store.exists_prefix(["a", "c", "x", "b"]) == 2
        assert await store.get_into([bench.item("b", 1), bench.item("x", 2)]) == [DONE, MISS]
        assert bytes(bench.view(1)) == b"a" * PART_NBYTES
        assert await store.delete(["a", "b", "x"]) == 2
        assert await store.exists_prefix([]) == 0
        assert await store.put([]) == []
        assert store.capabilities.name == "odd"
        assert store.spawned == 1


async def test_calls_are_performed_at_the_same_time():
    async with opened() as bench:
        waiting = [asyncio.ensure_future(bench.store.get_into([bench.item("odd/wait", place)])) for place in range(5)]
        await bench.until(lambda: all(bench.view(place)[0] == ord("w") for place in range(5)))
        await bench.works()
        for task in waiting:
            task.cancel()
        done, _ = await asyncio.wait(waiting, timeout=300)
        assert [task.cancelled() for task in done] == [True] * 5
        await bench.works()
        assert bench.store.spawned == 1


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("odd/raise", StoreUnavailable, "store odd: ZeroDivisionError: by zero"),
        ("odd/reject", StoreRejected, "store own: not ever; leave it"),
        ("odd/cancelled", StoreUnavailable, "store odd: it cancelled its own call"),
        ("odd/junk", StoreUnavailable, "store odd: .*object"),
        ("odd/unavailable", StoreUnavailable, "store own: not now"),
    ],
)
async def test_what_a_verb_raises_comes_typed(key, error, words):
    async with opened() as bench:
        for _ in range(2):
            with pytest.raises(error, match=f"^{words}") as caught:
                await bench.store.exists_prefix([key])
            assert type(caught.value) is error
        assert bench.store.spawned == 1


async def test_batches_have_an_end():
    async with opened(in_process(config={"max_batch": 100_000})) as bench:
        assert bench.store.capabilities.max_batch == 256
        items = [bench.item(f"k{number}") for number in range(257)]
        keys = [item.key for item in items]
        verbs = [(bench.store.put, items), (bench.store.get_into, items)]
        for verb, what in [*verbs, (bench.store.exists_prefix, keys), (bench.store.delete, keys)]:
            with pytest.raises(StoreRejected, match="257 items in one call; at most 256"):
                await verb(what)
        assert await bench.store.put(items[:256]) == [DONE] * 256
    async with opened(in_process(config={"max_batch": 3})) as bench:
        with pytest.raises(StoreRejected):
            await bench.store.put(items[:4])


async def test_what_cannot_be_sent_is_refused():
    async with opened() as bench:
        with pytest.raises(StoreRejected, match="cannot be sent"):
            await bench.store.put([Item("a", (Part(0, 1 << 70, 1),))])
        with pytest.raises(StoreRejected, match="cannot be sent"):
            await bench.store.exists_prefix(["\ud800"])
        await bench.works()


async def test_an_engine_process_starts_no_thread():
    before = native_threads()
    async with opened() as bench:
        await asyncio.gather(*(bench.store.put([bench.item(f"k{number}", number)]) for number in range(32)))
        assert native_threads() == before


# -- cancelling -------------------------------------------------------------------------------------


async def test_a_cancelled_verb_ends_when_its_work_has_ended():
    async with opened() as bench:
        task = asyncio.ensure_future(bench.store.get_into([bench.item("odd/stubborn")]))
        await bench.until(lambda: bench.view()[0] != 0)
        for _ in range(3):
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        assert not task.done()
        # the other end goes on as if nothing was
        await bench.works()
        bench.go()
        await asyncio.wait([task], timeout=300)
        assert task.cancelled()
        bench.view()[:] = bytes(PART_NBYTES)
        await bench.works()
        assert bytes(bench.view()) == bytes(PART_NBYTES)


async def test_a_verb_is_cancelled_once_however_often_it_is_asked_for():
    async with opened() as bench:
        task = asyncio.ensure_future(bench.store.get_into([bench.item("odd/tidy")]))
        await bench.until(lambda: bench.view()[0] == ord("w"))
        for _ in range(5):
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        await asyncio.wait([task], timeout=300)
        assert task.cancelled()
        # what the store does at its end was not cut short
        assert bench.view()[0] == ord("t")


async def test_a_cancelled_verb_of_a_stopped_child_ends_with_the_child():
    async with opened() as bench:
        stop_process(bench.store.pid)
        task = asyncio.ensure_future(bench.store.get_into([bench.item("a")]))
        await asyncio.wait([task], timeout=0.02)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        assert await bench.store.kill("a test")
        await asyncio.wait([task], timeout=300)
        assert task.cancelled()
