"""Wrappers of stores: each passes the suite, and does the one thing that it is for. Faults, latency, timeout, trace."""

from __future__ import annotations

import asyncio
from random import Random
from typing import get_args

import msgspec
import pytest

from fdasync.cache.store.base import DONE, Store, StoreUsage
from fdasync.cache.store.wrappers import Breaker, Limits, Timeout, Trace, Wrapper
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.events.catalog import StoreVerb
from fdasync.testing import SimLoop, StoreTests, run_sim
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from fdasync.testing.stores.latency import Latency
from tests.cache.store.wrappers.scripted_store import Scripted, item, items, memory, opened


def ignore(call):
    """Of a trace."""


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


@pytest.mark.ci
class TestTimeout(WrappedSuite):
    def wrap(self, store):
        return Timeout(store, call_s=1.0, gib_s=1.0)


@pytest.mark.ci
class TestLimits(WrappedSuite):
    def wrap(self, store):
        return Limits(store, max_calls=3, max_nbytes=1 << 18, max_wait_s=10.0)


@pytest.mark.ci
class TestBreaker(WrappedSuite):
    def wrap(self, store):
        return Breaker(store)


@pytest.mark.ci
class TestTrace(WrappedSuite):
    def wrap(self, store):
        return Trace(store, ignore)


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


class TestAllOfThem(WrappedSuite):
    def wrap(self, store):
        limited = Limits(FaultyStore(store, StoreFaults()), max_calls=4, max_nbytes=1 << 20, max_wait_s=10.0)
        return Trace(Breaker(Timeout(limited, call_s=5.0)), ignore)


@pytest.mark.ci
class TestAllOfThemInRealTime(TestAllOfThem):
    examples = 5

    def new_loop(self):
        return StoreTests.new_loop(self)


WRAPS = {
    "plain": Wrapper,
    "timeout": lambda store: Timeout(store, call_s=1.0),
    "limits": lambda store: Limits(store, max_calls=1, max_nbytes=10, max_wait_s=1.0),
    "breaker": Breaker,
    "trace": lambda store: Trace(store, ignore),
    "latency": lambda store: Latency(store, call_s=0.0),
    "faults": lambda store: FaultyStore(store, StoreFaults()),
}


# -- all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_everything_is_delegated(wrap):
    async def play():
        scripted = Scripted()
        store = wrap(scripted)
        async with opened(store):
            assert await store.exists_prefix(["a", "b"]) == 2
            assert await store.put(items("a")) == [DONE]
            assert await store.get_into(items("a", "b")) == [DONE, DONE]
            assert await store.delete(["a"]) == 1
            assert await store.usage() == StoreUsage(objects=3)
            assert not await store.kill("a test")
            assert msgspec.structs.replace(store.capabilities, max_batch=256) == scripted.capabilities
            assert store.config is scripted.config
        assert scripted.life == ["open", "kill: a test", "aclose"]
        verbs = ["exists_prefix", "put", *["get_into"] * (len(scripted.calls) - 4), "delete", "usage"]
        assert [verb for verb, _ in scripted.calls] == verbs

    run_sim(play())


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
@pytest.mark.parametrize(
    "line",
    [ValueError("oops"), asyncio.CancelledError(), [], [DONE], ["done", "done"], None, 3],
    ids=["raises", "cancels", "0", "1", "text", "none", "int"],
)
def test_what_breaks_the_contract_is_unavailable(wrap, line):
    async def play():
        store = wrap(Scripted(line))
        async with opened(store):
            with pytest.raises(StoreUnavailable, match="scripted: put broke the contract") as found:
                await store.put([item("a", 5), item("b", 5)])
            assert found.value.__cause__ is (line if isinstance(line, BaseException) else None)

    run_sim(play())


def test_counts_that_cannot_be_are_unavailable():
    async def play():
        store = Wrapper(Scripted(3, -1, None, [1]))
        async with opened(store):
            for call in (store.exists_prefix, store.delete, store.exists_prefix, store.delete):
                with pytest.raises(StoreUnavailable, match="broke the contract: it answered"):
                    await call(["a", "b"])

    run_sim(play())


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_refusals_go_through(wrap):
    async def play():
        store = wrap(Scripted(StoreRejected("scripted", "no"), StoreUnavailable("scripted", "later")))
        async with opened(store):
            with pytest.raises(StoreRejected, match="no"):
                await store.put(items("a"))
            with pytest.raises(StoreUnavailable, match="later"):
                await store.exists_prefix(["a"])

    run_sim(play())


def test_the_verbs_that_events_name_are_those_of_the_contract():
    # `usage` has a default
    assert set(get_args(StoreVerb)) == {*Store.__abstractmethods__ - {"open", "aclose"}, "usage"}
