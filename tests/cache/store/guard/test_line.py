"""The line of the guard: it lets so many calls and bytes through at a time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE
from fdasync.errors import StoreBusy, StoreUnavailable
from fdasync.testing.harness.bounded import turns
from tests.cache.store.guard.scripted_store import (
    NBYTES,
    Scripted,
    guarded,
    item,
    items,
    never_ends,
    now,
    puts,
    simulated,
)
from tests.support.helpers import case_settings

# -- limits ---------------------------------------------------------------------------------------------


def limits(scripted, **options):
    return guarded(scripted, **{"max_calls": 2, "max_nbytes": 10 * NBYTES, **options})


@simulated
async def test_calls_wait_in_line_first_come_first_served():
    async with limits(Scripted(*[1.0] * 7)) as (store, scripted):
        tasks = puts(store, "abcdefg")
        await turns(3)
        assert (store.line.calls, len(store.line)) == (2, 5)
        await asyncio.wait(tasks)
        assert [asked[0].key for _, asked in scripted.calls] == list("abcdefg")
        assert scripted.times == [pytest.approx(number // 2, abs=1e-3) for number in range(7)]
        assert scripted.most_running == 2
        assert (store.line.calls, len(store.line)) == (0, 0)


@simulated
async def test_bytes_in_flight_are_limited_and_calls_keep_their_order():
    async with limits(Scripted(*[1.0] * 4), max_calls=9, max_nbytes=100) as (store, scripted):
        sizes = [60, 60, 30, 10]
        await asyncio.gather(*[store.put([item(place, size)]) for place, size in enumerate(sizes)])
        # the third would have fitted beside the first, and waits behind the second
        assert [asked[0].nbytes for _, asked in scripted.calls] == sizes
        assert scripted.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 1, 1)]
        assert scripted.most_nbytes == 100


@simulated
async def test_what_is_larger_than_the_limit_runs_alone():
    async with limits(Scripted(*[1.0] * 3), max_nbytes=100) as (store, scripted):
        await asyncio.gather(*[store.get_into([item(size, size)]) for size in (10, 500, 20)])
        assert scripted.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 2)]
        assert scripted.most_running == 1


@simulated
async def test_a_call_that_timed_out_keeps_its_place_until_its_end():
    stuck = never_ends()
    async with limits(Scripted(stuck), call_s=1.0, max_calls=1) as (store, scripted):
        late = asyncio.ensure_future(store.put(items("a")))
        await asyncio.sleep(0.5)
        waiting = asyncio.ensure_future(store.put(items("b")))
        await asyncio.wait([late])
        await asyncio.sleep(0.2)
        assert (store.line.calls, len(store.line), len(scripted.calls)) == (1, 2, 1), "a probe waits, too"
        stuck.set_result(None)
        assert await waiting == [DONE]
        assert late.exception().ended.done()
        await turns(5)
        assert store.line.calls == 0


@simulated
async def test_waiting_in_line_has_a_deadline():
    async with limits(Scripted(2.0, 2.0), max_calls=1, call_s=3.0) as (store, scripted):
        tasks = puts(store, "ab")
        await turns(2)
        with pytest.raises(StoreBusy, match="did not end within 3 s"):
            await store.put(items("c"))
        assert now() == pytest.approx(3.0)
        assert [await task for task in tasks] == [[DONE]] * 2
        assert (store.line.calls, len(store.line), len(scripted.calls)) == (0, 0, 2)


@pytest.mark.parametrize("how", ["cancelled", "too late"])
@simulated
async def test_a_call_that_leaves_the_line_makes_way_for_those_behind(how):
    # the second begins at 2 s, and keeps its room until 4 s
    async with limits(Scripted(2.0, 2.0, 0.5), max_calls=9, max_nbytes=100, call_s=3.0) as (store, _):
        first = asyncio.ensure_future(store.put([item("a", 60)]))
        again = asyncio.ensure_future(store.put([item("a", 60)]))
        blocks = asyncio.ensure_future(store.put([item("b", 60)]))
        await asyncio.sleep(1.0)
        small = asyncio.ensure_future(store.put([item("c", 30)]))
        await asyncio.sleep(1.5)
        assert len(store.line) == 2
        if how == "cancelled":
            blocks.cancel()
        await asyncio.wait([small])
        assert now() == pytest.approx(3.0 if how == "cancelled" else 3.5)
        await again
        assert small.result() == [DONE]
        await asyncio.wait([first, blocks])
        assert blocks.cancelled() if how == "cancelled" else isinstance(blocks.exception(), StoreUnavailable)


@simulated
async def test_a_call_that_is_cancelled_as_its_turn_comes_gives_the_turn_back():
    class Cancels(Scripted):
        async def put(self, asked):
            answer = await super().put(asked)
            # runs when the next in line has been told to go, and has not gone yet
            asyncio.get_running_loop().call_soon(lambda: self.next.cancel())
            return answer

    async with limits(Cancels(1.0), max_calls=1) as (store, scripted):
        first = asyncio.ensure_future(store.put(items("a")))
        second = scripted.next = asyncio.ensure_future(store.put(items("b")))
        await asyncio.wait([first, second])
        assert second.cancelled()
        assert (store.line.calls, len(store.line), len(scripted.calls)) == (0, 0, 1)
        assert await store.put(items("c")) == [DONE]


@pytest.mark.parametrize("how", ["kill", "aclose"])
@simulated
async def test_those_in_line_end_with_the_store(how):
    async with limits(Scripted(2.0), max_calls=1) as (store, scripted):
        tasks = puts(store, "abc")
        await turns(2)
        ending = asyncio.ensure_future(store.kill("a test") if how == "kill" else store.aclose())
        await asyncio.wait(tasks[1:])
        assert now() == pytest.approx(0.0, abs=1e-6)
        assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks[1:])
        await ending
        if how == "kill":
            with pytest.raises(StoreUnavailable, match="put was ended"):
                await tasks[0]
        else:
            assert await tasks[0] == [DONE]
        assert (store.line.calls, len(store.line), len(scripted.calls)) == (0, 0, 1)


@given(
    calls=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=25),
    max_calls=st.integers(1, 4),
    max_nbytes=st.integers(20, 120),
    max_wait=st.integers(1, 60),
)
@case_settings(120)
@simulated
async def test_limits_hold_and_every_call_ends_whoever_leaves_when(calls, max_calls, max_nbytes, max_wait):
    class Timed(Scripted):
        async def put(self, asked):
            self.script = [float(asked[0].key)]
            return await super().put(asked)

    call_s = max_wait / 10 + 41.0
    async with limits(Timed(), max_calls=max_calls, max_nbytes=max_nbytes, call_s=call_s) as (store, scripted):
        tasks = []
        for nbytes, takes, leaves_after in calls:
            tasks.append(asyncio.ensure_future(store.put([item(takes, nbytes)])))
            if leaves_after < 20:
                asyncio.get_running_loop().call_later(leaves_after / 3, tasks[-1].cancel)
        await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled() or isinstance(task.exception(), StoreUnavailable) or task.result() == [DONE]
        assert scripted.most_running <= max_calls
        assert scripted.most_nbytes <= max(max_nbytes, max(nbytes for nbytes, *_ in calls))
        assert (store.line.calls, len(store.line), store.line.nbytes) == (0, 0, 0)
