"""A loop that its user blocks for minutes: a store that answered meanwhile is not called late for it.

The minutes are skipped; see `tests/support/skips.py`. The store's process is real, and is stopped where it shall be
late.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.base import DONE, EXISTS, Item
from fdasync.cache.store.guard import GuardedStore, GuardLimits
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.errors import StoreTimeout, StoreUnavailable
from fdasync.events.catalog import BreakerChanged
from fdasync.ipc.deadlines import Closing
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync.testing import check_sample, oracle_of, synthetic_config, until
from fdasync.testing.harness.processes import stop_process
from tests.support import skips
from tests.support.plugins import install_plugin

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
# a block of the tests outlasts both
CALL_S = skips.LIMIT_S
KILL_S = 2.5 * CALL_S

pytestmark = pytest.mark.skips

SLOW = '''
import asyncio
from fdasync.cache.store.memory import MemoryStore

class SlowStore(MemoryStore):
    """A put takes as many milliseconds as its key says."""

    async def put(self, items):
        await asyncio.sleep(int(items[0].key.split("/")[0]) / 1e3)
        return await super().put(items)
'''


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A store whose puts take their time, named "slow"; it needs a process of its own."""
    install_plugin(tmp_path, monkeypatch, SLOW, "fdasync.stores", {"slow": "fdasync_bad:SlowStore"})


def item(name):
    return Item(name, (Part(0, 0, 1000),))


def make(max_calls=8, **options):
    """(the process, its store as engines guard it, the breaker's states)"""
    process_store = ProcessStore("slow", {}, close_deadline_s=CALL_S, open_deadline_s=CALL_S, respawn_s=0.0)
    states = []
    limits = GuardLimits(
        **{"call_s": CALL_S, "kill_s": KILL_S, "open_s": CALL_S, "reap_s": CALL_S, "max_calls": max_calls,
           "retry_s": 0.01, **options}
    )  # fmt: skip
    tell = lambda event: states.append(event.state) if isinstance(event, BreakerChanged) else None  # noqa: E731
    store = GuardedStore(process_store, limits, name="slow", publish=tell, closing=Closing(CALL_S))
    return process_store, store, states


@contextlib.asynccontextmanager
async def opened(store):
    region = SharedRegion.create("tests", 1 << 16)
    try:
        await store.open([region])
        yield
    finally:
        await store.aclose()
        region.close()


async def sent(process_store, count=1):
    """The child has been asked so many calls that it has not answered."""
    await until(lambda: process_store._child is not None and len(process_store._child._calls) == count)


def block(process_store, seconds=skips.BLOCKED_S):
    """Block the loop for as long; what the process answers meanwhile lies unread then."""
    skips.block(lambda: skips.said(process_store._child), seconds)


@pytest.mark.both_loops
async def test_a_block_longer_than_the_deadline_of_a_write_in_flight_opens_no_breaker(slow):
    process_store, store, states = make()
    async with opened(store):
        pid = process_store.pid
        for number in range(3):
            putting = asyncio.ensure_future(store.put([item(f"20/{number}")]))
            await sent(process_store)
            # what comes meanwhile lies unread behind the deadline, and behind the age at which it is killed
            block(process_store, skips.BLOCKED_S if number == 0 else 1.5 * CALL_S)
            assert await putting == [DONE]
        assert (states, process_store.pid) == ([], pid)


@pytest.mark.ci
@pytest.mark.both_loops
async def test_a_block_longer_than_the_age_of_a_late_write_kills_no_process(slow):
    process_store, store, _ = make()
    async with opened(store):
        pid = process_store.pid
        stop_process(pid)
        putting = asyncio.ensure_future(store.put([item("1/a")]))
        await sent(process_store)
        # late for real; its answer comes while the loop is blocked, before it is too old
        skips.block(seconds=1.2 * CALL_S)
        with pytest.raises(StoreTimeout) as caught:
            await putting
        os.kill(pid, signal.SIGCONT)
        block(process_store)
        assert await caught.value.ended == [DONE]
        # nobody is on the way to kill it either
        skips.block(seconds=2 * KILL_S)
        await asyncio.sleep(0.2)
        assert (process_store.pid, process_store.spawned) == (pid, 1)


@pytest.mark.ci
@pytest.mark.both_loops
async def test_a_call_that_waits_in_line_while_the_loop_is_blocked_has_its_turn(slow):
    process_store, store, _ = make(max_calls=1)
    async with opened(store):
        first = asyncio.ensure_future(store.put([item("20/a")]))
        second = asyncio.ensure_future(store.put([item("20/b")]))
        await sent(process_store)
        block(process_store)
        assert await first == [DONE]
        assert await second == [DONE]


@pytest.mark.ci
@pytest.mark.both_loops
async def test_a_breaker_closes_though_the_loop_is_blocked_again_and_again(slow):
    process_store, store, states = make(failures=1)
    loop = asyncio.get_running_loop()
    blocks = []

    def again():
        child = process_store._child
        # what it was asked is answered meanwhile, be it to start
        if child is not None and child._calls:
            block(process_store, 1.2 * CALL_S)
        blocks.append(loop.call_later(0.01, again))

    async with opened(store):
        # it dies, and is there again
        putting = asyncio.ensure_future(store.put([item("600000/a")]))
        await sent(process_store)
        await process_store.kill("a test")
        with pytest.raises(StoreUnavailable, match="a test"):
            await putting
        again()
        await until(lambda: store.breaker.state == "closed", deadline_s=100 * skips.BLOCKED_S, every_s=0.01)
        blocks[-1].cancel()
        # the probe that found the process starting may be late; the one after it is answered
        assert states.count("half_open") <= 3
        assert loop.skipped_s >= CALL_S
        assert await store.put([item("1/b")]) in ([DONE], [EXISTS])


@pytest.mark.ci
@pytest.mark.both_loops
async def test_an_engine_whose_loop_is_blocked_keeps_its_store_and_what_is_on_its_way_there(tmp_path):
    runner = {"num_blocks": 12, "max_context_tokens": 48}
    config = synthetic_config(
        runner, host_blocks=64, max_step_tokens=64, store="file", store_deadline_s=CALL_S, store_kill_s=KILL_S,
        store_config={"path": str(tmp_path / "kv"), "max_nbytes": 1 << 24}, store_open_deadline_s=CALL_S,
        # writes only
        fetch_min_tokens=1000, request_deadline_s=10 * skips.BLOCKED_S, close_deadline_s=CALL_S,
    )  # fmt: skip
    async with Engine(config) as engine, engine.bus.subscribe(BreakerChanged) as told:
        pid = engine.store_pid
        process_store = engine._runtime.store.inner
        for number in range(3):
            tokens = [number, *[(number * 31 + at * 7) % 100 for at in range(1, 40)]]
            answer = asyncio.ensure_future(engine.complete(tokens, PARAMS))
            # it answers nothing before the loop is blocked, and everything meanwhile
            stop_process(pid)
            await sent(process_store)
            os.kill(pid, signal.SIGCONT)
            block(process_store)
            check_sample((await answer).samples[0], tokens, PARAMS, oracle_of(config))
        await until(lambda: not engine.stats().scheduler.writing)
        counters = engine.stats().scheduler
        assert (counters.written_blocks, counters.dropped_writes, counters.late_transfers) == (30, 0, 0)
        assert told.pending == 0
        assert engine.store_pid == pid
