"""A pool behind the guard that an engine puts around it: trouble costs one deadline, then nothing, and ends."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from fdasync_mooncake.testing import MasterProcess, MemoryProcess
from mooncake_bench import Blocks, Lateness, get_one, put_one, until

from fdasync.cache.store.guard import GuardedStore, GuardLimits
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.errors import StoreTimeout, StoreUnavailable
from fdasync.ipc.deadlines import Closing

pytestmark = pytest.mark.usefixtures("nothing_left", "network")

_DEADLINE_S = 3.0
_LATE_S = 40.0  # far above what two busy cores make of it, far below the stalls of the client


@pytest.fixture
def master(network):
    with MasterProcess(client_ttl_s=2) as master, MemoryProcess(master, 128 << 20):
        yield master


@pytest.fixture
def blocks():
    blocks = Blocks(4)
    yield blocks
    blocks.region.close()


async def guarded(master, blocks, rpc_timeout_s):
    inner = ProcessStore("mooncake", {"master": master.address, "rpc_timeout_s": rpc_timeout_s}, close_deadline_s=0.05)
    limits = GuardLimits(call_s=_DEADLINE_S, failures=1, retry_s=0.2, max_retry_s=0.4)
    store = GuardedStore(inner, limits, name="mooncake", publish=lambda _: None, closing=Closing(10))
    await store.open([blocks.region])
    return store


async def spent(work):
    """How long until it raised, in seconds, and what."""
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        await work
    return time.monotonic() - started, caught.value


@pytest.mark.ci
async def test_a_hung_master_costs_one_deadline(master, blocks):
    store = await guarded(master, blocks, rpc_timeout_s=300)
    assert await put_one(store, blocks, "k") == "done"
    master.signal(signal.SIGSTOP)
    async with Lateness() as lateness:
        first_s, error = await spent(get_one(store, blocks, "k"))
        assert isinstance(error, StoreTimeout)
        assert store.breaker.state == "open"
        began = time.monotonic()
        for _ in range(200):
            with pytest.raises(StoreUnavailable, match="gets no calls"):
                await store.exists_prefix(["k"])
        refused_s = time.monotonic() - began
    assert _DEADLINE_S <= first_s < _DEADLINE_S + _LATE_S
    assert refused_s < _LATE_S
    assert lateness.worst_s < _LATE_S
    assert not error.ended.done(), "the parts are in use until the call ends"
    master.signal(signal.SIGCONT)
    await asyncio.wait([error.ended], timeout=300)
    # the call that hung came to its end: the master took it up where it had stopped
    assert [outcome.status for outcome in error.ended.result()] == ["done"]
    assert blocks.holds("k", 1)
    await until("the breaker closes", 300, "closed", lambda: state_of(store))
    assert await get_one(store, blocks, "k", 2) == "done"
    await store.aclose()


@pytest.mark.ci
async def test_a_dead_master_costs_one_call_and_comes_back(master, blocks):
    store = await guarded(master, blocks, rpc_timeout_s=3)
    assert await put_one(store, blocks, "k") == "done"
    master.kill()
    async with Lateness() as lateness:
        first_s, error = await spent(get_one(store, blocks, "k"))
        assert store.breaker.state == "open"
        later_s, _ = await spent(store.exists_prefix(["k"]))
    assert first_s < _DEADLINE_S + _LATE_S
    assert later_s < _LATE_S
    assert lateness.worst_s < _LATE_S
    if isinstance(error, StoreTimeout):
        await asyncio.wait([error.ended], timeout=300)
    master.start()
    await until("the breaker closes", 300, "closed", lambda: state_of(store))
    await until("puts work again", 300, "done", lambda: put_or_why(store, blocks, "new"))
    assert await get_one(store, blocks, "new") == "done"
    await store.aclose()


async def state_of(store):
    return store.breaker.state


async def put_or_why(store, blocks, key):
    try:
        return await put_one(store, blocks, key)
    except StoreUnavailable as error:
        return str(error)


async def test_an_engine_that_gives_up_kills_the_process(master, blocks):
    """`aclose` while the master hangs: the running call is ended with its process, and nothing is left."""
    inner = ProcessStore("mooncake", {"master": master.address, "rpc_timeout_s": 300}, close_deadline_s=0.05)
    limits = GuardLimits(call_s=0.2)
    store = GuardedStore(inner, limits, name="mooncake", publish=lambda _: None, closing=Closing(0.5))
    await store.open([blocks.region])
    master.signal(signal.SIGSTOP)
    with pytest.raises(StoreTimeout) as caught:
        await store.exists_prefix(["k"])
    started = time.monotonic()
    await store.aclose()
    assert time.monotonic() - started < 60
    assert caught.value.ended.done()
    assert inner.pid == -1
