"""The wrapper that lets so many calls and bytes through at a time, in line."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, EXISTS, MISS
from fdasync.cache.store.wrappers import Limits, Timeout
from fdasync.errors import StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.testing import run_sim
from fdasync.testing.harness.bounded import turns
from tests.cache.store.wrappers.scripted_store import NBYTES, Scripted, item, items, now, opened
from tests.cache.store.wrappers.wrapped import never_ends
from tests.support.helpers import case_settings

LATER = StoreUnavailable("scripted", "later")


# -- limits ---------------------------------------------------------------------------------------------


def limits(scripted, **options):
    return Limits(scripted, **{"max_calls": 2, "max_nbytes": 10 * NBYTES, "max_wait_s": 1000.0, **options})


def test_calls_wait_in_line_first_come_first_served():
    async def play():
        scripted = Scripted(*[1.0] * 7)
        store = limits(scripted)
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "abcdefg"]
            await turns(3)
            assert (store.calls, store.waiting) == (2, 5)
            await asyncio.wait(tasks)
            assert [asked[0].key for _, asked in scripted.calls] == list("abcdefg")
            assert scripted.times == [pytest.approx(number // 2, abs=1e-3) for number in range(7)]
            assert scripted.most_running == 2
            assert (store.calls, store.waiting) == (0, 0)

    run_sim(play())


def test_bytes_in_flight_are_limited_and_calls_keep_their_order():
    async def play():
        scripted = Scripted(*[1.0] * 4)
        store = limits(scripted, max_calls=9, max_nbytes=100)
        async with opened(store):
            sizes = [60, 60, 30, 10]
            await asyncio.gather(*[store.put([item(place, size)]) for place, size in enumerate(sizes)])
            # the third would have fitted beside the first, and waits behind the second
            assert [asked[0].nbytes for _, asked in scripted.calls] == sizes
            assert scripted.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 1, 1)]
            assert scripted.most_nbytes == 100

    run_sim(play())


def test_what_is_larger_than_the_limit_runs_alone():
    async def play():
        scripted = Scripted(*[1.0] * 3)
        store = limits(scripted, max_nbytes=100)
        async with opened(store):
            await asyncio.gather(*[store.get_into([item(size, size)]) for size in (10, 500, 20)])
            assert scripted.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 2)]
            assert scripted.most_running == 1

    run_sim(play())


def test_large_batches_are_cut_and_put_together_again():
    async def play():
        scripted = Scripted(max_batch=4)
        store = limits(scripted, max_nbytes=3 * NBYTES)
        async with opened(store):
            names = [str(number) for number in range(10)]
            scripted.script = [[DONE, MISS, DONE], [MISS, MISS, MISS], [DONE, DONE, DONE], [EXISTS]]
            found = await store.get_into(items(*names))
            assert found == [DONE, MISS, DONE, MISS, MISS, MISS, DONE, DONE, DONE, EXISTS]
            assert [[one.key for one in asked] for _, asked in scripted.calls] == [
                names[:3], names[3:6], names[6:9], names[9:],
            ]  # fmt: skip
            scripted.calls.clear()
            scripted.script = [4, 4, 1]
            assert await store.exists_prefix(names) == 9
            assert [len(asked) for _, asked in scripted.calls] == [4, 4, 2]
            scripted.calls.clear()
            scripted.script = [4, 2]
            assert await store.exists_prefix(names) == 6
            assert len(scripted.calls) == 2
            scripted.script = [1, 2, 0]
            assert await store.delete(names) == 3
            assert store.capabilities.max_batch > 10_000
            with pytest.raises(StoreRejected, match="items in one call"):
                await store.exists_prefix(["a"] * (store.capabilities.max_batch + 1))

    run_sim(play())


def test_a_run_that_fails_leaves_the_outcomes_of_those_before_it():
    async def play():
        scripted = Scripted([DONE, DONE], LATER, max_batch=2)
        store = limits(scripted)
        async with opened(store):
            outcomes = await store.put(items(*"abcde"))
            assert [(one.status, one.transient, one.problem) for one in outcomes] == [
                ("done", False, ""), ("done", False, ""), *[("failed", True, "later")] * 3,
            ]  # fmt: skip
            assert len(scripted.calls) == 2
            scripted.script = [LATER]
            with pytest.raises(StoreUnavailable, match="later"):
                await store.put(items(*"abcde"))
            ended = never_ends()
            scripted.script = [[DONE, DONE], StoreTimeout("scripted", "put", 1.0, ended)]
            with pytest.raises(StoreTimeout):
                await store.put(items(*"abcde"))
            ended.cancel()

    run_sim(play())


def test_a_call_that_timed_out_keeps_its_place_until_its_end():
    async def play():
        stuck = never_ends()
        scripted = Scripted(stuck)
        store = limits(Timeout(scripted, call_s=1.0), max_calls=1)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            assert store.calls == 1
            waiting = asyncio.ensure_future(store.put(items("b")))
            await asyncio.sleep(100.0)
            assert (store.waiting, len(scripted.calls)) == (1, 1)
            stuck.set_result(None)
            assert await waiting == [DONE]
            assert found.value.ended.done()
            assert store.calls == 0

    run_sim(play())


def test_waiting_in_line_has_a_deadline():
    async def play():
        scripted = Scripted(10.0, 10.0)
        store = limits(scripted, max_calls=1, max_wait_s=3.0)
        async with opened(store):
            first = asyncio.ensure_future(store.put(items("a")))
            await turns(2)
            with pytest.raises(StoreBusy, match="did not end within 3 s"):
                await store.put(items("b"))
            assert now() == pytest.approx(3.0)
            assert await first == [DONE]
            assert (store.calls, store.waiting, len(scripted.calls)) == (0, 0, 1)

    run_sim(play())


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_a_call_that_leaves_the_line_makes_way_for_those_behind(how):
    async def play():
        scripted = Scripted(10.0, 1.0)
        store = limits(scripted, max_calls=9, max_nbytes=100, max_wait_s=3.0)
        async with opened(store):
            first = asyncio.ensure_future(store.put([item("a", 60)]))
            blocks = asyncio.ensure_future(store.put([item("b", 60)]))
            await asyncio.sleep(1.0)
            small = asyncio.ensure_future(store.put([item("c", 30)]))
            await asyncio.sleep(1.0)
            assert store.waiting == 2
            if how == "cancelled":
                blocks.cancel()
            await asyncio.wait([small])
            assert now() == pytest.approx(3.0 if how == "cancelled" else 4.0)
            assert small.result() == [DONE]
            await asyncio.wait([first, blocks])
            assert blocks.cancelled() if how == "cancelled" else isinstance(blocks.exception(), StoreUnavailable)

    run_sim(play())


def test_a_call_that_is_cancelled_as_its_turn_comes_gives_the_turn_back():
    class Cancels(Scripted):
        async def put(self, asked):
            answer = await super().put(asked)
            # runs when the next in line has been told to go, and has not gone yet
            asyncio.get_running_loop().call_soon(lambda: self.next.cancel())
            return answer

    async def play():
        scripted = Cancels(1.0)
        store = limits(scripted, max_calls=1)
        async with opened(store):
            first = asyncio.ensure_future(store.put(items("a")))
            second = scripted.next = asyncio.ensure_future(store.put(items("b")))
            await asyncio.wait([first, second])
            assert second.cancelled()
            assert (store.calls, store.waiting, len(scripted.calls)) == (0, 0, 1)
            assert await store.put(items("c")) == [DONE]

    run_sim(play())


@pytest.mark.parametrize("how", ["kill", "aclose"])
def test_those_in_line_end_with_the_store(how):
    async def play():
        scripted = Scripted(2.0)
        store = limits(scripted, max_calls=1)
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "abc"]
            await turns(2)
            await (store.kill("a test") if how == "kill" else store.aclose())
            await asyncio.wait(tasks[1:])
            assert now() == pytest.approx(0.0, abs=1e-6)
            assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks[1:])
            assert await tasks[0] == [DONE]
            assert (store.calls, store.waiting, len(scripted.calls)) == (0, 0, 1)

    run_sim(play())


@given(
    calls=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=25),
    max_calls=st.integers(1, 4),
    max_nbytes=st.integers(20, 120),
    max_wait=st.integers(1, 60),
)
@case_settings(120)
def test_limits_hold_and_every_call_ends_whoever_leaves_when(calls, max_calls, max_nbytes, max_wait):
    class Timed(Scripted):
        async def put(self, asked):
            self.script = [float(asked[0].key)]
            return await super().put(asked)

    async def play():
        scripted = Timed()
        store = limits(scripted, max_calls=max_calls, max_nbytes=max_nbytes, max_wait_s=float(max_wait))
        async with opened(store):
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
            assert (store.calls, store.waiting, store._nbytes) == (0, 0, 0)

    run_sim(play())
