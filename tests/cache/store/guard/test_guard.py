"""The guard, and the wrappers of the test kit: each passes the suite, and hands on what it does not change."""

from __future__ import annotations

import asyncio
from random import Random
from typing import get_args

import pytest

from fdasync.cache.store.base import DONE, EXISTS, MISS, Outcome, Store, StoreUsage
from fdasync.errors import StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.events.catalog import StoreCalled, StoreVerb
from fdasync.testing import SimLoop, StoreTests, run_sim
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from fdasync.testing.stores.latency import Latency
from fdasync.testing.stores.wrapper import Wrapper
from tests.cache.store.guard.scripted_store import (
    NBYTES,
    Guarded,
    Scripted,
    guarded,
    item,
    items,
    memory,
    opened,
    simulated,
)


class WrappedSuite(StoreTests):
    """Around a store that takes a while, so that there is something to cancel, kill and close."""

    examples = 10

    def wrap(self, store):
        raise NotImplementedError

    def make(self, **config):
        return self.wrap(Latency(memory(**config), call_s=0.0005))

    def make_capped(self, max_nbytes):
        return self.make(max_nbytes=max_nbytes)

    def new_loop(self):
        return SimLoop()


@pytest.mark.nightly
class TestPlain(WrappedSuite):
    def wrap(self, store):
        return Wrapper(store)


class TestGuarded(WrappedSuite):
    def wrap(self, store):
        return Guarded(store, call_s=5.0, max_calls=4, max_nbytes=1 << 20)


@pytest.mark.ci
class TestGuardedInRealTime(TestGuarded):
    examples = 5

    def new_loop(self):
        return StoreTests.new_loop(self)


@pytest.mark.ci
class TestOneCallAtATime(WrappedSuite):
    def wrap(self, store):
        return Guarded(store, call_s=10.0, max_calls=1, max_nbytes=1 << 18)


@pytest.mark.ci
class TestLatency(WrappedSuite):
    def wrap(self, store):
        return Latency(store, call_s=0.001, gib_s=1.0, jitter=0.5, random=Random(1))


@pytest.mark.nightly
class TestFaultsOfRateZero(WrappedSuite):
    def wrap(self, store):
        return FaultyStore(store, StoreFaults(delay_s=1.0))


@pytest.mark.ci
class TestFaultsThatOnlyDelay(WrappedSuite):
    def wrap(self, store):
        return FaultyStore(store, StoreFaults(delay=0.5, delay_s=0.01))


WRAPS = {
    "plain": Wrapper,
    "guard": Guarded,
    "latency": lambda store: Latency(store, call_s=0.0),
    "faults": lambda store: FaultyStore(store, StoreFaults()),
}


# -- all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
@simulated
async def test_everything_is_delegated(wrap):
    scripted = Scripted()
    store = wrap(scripted)
    async with opened(store):
        assert await store.exists_prefix(["a", "b"]) == 2
        assert await store.put(items("a")) == [DONE]
        assert await store.get_into(items("a", "b")) == [DONE, DONE]
        assert await store.delete(["a"]) == 1
        assert await store.usage() == StoreUsage(objects=3)
        assert not await store.kill("a test")
        assert store.capabilities == scripted.capabilities
        assert store.config is scripted.config
    assert scripted.life == ["open", "kill: a test", "aclose"]
    verbs = ["exists_prefix", "put", *["get_into"] * (len(scripted.calls) - 4), "delete", "usage"]
    assert [verb for verb, _ in scripted.calls] == verbs


@pytest.mark.parametrize(
    "line",
    [ValueError("oops"), asyncio.CancelledError(), [], [DONE], ["done", "done"], None, 3],
    ids=["raises", "cancels", "0", "1", "text", "none", "int"],
)
@simulated
async def test_what_breaks_the_contract_is_unavailable(line):
    async with guarded(Scripted(line)) as (store, _):
        with pytest.raises(StoreUnavailable, match="scripted: put broke the contract") as found:
            await store.put([item("a", 5), item("b", 5)])
        assert found.value.__cause__ is (line if isinstance(line, BaseException) else None)


@simulated
async def test_counts_that_cannot_be_are_unavailable():
    async with guarded(Scripted(3, -1, None, [1]), failures=9) as (store, _):
        for call in (store.exists_prefix, store.delete, store.exists_prefix, store.delete):
            with pytest.raises(StoreUnavailable, match="broke the contract: it answered"):
                await call(["a", "b"])


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
@simulated
async def test_refusals_go_through(wrap):
    store = wrap(Scripted(StoreRejected("scripted", "no"), StoreUnavailable("scripted", "later")))
    async with opened(store):
        with pytest.raises(StoreRejected, match="no"):
            await store.put(items("a"))
        with pytest.raises(StoreUnavailable, match="later"):
            await store.exists_prefix(["a"])


@simulated
async def test_every_call_is_told_of():
    scripted = Scripted(
        2, 1.0, [EXISTS, DONE], [DONE, MISS, Outcome("damaged", "x")], 1, StoreUnavailable("scripted", "gone"), 50.0
    )
    store = Guarded(scripted, call_s=4.0)
    async with opened(store):
        await store.exists_prefix(["a", "b", "c"])
        await store.put(items("a", "b"))
        await store.put(items("a", "b"))
        await store.get_into(items("a", "b", "c"))
        await store.delete(["a", "b"])
        with pytest.raises(StoreUnavailable):
            await store.get_into(items("a"))
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
        with pytest.raises(StoreUnavailable, match="gets no calls"):
            await store.put(items("a"))

    def told(verb, count, nbytes=0, seconds=0.0, **outcomes):
        near = pytest.approx(seconds, abs=1e-6)
        return StoreCalled(store="scripted", verb=verb, items=count, nbytes=nbytes, seconds=near, **outcomes)

    assert store.told == [
        told("exists_prefix", 3, done=2, missed=1),
        told("put", 2, 2 * NBYTES, 1.0, done=2),
        told("put", 2, NBYTES, done=2),
        told("get_into", 3, NBYTES, done=1, missed=1, damaged=1),
        told("delete", 2, done=1, missed=1),
        told("get_into", 1, error="StoreUnavailable"),
        told("put", 1, seconds=4.0, error="StoreTimeout"),
        told("put", 1, error="StoreUnavailable"),
    ]


def test_the_verbs_that_events_name_are_those_of_the_contract():
    # `usage` has a default
    assert set(get_args(StoreVerb)) == {*Store.__abstractmethods__ - {"open", "aclose"}, "usage"}


def test_a_kill_ends_a_late_call_whose_end_its_caller_gave_up_waiting_for():
    async def work():
        async with guarded(Scripted(1000.0), call_s=1.0, kill_s=None) as (store, _):
            with pytest.raises(StoreTimeout) as late:
                await store.put(items("a"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late.value.ended, 1.0)
            assert store.inner.running == 1
            assert await store.kill("for the test")
            assert store.inner.running == store.line.calls == 0

    run_sim(work())


def test_a_closing_that_is_given_up_lets_go_of_the_store_when_it_has_closed():
    class Slow(Scripted):
        async def aclose(self):
            await asyncio.sleep(5.0)
            await super().aclose()

    async def work():
        store = Guarded(Slow())
        await store.open([])
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(1.0)
        closing.cancel()
        await asyncio.wait([closing])
        assert store.inner.in_use
        await asyncio.sleep(5.0)
        assert store.inner.life == ["open", "aclose"]
        assert not store.inner.in_use

    run_sim(work())
