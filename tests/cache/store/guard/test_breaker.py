"""The breaker of the guard: it leaves a failing store alone, and probes it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fdasync.cache.store.base import DONE, MISS, Outcome
from fdasync.errors import StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.testing.harness.bounded import turns
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.cache.store.guard.scripted_store import (
    LATER,
    Scripted,
    guarded,
    items,
    logged,
    memory,
    never_ends,
    now,
    puts,
    simulated,
)


def watched(inner, **limits):
    """Its probes are part of the script."""
    inner.probes = True
    return guarded(inner, **{"failures": 3, "retry_s": 2.0, "max_retry_s": 10.0, "call_s": 5.0, **limits})


FAILED = Outcome("failed", "busy", transient=True)


BROKEN = Outcome("failed", "for ever")


@simulated
async def test_failures_in_a_row_open_it_and_a_probe_closes_it():
    async with watched(Scripted(LATER, LATER, [DONE], LATER, [FAILED, FAILED], LATER)) as (store, scripted):
        for verb in ("put", "put", None, "put", "both", "put"):
            assert store.breaker.state == "closed"
            if verb == "put":
                with pytest.raises(StoreUnavailable, match="later"):
                    await store.put(items("a"))
            else:
                await store.get_into(items("a", "b") if verb else items("a"))
        assert store.breaker.state == "open"
        await store.refuses()
        await asyncio.sleep(1.9)
        await store.refuses()
        await asyncio.sleep(0.2)
        assert store.breaker.state == "closed"
        assert store.states == [("open", 0.0), ("half_open", 2.0), ("closed", 2.0)]
        assert scripted.calls[-1] == ("exists_prefix", ["fdasync-probe"])
        assert await store.put(items("a")) == [DONE]


@simulated
async def test_a_timeout_opens_it_at_once_and_closing_begins_the_count_anew():
    async with watched(Scripted(2.0), call_s=1.0, failures=2) as (store, scripted):
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
        assert store.states == [("open", 1.0)]
        await asyncio.sleep(5.0)
        scripted.script = [LATER, LATER]
        for state in ("closed", "open"):
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            assert store.breaker.state == state
        await asyncio.sleep(5.0)
        assert store.breaker.state == "closed"
        scripted.script = [LATER]
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        assert store.breaker.state == "closed", "what failed before it was open counts no more"


@simulated
async def test_what_says_nothing_against_the_store_does_not_count():
    lines = [StoreRejected("scripted", "no"), [FAILED, DONE], [MISS], [BROKEN], [Outcome("full", "x")], []]
    async with watched(
        Scripted(LATER, LATER, *lines[1:2], LATER, LATER, *lines[2:3], LATER, LATER, *lines[:1], *lines[3:])
    ) as (store, scripted):
        for _ in range(len(scripted.script)):
            count = len(scripted.script[0]) if isinstance(scripted.script[0], list) else 1
            try:
                await store.put(items(*"ab"[:count]))
            except (StoreUnavailable, StoreRejected):
                continue
        assert store.breaker.state == "closed"
        assert (store.states, scripted.script) == ([], [])


@simulated
async def test_a_call_that_waits_too_long_in_line_is_no_failure_of_the_store():
    # one long call at a time, all within their own deadline, and more of them than get their turn
    async with watched(Scripted(*[8.0] * 50), call_s=10.0, max_calls=1) as (store, scripted):
        tasks = [asyncio.ensure_future(store.put(items("a"))) for _ in range(8)]
        await asyncio.wait(tasks)
        errors = [task.exception() for task in tasks]
        assert [type(error) for error in errors] == [*[type(None)] * 2, *[StoreBusy] * 6]
        assert (store.breaker.state, store.states) == ("closed", [])
        # nor for it: what failed before still counts
        for _ in range(2):
            scripted.script.insert(0, LATER)
            with pytest.raises(StoreUnavailable, match="later"):
                await store.put(items("a"))
        # nor does a call that nobody wants any more
        task = asyncio.ensure_future(store.put(items("a")))
        await turns(2)
        task.cancel()
        await asyncio.wait([task])
        assert store.breaker.state == "closed"
        scripted.script.insert(0, LATER)
        with pytest.raises(StoreUnavailable, match="later"):
            await store.put(items("a"))
        assert store.breaker.state == "open"


@simulated
async def test_one_timeout_opens_it_whatever_becomes_of_the_late_calls():
    fails = never_ends()
    async with watched(Scripted(20.0, 30.0, fails), call_s=1.0) as (store, _):
        tasks = puts(store, "abc")
        await asyncio.wait(tasks)
        assert [type(task.exception()) for task in tasks] == [StoreTimeout] * 3
        assert store.states == [("open", 1.0)]
        await store.refuses()
        await asyncio.sleep(5.0)
        assert store.breaker.state == "closed"
        await asyncio.sleep(17.0)
        assert store.breaker.state == "closed"
        # one that was ended, by a kill for one, never answered
        fails.set_exception(LATER)
        await asyncio.sleep(10.0)
        assert store.breaker.state == "closed"


@simulated
async def test_cooldowns_double_up_to_their_limit():
    async with watched(Scripted(*[LATER] * 8), failures=1) as (store, scripted):
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        await asyncio.sleep(100.0)
        probes = [at for state, at in store.states if state == "half_open"]
        assert probes == [2, 6, 14, 24, 34, 44, 54, 64]
        assert store.states[-1] == ("closed", 64)
        # the next time it begins anew
        scripted.script = [LATER, LATER]
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        await asyncio.sleep(10.0)
        assert [state for state, at in store.states if at >= 100] == [
            "open", "half_open", "open", "half_open", "closed",
        ]  # fmt: skip


@simulated
async def test_there_is_one_probe_at_a_time_and_its_end_brings_the_next():
    stuck = never_ends()
    async with watched(Scripted(LATER, stuck), call_s=3.0, failures=1) as (store, scripted):
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        await asyncio.sleep(499.5)
        assert len(scripted.calls) == 2, "a store that hangs is not asked again and again"
        assert store.breaker.state == "open"
        assert store.states[-1] == ("open", 5.0)
        stuck.set_result(1)
        await asyncio.sleep(0.1)
        assert len(scripted.calls) == 3
        assert store.breaker.state == "closed"
        assert store.states[-2:] == [("half_open", 499.5), ("closed", 499.5)]


@simulated
async def test_a_probe_that_hung_and_failed_costs_another_cooldown():
    stuck = never_ends()
    async with watched(Scripted(LATER, stuck), failures=1) as (store, _):
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        await asyncio.sleep(99.0)
        stuck.set_exception(LATER)
        await asyncio.sleep(0.1)
        assert store.breaker.state == "open"
        await asyncio.sleep(4.0)
        assert store.states[-1] == ("closed", 103.0)


@simulated
async def test_what_began_before_it_opened_says_nothing_of_what_came_after():
    async with watched(Scripted(LATER, never_ends(), 50.0), call_s=30.0, failures=1) as (store, scripted):
        old = scripted.script[1]
        first = asyncio.ensure_future(store.put(items("a")))
        second = asyncio.ensure_future(store.put(items("b")))
        await asyncio.wait([first])
        assert first.exception() is not None
        scripted.script.clear()
        await asyncio.sleep(5.0)
        assert store.breaker.state == "closed"
        await asyncio.wait([second])
        assert isinstance(second.exception(), StoreTimeout)
        assert now() == pytest.approx(30.0)
        assert store.breaker.state == "closed"
        old.set_result([DONE])
        await second.exception().ended
        await turns(2)


@pytest.mark.ci
@pytest.mark.parametrize("how", ["kill", "no kill"])
@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.5, 6.0, 9.0, 30.0])
@simulated
async def test_aclose_ends_the_probe_whatever_it_does(after_s, how):
    async with guarded(
        FaultyStore(memory(), StoreFaults(fail_call=1.0)), failures=1, retry_s=2.0, max_retry_s=4.0, call_s=5.0
    ) as (store, faults):
        with pytest.raises(StoreUnavailable):
            await store.put(items("a"))
        # the first probe, at 2 s, hangs
        faults.plan = StoreFaults(hang=1.0)
        contexts = logged()
        await asyncio.sleep(after_s)
        # what the probe ends by must not be an error that nobody asks for
        if how == "kill":
            await store.kill("a test")
            await turns(5)
        begun = now()
        await store.aclose()
        # what hangs is killed half-way to the deadline
        assert now() - begun <= 5.0 + 1e-3
        assert faults.hanging == 0
        await store.aclose()
        assert store.states[-1][1] <= begun
        gc.collect()
        assert not contexts
