"""Wrappers that decide when a store is asked: retry, limits, breaker; and all of them around a store full of faults."""

from __future__ import annotations

import asyncio
import gc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item, Outcome
from fdasync.cache.store.wrappers import Breaker, FaultyStore, Limits, Retry, StoreFaults, Timeout, Trace
from fdasync.errors import StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.shared_memory import Part
from fdasync.testing import run_sim
from fdasync.testing.stores.harness import turns, value
from tests.helpers import case_settings
from tests.store_helpers import NBYTES, Told, item, items, memory, now, opened

LATER = StoreUnavailable("told", "later")
FAILED = Outcome("failed", "busy", transient=True)
BROKEN = Outcome("failed", "for ever")


def never_ends():
    return asyncio.get_running_loop().create_future()


# -- retry ----------------------------------------------------------------------------------------------


def retry(told, **options):
    return Retry(told, random=Random(1), **{"attempts": 3, "first_s": 1.0, "max_s": 60.0, **options})


def test_what_fails_for_now_is_tried_again():
    async def play():
        told = Told(LATER, LATER, 1)
        store = retry(told)
        async with opened(store):
            assert await store.exists_prefix(["a", "b"]) == 1
            assert len(told.calls) == 3
            waits = [later - sooner for sooner, later in zip(told.times, told.times[1:], strict=False)]
            assert 0.5 <= waits[0] <= 1.0
            assert 1.0 <= waits[1] <= 2.0
            told.script = [LATER] * 3
            with pytest.raises(StoreUnavailable, match="later"):
                await store.delete(["a"])
            assert len(told.calls) == 6
            told.script = [LATER] * 3
            with pytest.raises(StoreUnavailable, match="later"):
                await store.put(items("a"))
            assert len(told.calls) == 9

    run_sim(play())


def test_backoff_doubles_up_to_its_limit():
    async def play():
        told = Told(*[LATER] * 9)
        store = retry(told, attempts=10, max_s=4.0)
        async with opened(store):
            await store.exists_prefix(["a"])
        waits = [later - sooner for sooner, later in zip(told.times, told.times[1:], strict=False)]
        for wait, most in zip(waits, [1, 2, 4, 4, 4, 4, 4, 4, 4], strict=True):
            assert most / 2 <= wait <= most

    run_sim(play())


@pytest.mark.parametrize("error", [StoreRejected("told", "never"), "timeout"])
def test_what_will_never_work_or_is_under_way_is_not_tried_again(error):
    async def play():
        raised = StoreTimeout("told", "put", 1.0, never_ends()) if error == "timeout" else error
        told = Told(raised, raised, raised, raised)
        store = retry(told)
        async with opened(store):
            for count, call in enumerate([store.exists_prefix(["a"]), store.put(items("a"))], start=1):
                with pytest.raises(type(raised)) as found:
                    await call
                assert found.value is raised
                assert len(told.calls) == count

    run_sim(play())


def test_only_the_items_that_failed_are_asked_for_again():
    async def play():
        told = Told([DONE, FAILED, EXISTS, FAILED, BROKEN], [FAILED, DONE], [EXISTS])
        store = retry(told)
        async with opened(store):
            assert await store.put(items(*"abcde")) == [DONE, EXISTS, EXISTS, DONE, BROKEN]
            assert [[one.key for one in asked] for _, asked in told.calls] == [list("abcde"), ["b", "d"], ["b"]]
            # in the end what failed is told as it is
            told.script = [[FAILED, MISS], [FAILED], [FAILED]]
            assert await store.get_into(items("a", "b")) == [FAILED, MISS]
            # the others keep their outcome when the whole call fails later
            told.script = [[FAILED, DONE], LATER, LATER]
            first, second = await store.get_into(items("a", "b"))
            assert (first.status, first.transient, first.problem, second) == ("failed", True, "later", DONE)
            told.script = [LATER, [FAILED, DONE], [MISS]]
            assert await store.get_into(items("a", "b")) == [MISS, DONE]
            assert await store.put([]) == []

    run_sim(play())


@pytest.mark.parametrize("how", ["kill", "aclose", "cancel"])
@pytest.mark.parametrize("line", [LATER, [FAILED]], ids=["call", "item"])
def test_what_waits_to_try_again_never_does_once_it_is_ended(how, line):
    async def play():
        told = Told(line, line)
        store = retry(told, first_s=100.0, max_s=100.0)
        async with opened(store):
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(1.0)
            if how == "cancel":
                putting.cancel()
            else:
                await (store.kill("a test") if how == "kill" else store.aclose())
            await asyncio.wait([putting])
            assert now() == pytest.approx(1.0)
            assert putting.cancelled() if how == "cancel" else isinstance(putting.exception(), StoreUnavailable)
            assert len(told.calls) == 1

    run_sim(play())


def test_a_call_that_a_kill_ended_inside_is_not_begun_again():
    class Killed(Told):
        async def kill(self, why):
            self.ended.set_exception(StoreUnavailable("told", why))
            return True

    async def play():
        told = Killed()
        told.ended = never_ends()
        told.script = [told.ended]
        store = retry(told)
        async with opened(store):
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(1.0)
            assert await store.kill("a test")
            with pytest.raises(StoreUnavailable, match="a test"):
                await putting
            assert len(told.calls) == 1

    run_sim(play())


# -- limits ---------------------------------------------------------------------------------------------


def limits(told, **options):
    return Limits(told, **{"max_calls": 2, "max_nbytes": 10 * NBYTES, "max_wait_s": 1000.0, **options})


def test_calls_wait_in_line_first_come_first_served():
    async def play():
        told = Told(*[1.0] * 7)
        store = limits(told)
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "abcdefg"]
            await turns(3)
            assert (store.calls, store.waiting) == (2, 5)
            await asyncio.wait(tasks)
            assert [asked[0].key for _, asked in told.calls] == list("abcdefg")
            assert told.times == [pytest.approx(number // 2, abs=1e-3) for number in range(7)]
            assert told.most_running == 2
            assert (store.calls, store.waiting) == (0, 0)

    run_sim(play())


def test_bytes_in_flight_are_limited_and_nobody_overtakes():
    async def play():
        told = Told(*[1.0] * 4)
        store = limits(told, max_calls=9, max_nbytes=100)
        async with opened(store):
            sizes = [60, 60, 30, 10]
            await asyncio.gather(*[store.put([item(place, size)]) for place, size in enumerate(sizes)])
            # the third would have fitted beside the first, and waits behind the second
            assert [asked[0].nbytes for _, asked in told.calls] == sizes
            assert told.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 1, 1)]
            assert told.most_nbytes == 100

    run_sim(play())


def test_what_is_larger_than_the_limit_runs_alone():
    async def play():
        told = Told(*[1.0] * 3)
        store = limits(told, max_nbytes=100)
        async with opened(store):
            await asyncio.gather(*[store.get_into([item(size, size)]) for size in (10, 500, 20)])
            assert told.times == [pytest.approx(at, abs=1e-3) for at in (0, 1, 2)]
            assert told.most_running == 1

    run_sim(play())


def test_large_batches_are_cut_and_put_together_again():
    async def play():
        told = Told(max_batch=4)
        store = limits(told, max_nbytes=3 * NBYTES)
        async with opened(store):
            names = [str(number) for number in range(10)]
            told.script = [[DONE, MISS, DONE], [MISS, MISS, MISS], [DONE, DONE, DONE], [EXISTS]]
            found = await store.get_into(items(*names))
            assert found == [DONE, MISS, DONE, MISS, MISS, MISS, DONE, DONE, DONE, EXISTS]
            assert [[one.key for one in asked] for _, asked in told.calls] == [
                names[:3], names[3:6], names[6:9], names[9:],
            ]  # fmt: skip
            told.calls.clear()
            told.script = [4, 4, 1]
            assert await store.exists_prefix(names) == 9
            assert [len(asked) for _, asked in told.calls] == [4, 4, 2]
            told.calls.clear()
            told.script = [4, 2]
            assert await store.exists_prefix(names) == 6
            assert len(told.calls) == 2
            told.script = [1, 2, 0]
            assert await store.delete(names) == 3
            assert store.capabilities.max_batch > 10_000
            with pytest.raises(StoreRejected, match="items in one call"):
                await store.exists_prefix(["a"] * (store.capabilities.max_batch + 1))

    run_sim(play())


def test_a_run_that_fails_leaves_the_outcomes_of_those_before_it():
    async def play():
        told = Told([DONE, DONE], LATER, max_batch=2)
        store = limits(told)
        async with opened(store):
            outcomes = await store.put(items(*"abcde"))
            assert [(one.status, one.transient, one.problem) for one in outcomes] == [
                ("done", False, ""), ("done", False, ""), *[("failed", True, "later")] * 3,
            ]  # fmt: skip
            assert len(told.calls) == 2
            told.script = [LATER]
            with pytest.raises(StoreUnavailable, match="later"):
                await store.put(items(*"abcde"))
            ended = never_ends()
            told.script = [[DONE, DONE], StoreTimeout("told", "put", 1.0, ended)]
            with pytest.raises(StoreTimeout):
                await store.put(items(*"abcde"))
            ended.cancel()

    run_sim(play())


def test_a_call_that_timed_out_keeps_its_place_until_its_end():
    async def play():
        stuck = never_ends()
        told = Told(stuck)
        store = limits(Timeout(told, call_s=1.0), max_calls=1)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            assert store.calls == 1
            waiting = asyncio.ensure_future(store.put(items("b")))
            await asyncio.sleep(100.0)
            assert (store.waiting, len(told.calls)) == (1, 1)
            stuck.set_result(None)
            assert await waiting == [DONE]
            assert found.value.ended.done()
            assert store.calls == 0

    run_sim(play())


def test_waiting_in_line_has_a_deadline():
    async def play():
        told = Told(10.0, 10.0)
        store = limits(told, max_calls=1, max_wait_s=3.0)
        async with opened(store):
            first = asyncio.ensure_future(store.put(items("a")))
            await turns(2)
            with pytest.raises(StoreBusy, match="did not end within 3 s"):
                await store.put(items("b"))
            assert now() == pytest.approx(3.0)
            assert await first == [DONE]
            assert (store.calls, store.waiting, len(told.calls)) == (0, 0, 1)

    run_sim(play())


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_whoever_leaves_the_line_makes_way_for_those_behind(how):
    async def play():
        told = Told(10.0, 1.0)
        store = limits(told, max_calls=9, max_nbytes=100, max_wait_s=3.0)
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


def test_whoever_is_cancelled_as_its_turn_comes_gives_it_back():
    class Cancels(Told):
        async def put(self, asked):
            answer = await super().put(asked)
            # runs when the next in line has been told to go, and has not gone yet
            asyncio.get_running_loop().call_soon(lambda: self.next.cancel())
            return answer

    async def play():
        told = Cancels(1.0)
        store = limits(told, max_calls=1)
        async with opened(store):
            first = asyncio.ensure_future(store.put(items("a")))
            second = told.next = asyncio.ensure_future(store.put(items("b")))
            await asyncio.wait([first, second])
            assert second.cancelled()
            assert (store.calls, store.waiting, len(told.calls)) == (0, 0, 1)
            assert await store.put(items("c")) == [DONE]

    run_sim(play())


@pytest.mark.parametrize("how", ["kill", "aclose"])
def test_those_in_line_end_with_the_store(how):
    async def play():
        told = Told(2.0)
        store = limits(told, max_calls=1)
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "abc"]
            await turns(2)
            await (store.kill("a test") if how == "kill" else store.aclose())
            await asyncio.wait(tasks[1:])
            assert now() == pytest.approx(0.0, abs=1e-6)
            assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks[1:])
            assert await tasks[0] == [DONE]
            assert (store.calls, store.waiting, len(told.calls)) == (0, 0, 1)

    run_sim(play())


@given(
    calls=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=25),
    max_calls=st.integers(1, 4),
    max_nbytes=st.integers(20, 120),
    max_wait=st.integers(1, 60),
)
@case_settings(120)
def test_limits_hold_and_every_call_ends_whoever_leaves_when(calls, max_calls, max_nbytes, max_wait):
    class Timed(Told):
        async def put(self, asked):
            self.script = [float(asked[0].key)]
            return await super().put(asked)

    async def play():
        told = Timed()
        store = limits(told, max_calls=max_calls, max_nbytes=max_nbytes, max_wait_s=float(max_wait))
        async with opened(store):
            tasks = []
            for nbytes, takes, leaves_after in calls:
                tasks.append(asyncio.ensure_future(store.put([item(takes, nbytes)])))
                if leaves_after < 20:
                    asyncio.get_running_loop().call_later(leaves_after / 3, tasks[-1].cancel)
            await asyncio.wait(tasks)
            for task in tasks:
                assert task.cancelled() or isinstance(task.exception(), StoreUnavailable) or task.result() == [DONE]
            assert told.most_running <= max_calls
            assert told.most_nbytes <= max(max_nbytes, max(nbytes for nbytes, *_ in calls))
            assert (store.calls, store.waiting, store._nbytes) == (0, 0, 0)

    run_sim(play())


# -- breaker --------------------------------------------------------------------------------------------


class Watched(Breaker):
    """Notes its states and when they came."""

    def __init__(self, inner, **options):
        self.states = []
        defaults = {"failures": 3, "cooldown_s": 2.0, "max_cooldown_s": 10.0, "probe_s": 5.0}
        super().__init__(inner, on_state=self._note, **{**defaults, **options})

    def _note(self, state, why):
        assert why
        self.states.append((state, round(now(), 3)))

    async def refuses(self):
        calls = len(self.inner.calls) if isinstance(self.inner, Told) else None
        begun = now()
        with pytest.raises(StoreUnavailable, match="not asked for now"):
            await self.put(items("a"))
        assert now() == begun
        assert calls is None or len(self.inner.calls) == calls


def test_failures_in_a_row_open_it_and_a_probe_closes_it():
    async def play():
        told = Told(LATER, LATER, [DONE], LATER, [FAILED, FAILED], LATER)
        store = Watched(told)
        async with opened(store):
            for verb in ("put", "put", None, "put", "both", "put"):
                assert store.state == "closed"
                if verb == "put":
                    with pytest.raises(StoreUnavailable, match="later"):
                        await store.put(items("a"))
                else:
                    await store.get_into(items("a", "b") if verb else items("a"))
            assert store.state == "open"
            await store.refuses()
            await asyncio.sleep(1.9)
            await store.refuses()
            assert store.refused == 2
            await asyncio.sleep(0.2)
            assert store.state == "closed"
            assert store.states == [("open", 0.0), ("half_open", 2.0), ("closed", 2.0)]
            assert told.calls[-1] == ("exists_prefix", ["fdasync-probe"])
            assert await store.put(items("a")) == [DONE]

    run_sim(play())


def test_a_timeout_opens_it_at_once_and_closing_begins_the_count_anew():
    async def play():
        told = Told(2.0)
        store = Watched(Timeout(told, call_s=1.0), failures=2)
        async with opened(store):
            with pytest.raises(StoreTimeout):
                await store.put(items("a"))
            assert store.states == [("open", 1.0)]
            await asyncio.sleep(5.0)
            told.script = [LATER, LATER]
            for state in ("closed", "open"):
                with pytest.raises(StoreUnavailable):
                    await store.put(items("a"))
                assert store.state == state
            await asyncio.sleep(5.0)
            assert store.state == "closed"
            told.script = [LATER]
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            assert store.state == "closed", "what failed before it was open counts no more"

    run_sim(play())


def test_what_says_nothing_against_the_store_does_not_count():
    async def play():
        lines = [StoreRejected("told", "no"), [FAILED, DONE], [MISS], [BROKEN], [Outcome("full", "x")], []]
        told = Told(LATER, LATER, *lines[1:2], LATER, LATER, *lines[2:3], LATER, LATER, *lines[:1], *lines[3:])
        store = Watched(told)
        async with opened(store):
            for _ in range(len(told.script)):
                count = len(told.script[0]) if isinstance(told.script[0], list) else 1
                try:
                    await store.put(items(*"ab"[:count]))
                except (StoreUnavailable, StoreRejected):
                    continue
            assert store.state == "closed"
            assert (store.states, told.script) == ([], [])

    run_sim(play())


def test_who_waits_too_long_in_line_says_nothing_against_the_store():
    async def play():
        # one long call at a time, all within their own deadline, and more of them than get their turn
        told = Told(*[8.0] * 50)
        store = Watched(Limits(Timeout(told, call_s=10.0), max_calls=1, max_nbytes=1 << 20, max_wait_s=3.0))
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items("a"))) for _ in range(8)]
            await asyncio.wait(tasks)
            errors = [task.exception() for task in tasks]
            assert [type(error) for error in errors] == [type(None), *[StoreBusy] * 7]
            assert (store.state, store.states, store.refused) == ("closed", [], 0)
            # nor for it: what failed before still counts
            for _ in range(2):
                told.script.insert(0, LATER)
                with pytest.raises(StoreUnavailable, match="later"):
                    await store.put(items("a"))
            tasks = [asyncio.ensure_future(store.put(items("a"))) for _ in range(2)]
            await asyncio.wait([tasks[1]])
            assert isinstance(tasks[1].exception(), StoreBusy)
            assert store.state == "closed"
            told.script.insert(0, LATER)
            tasks[0].cancel()
            await asyncio.wait(tasks)
            with pytest.raises(StoreUnavailable, match="later"):
                await store.put(items("a"))
            assert store.state == "open"

    run_sim(play())


def test_one_timeout_opens_it_and_late_calls_are_counted():
    async def play():
        fails = never_ends()
        told = Told(20.0, 30.0, fails)
        store = Watched(Timeout(told, call_s=1.0))
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "abc"]
            await asyncio.wait(tasks)
            assert [type(task.exception()) for task in tasks] == [StoreTimeout] * 3
            assert store.states == [("open", 1.0)]
            await store.refuses()
            await asyncio.sleep(5.0)
            assert (store.state, store.late) == ("closed", 0)
            await asyncio.sleep(17.0)
            assert (store.state, store.late) == ("closed", 1)
            # one that was ended, by a kill for one, never answered
            fails.set_exception(LATER)
            await asyncio.sleep(10.0)
            assert (store.state, store.late) == ("closed", 2)

    run_sim(play())


def test_cooldowns_double_up_to_their_limit():
    async def play():
        told = Told(*[LATER] * 8)
        store = Watched(told, failures=1)
        async with opened(store):
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            await asyncio.sleep(100.0)
            probes = [at for state, at in store.states if state == "half_open"]
            assert probes == [2, 6, 14, 24, 34, 44, 54, 64]
            assert store.states[-1] == ("closed", 64)
            # the next time it begins anew
            told.script = [LATER, LATER]
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            await asyncio.sleep(10.0)
            assert [state for state, at in store.states if at >= 100] == [
                "open", "half_open", "open", "half_open", "closed",
            ]  # fmt: skip

    run_sim(play())


@pytest.mark.parametrize("timeout", [False, True])
def test_there_is_one_probe_at_a_time_and_its_end_brings_the_next(timeout):
    async def play():
        stuck = never_ends()
        told = Told(LATER, stuck)
        store = Watched(Timeout(told, call_s=3.0) if timeout else told, failures=1)
        async with opened(store):
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            await asyncio.sleep(499.5)
            assert len(told.calls) == 2, "a store that hangs is not asked again and again"
            assert store.state == "open"
            assert store.states[-1] == ("open", 5.0 if timeout else 7.0)
            stuck.set_result(1)
            await asyncio.sleep(0.1)
            assert len(told.calls) == 3
            assert store.state == "closed"
            assert store.states[-2:] == [("half_open", 499.5), ("closed", 499.5)]

    run_sim(play())


def test_a_probe_that_hung_and_failed_costs_another_cooldown():
    async def play():
        stuck = never_ends()
        told = Told(LATER, stuck)
        store = Watched(told, failures=1)
        async with opened(store):
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            await asyncio.sleep(99.0)
            stuck.set_exception(LATER)
            await asyncio.sleep(0.1)
            assert store.state == "open"
            await asyncio.sleep(4.0)
            assert store.states[-1] == ("closed", 103.0)

    run_sim(play())


def test_what_began_before_it_opened_says_nothing_of_what_came_after():
    async def play():
        told = Told(LATER, never_ends(), 50.0)
        store = Watched(Timeout(told, call_s=30.0), failures=1)
        async with opened(store):
            old = told.script[1]
            first = asyncio.ensure_future(store.put(items("a")))
            second = asyncio.ensure_future(store.put(items("b")))
            await asyncio.wait([first])
            assert first.exception() is not None
            told.script.clear()
            await asyncio.sleep(5.0)
            assert store.state == "closed"
            await asyncio.wait([second])
            assert isinstance(second.exception(), StoreTimeout)
            assert now() == pytest.approx(30.0)
            assert store.state == "closed"
            old.set_result([DONE])
            await second.exception().ended
            await turns(2)
            assert store.late == 1

    run_sim(play())


@pytest.mark.parametrize("how", ["kill", "no kill"])
@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.5, 6.0, 9.0, 30.0])
def test_aclose_ends_the_probe_whatever_it_does(after_s, how):
    async def play():
        faults = FaultyStore(memory(), StoreFaults(fail_call=1.0))
        store = Watched(faults, failures=1, max_cooldown_s=4.0)
        async with opened(store):
            with pytest.raises(StoreUnavailable):
                await store.put(items("a"))
            # the first probe, at 2 s, hangs
            faults.plan = StoreFaults(hang=1.0)
            logged = []
            asyncio.get_running_loop().set_exception_handler(lambda *told: logged.append(told))
            await asyncio.sleep(after_s)
            # what the probe ends by must not be an error that nobody asks for
            if how == "kill":
                await store.kill("a test")
                await turns(5)
            begun = now()
            await store.aclose()
            assert now() == begun
            assert faults.hanging == 0
            await store.aclose()
            assert store.states[-1][1] <= begun
            store._probing = None
            gc.collect()
            assert not logged

    run_sim(play())


# -- all of them ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30), hang=st.sampled_from([0.0, 0.02]))
@case_settings(60)
def test_around_a_store_full_of_faults_every_call_ends_and_what_is_read_is_right(seed, hang):
    async def play():
        random = Random(seed)
        calls = []
        plan = StoreFaults(
            seed=seed, fail_call=0.1, lose_answer=0.1, fail_item=0.1, drop_put=0.1, delay=0.3, delay_s=3.0, hang=hang
        )
        faults = FaultyStore(memory(), plan)
        inner = Timeout(Limits(faults, max_calls=3, max_nbytes=5 * NBYTES, max_wait_s=2.0), call_s=2.0, close_s=4.0)
        breaker = Watched(Retry(inner, random=random, first_s=0.1))
        store = Trace(breaker, calls.append)
        leased = set()

        async def one(region, place):
            """A call on a part of its own, which is not used again before the call has really ended."""
            key = str(random.randrange(8))
            mine = Item(key, (Part(0, place * 500, 500),))
            try:
                if random.random() < 0.5:
                    region.map[place * 500 : place * 500 + 500] = value(key, 500)
                    await store.put([mine])
                    region.map[place * 500 : place * 500 + 500] = bytes(500)
                else:
                    region.map[place * 500 : place * 500 + 500] = bytes(500)
                    (outcome,) = await store.get_into([mine])
                    found = region.map[place * 500 : place * 500 + 500]
                    assert outcome.status != "done" or found == value(key, 500)
            except StoreTimeout as error:
                leased.add(place)
                error.ended.add_done_callback(lambda _: leased.discard(place))
            except StoreUnavailable:
                return

        async with opened(store) as region:
            begun = now()
            for _ in range(30):
                free = [place for place in range(20) if place not in leased]
                await asyncio.gather(*[one(region, place) for place in free[:5]])
                assert now() - begun < 3 * 2.0 + 1.0, "a call ended later than its bound"
                if len(leased) >= 3:
                    assert await store.kill("it hangs")
                    await turns(5)
                await asyncio.sleep(1.0)
                begun = now()
            faults.plan = StoreFaults()
            await store.kill("the end of the faults")
            await asyncio.sleep(60.0)
            assert breaker.state == "closed"
            mine = item("last", 500)
            assert (await store.put([mine])) == [DONE]
            assert (await store.get_into([mine])) == [DONE]
            await turns(3)
            assert not leased
            assert faults.hanging == 0
        assert len(calls) > 60

    run_sim(play())
