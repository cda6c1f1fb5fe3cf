"""Wrappers of stores: each passes the suite, and does the one thing that it is for. Faults, latency, timeout, trace."""

from __future__ import annotations

import asyncio
import gc
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item, Outcome, StoreUsage
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cache.store.wrappers import (
    Breaker,
    FaultyStore,
    Latency,
    Limits,
    Retry,
    StoreCall,
    StoreFaults,
    Timeout,
    Trace,
    Wrapper,
)
from fdasync.errors import BadInput, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing import SimLoop, StoreTests, run_sim
from fdasync.testing.stores.harness import turns, value
from tests.helpers import case_settings
from tests.store_helpers import NBYTES, Told, item, items, memory, now, opened


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


class TestPlain(WrappedSuite):
    def wrap(self, store):
        return Wrapper(store)


class TestTimeout(WrappedSuite):
    def wrap(self, store):
        return Timeout(store, call_s=1.0, gib_s=1.0)


class TestRetry(WrappedSuite):
    def wrap(self, store):
        return Retry(store, random=Random(1))


class TestLimits(WrappedSuite):
    def wrap(self, store):
        return Limits(store, max_calls=3, max_nbytes=1 << 18, max_wait_s=10.0)


class TestBreaker(WrappedSuite):
    def wrap(self, store):
        return Breaker(store)


class TestTrace(WrappedSuite):
    def wrap(self, store):
        return Trace(store, ignore)


class TestLatency(WrappedSuite):
    def wrap(self, store):
        return Latency(store, call_s=0.001, gib_s=1.0, jitter=0.5, random=Random(1))


class TestFaultsOfRateZero(WrappedSuite):
    def wrap(self, store):
        return FaultyStore(store, StoreFaults(delay_s=1.0))


class TestFaultsThatOnlyDelay(WrappedSuite):
    def wrap(self, store):
        return FaultyStore(store, StoreFaults(delay=0.5, delay_s=0.01))


class TestAllOfThem(WrappedSuite):
    def wrap(self, store):
        limited = Limits(FaultyStore(store, StoreFaults()), max_calls=4, max_nbytes=1 << 20, max_wait_s=10.0)
        retried = Retry(Timeout(limited, call_s=5.0), random=Random(1))
        return Trace(Breaker(retried), ignore)


class TestAllOfThemInRealTime(TestAllOfThem):
    examples = 5

    def new_loop(self):
        return StoreTests.new_loop(self)


WRAPS = {
    "plain": Wrapper,
    "timeout": lambda store: Timeout(store, call_s=1.0),
    "retry": lambda store: Retry(store, random=Random(1), attempts=1),
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
        told = Told()
        store = wrap(told)
        async with opened(store):
            assert await store.exists_prefix(["a", "b"]) == 2
            assert await store.put(items("a")) == [DONE]
            assert await store.get_into(items("a", "b")) == [DONE, DONE]
            assert await store.delete(["a"]) == 1
            assert await store.usage() == StoreUsage(objects=3)
            assert not await store.kill("a test")
            assert msgspec.structs.replace(store.capabilities, max_batch=256) == told.capabilities
            assert store.config is told.config
        assert told.life == ["open", "kill: a test", "aclose"]
        verbs = ["exists_prefix", "put", *["get_into"] * (len(told.calls) - 4), "delete", "usage"]
        assert [verb for verb, _ in told.calls] == verbs

    run_sim(play())


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
@pytest.mark.parametrize(
    "line", [ValueError("oops"), [], [DONE], ["done", "done"], None, 3], ids=["raises", "0", "1", "text", "none", "int"]
)
def test_what_breaks_the_contract_is_unavailable(wrap, line):
    async def play():
        store = wrap(Told(line))
        async with opened(store):
            with pytest.raises(StoreUnavailable, match="told: put broke the contract") as found:
                await store.put([item("a", 5), item("b", 5)])
            assert found.value.__cause__ is (line if isinstance(line, Exception) else None)

    run_sim(play())


def test_counts_that_cannot_be_are_unavailable():
    async def play():
        store = Wrapper(Told(3, -1, None, [1]))
        async with opened(store):
            for call in (store.exists_prefix, store.delete, store.exists_prefix, store.delete):
                with pytest.raises(StoreUnavailable, match="broke the contract: it answered"):
                    await call(["a", "b"])

    run_sim(play())


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_refusals_go_through(wrap):
    async def play():
        store = wrap(Told(StoreRejected("told", "no"), StoreUnavailable("told", "later")))
        async with opened(store):
            with pytest.raises(StoreRejected, match="no"):
                await store.put(items("a"))
            with pytest.raises(StoreUnavailable, match="later"):
                await store.exists_prefix(["a"])

    run_sim(play())


# -- timeout --------------------------------------------------------------------------------------------


def test_a_timeout_stops_the_waiting_and_hands_on_the_end():
    async def play():
        told = Told(5.0)
        store = Timeout(told, call_s=2.0)
        async with opened(store):
            with pytest.raises(StoreTimeout, match="put did not end within 2 s") as found:
                await store.put(items("a"))
            assert now() == pytest.approx(2.0)
            error = found.value
            assert isinstance(error, TimeoutError)
            assert (error.deadline_s, error.ended.done(), store.running, told.running) == (2.0, False, 1, 1)
            # others are not held up
            assert await store.exists_prefix(["a"]) == 1
            assert await error.ended == [DONE]
            assert now() == pytest.approx(5.0)
            assert store.running == 0

    run_sim(play())


def test_the_deadline_grows_with_the_bytes():
    async def play():
        store = Timeout(Told(50.0, 50.0), call_s=2.0, gib_s=float(1 << 30), close_s=100.0)
        async with opened(store):
            with pytest.raises(StoreTimeout):
                await store.get_into([item("a", 3), item("b", 4)])
            assert now() == pytest.approx(9.0)
            with pytest.raises(StoreTimeout):
                await store.delete(["a"])
            assert now() == pytest.approx(11.0)
            await store.aclose()

    run_sim(play())


@pytest.mark.parametrize("asked", [True, False])
def test_a_late_error_is_handed_on_and_asyncio_logs_nothing(asked):
    async def play():
        logged = []
        asyncio.get_running_loop().set_exception_handler(lambda *told: logged.append(told))
        late = asyncio.get_running_loop().create_future()
        store = Timeout(Told(late), call_s=1.0)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            late.set_exception(StoreUnavailable("told", "at last"))
            await asyncio.wait([found.value.ended])
            if asked:
                assert isinstance(found.value.ended.exception(), StoreUnavailable)
            del found
            await turns(3)
            gc.collect()
        assert not logged

    run_sim(play())


def test_cancelling_goes_inside_and_waits_for_the_end():
    async def play():
        told = Told(5.0)
        store = Timeout(told, call_s=2.0)
        async with opened(store):
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(1.0)
            putting.cancel()
            await asyncio.wait([putting])
            assert putting.cancelled()
            assert (now(), told.running, store.running) == (pytest.approx(1.0), 0, 0)

    run_sim(play())


def test_cancelling_what_cannot_stop_ends_at_the_deadline_with_the_parts_still_leased():
    async def play():
        stuck = asyncio.get_running_loop().create_future()
        store = Timeout(Told(stuck), call_s=2.0)
        async with opened(store):
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(1.0)
            putting.cancel()
            await asyncio.wait([putting])
            assert now() == pytest.approx(2.0)
            error = putting.exception()
            assert isinstance(error, StoreTimeout)
            assert not error.ended.done()
            stuck.set_result(None)
            await asyncio.wait([error.ended])
            assert error.ended.cancelled()

    run_sim(play())


def test_aclose_waits_then_kills_then_names_what_is_left():
    async def play():
        told = Told(3.0)
        store = Timeout(told, call_s=1.0, close_s=10.0)
        async with opened(store):
            with pytest.raises(StoreTimeout):
                await store.put(items("a"))
            await store.aclose()
            # it ended by itself
            assert now() == pytest.approx(3.0)
            assert told.life == ["open", "aclose"]
        stuck = asyncio.get_running_loop().create_future()
        told = Told(stuck)
        store = Timeout(told, call_s=1.0, close_s=10.0)
        async with opened(store):
            begun = now()
            with pytest.raises(StoreTimeout) as first:
                await store.put(items("a"))
            with pytest.raises(StoreTimeout, match="put of store told did not end within 10 s") as found:
                await store.aclose()
            # all of it under one deadline
            assert now() - begun == pytest.approx(11.0)
            assert found.value.ended is first.value.ended
            assert told.life[1].startswith("kill: put of store told did not end in 5 s")
            assert told.life[2] == "aclose"
            with pytest.raises(StoreUnavailable, match="closed"):
                await store.put(items("a"))
            stuck.set_result(None)

    run_sim(play())


def test_what_hangs_ends_by_a_kill_and_the_store_is_used_further():
    async def play():
        faults = FaultyStore(memory(), StoreFaults(hang=1.0))
        store = Timeout(faults, call_s=1.0)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            assert faults.hanging == 1
            assert await store.kill("a test")
            with pytest.raises(StoreUnavailable, match="the call was ended"):
                await found.value.ended
            assert (faults.hanging, store.running) == (0, 0)
            faults.plan = StoreFaults()
            assert await store.put(items("a")) == [DONE]
            assert await store.exists_prefix(["a"]) == 1

    run_sim(play())


def test_a_store_that_says_it_was_killed_and_goes_on_has_its_verbs_cancelled():
    class Boasts(MemoryStore):
        """As one that inherits `kill` from a store whose verbs never wait."""

        async def put(self, items):
            await asyncio.get_running_loop().create_future()

    async def play():
        store = Timeout(Boasts(MemoryConfig()), call_s=1.0, close_s=10.0)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            assert await store.kill("a test")
            assert found.value.ended.cancelled()
            assert store.running == 0

    run_sim(play())


def test_what_was_killed_while_it_was_delayed_does_not_hang_afterwards():
    async def play():
        faults = FaultyStore(memory(), StoreFaults(delay=1.0, delay_s=100.0, hang=1.0))
        store = Timeout(faults, call_s=0.1)
        async with opened(store):
            with pytest.raises(StoreTimeout) as found:
                await store.put(items("a"))
            assert await store.kill("a test")
            assert found.value.ended.done()
            assert faults.hanging == 0

    run_sim(play())


class Killable(Told):
    """Its running verbs end when it is killed, after `kill_takes_s`."""

    kill_takes_s = 0.5

    def hang(self, count=1):
        self.hung = [asyncio.get_running_loop().create_future() for _ in range(count)]
        self.script = list(self.hung)

    async def kill(self, why):
        self.life.append((now(), why))
        await asyncio.sleep(self.kill_takes_s)
        for line in self.hung:
            if not line.done():
                line.set_exception(StoreUnavailable("told", why))
        return True

    @property
    def killed(self):
        return [round(entry[0], 3) for entry in self.life if isinstance(entry, tuple)]


@pytest.mark.parametrize("verb", ["exists_prefix", "get_into", "put", "delete", "usage"])
def test_a_verb_that_grows_too_old_has_the_store_killed_once(verb):
    async def play():
        told = Killable()
        store = Timeout(told, call_s=1.0, kill_s=4.0)
        async with opened(store):
            told.hang()
            argument = {"get_into": [items("a")], "put": [items("a")], "usage": []}.get(verb, [["a"]])
            with pytest.raises(StoreTimeout) as found:
                await getattr(store, verb)(*argument)
            await asyncio.wait([found.value.ended])
            assert now() == pytest.approx(4.5)
            error = found.value.ended.exception()
            assert isinstance(error, StoreUnavailable)
            assert error.problem == f"{verb} of store told had not ended after 4 s"
            await asyncio.sleep(100.0)
            assert told.killed == [4.0]
            assert store.running == 0
            # and it is used further
            assert await store.exists_prefix(["a"]) == 1

    run_sim(play())


def test_no_verb_is_killed_before_its_deadline():
    async def play():
        told = Killable(9.0)
        store = Timeout(told, call_s=10.0, kill_s=2.0)
        async with opened(store):
            assert await store.put(items("a")) == [DONE]
            told.hang()
            with pytest.raises(StoreTimeout, match="put did not end within 10 s") as found:
                await store.put(items("a"))
            await asyncio.wait([found.value.ended])
            assert now() == pytest.approx(19.5)
            assert found.value.ended.exception().problem == "put of store told had not ended after 10 s"
            assert told.killed == [19.0]

    run_sim(play())


def test_what_ends_in_time_has_nobody_killed():
    async def play():
        told = Killable(3.9, 3.0, StoreUnavailable("told", "later"), 2.0)
        store = Timeout(told, call_s=1.0, kill_s=4.0)
        async with opened(store):
            tasks = [asyncio.ensure_future(store.put(items("a"))) for _ in range(4)]
            await asyncio.sleep(0.5)
            tasks[3].cancel()
            await asyncio.wait(tasks)
            assert store._timers.keys() <= store._running
            await asyncio.sleep(100.0)
            assert told.killed == []
            assert not store._timers
        told = Told(50.0)
        store = Timeout(told, call_s=1.0, close_s=100.0)
        async with opened(store):
            with pytest.raises(StoreTimeout):
                await store.put(items("a"))
        assert told.life == ["open", "aclose"], "without a limit it may take as long as it likes"

    run_sim(play())


def test_verbs_that_one_kill_ends_cost_no_other():
    async def play():
        logged = []
        asyncio.get_running_loop().set_exception_handler(lambda *told: logged.append(told))
        told = Killable()
        told.kill_takes_s = 0.0
        store = Timeout(told, call_s=1.0, kill_s=4.0)
        async with opened(store):
            told.hang(3)
            tasks = [asyncio.ensure_future(store.put(items(name))) for name in "ab"]
            await asyncio.sleep(1.5)
            tasks.append(asyncio.ensure_future(store.put(items("c"))))
            await asyncio.sleep(100.0)
            assert all(isinstance(task.exception(), StoreTimeout) for task in tasks)
            assert set(told.killed) == {4.0}
            assert store.running == 0
        assert not logged, "no timer is left of a verb that has ended"

    run_sim(play())


@pytest.mark.parametrize("how", ["raises", "refuses"])
def test_a_store_that_cannot_be_killed_is_asked_once_and_nothing_is_logged(how):
    class Unkillable(Told):
        async def kill(self, why):
            self.life.append(why)
            if how == "raises":
                raise OSError("no")
            return False

    async def play():
        logged = []
        asyncio.get_running_loop().set_exception_handler(lambda *told: logged.append(told))
        stuck = asyncio.get_running_loop().create_future()
        told = Unkillable(stuck)
        store = Timeout(told, call_s=1.0, kill_s=4.0)
        async with opened(store):
            with pytest.raises(StoreTimeout):
                await store.put(items("a"))
            await asyncio.sleep(100.0)
            assert told.life == ["open", "put of store told had not ended after 4 s"]
            assert store.running == 1
            stuck.set_result(None)
            await turns(3)
            gc.collect()
        assert not logged

    run_sim(play())


def test_closing_has_its_own_deadline_and_no_timer_is_left():
    async def play():
        told = Killable()
        store = Timeout(told, call_s=1.0, kill_s=4.0, close_s=20.0)
        async with opened(store):
            told.hang()
            with pytest.raises(StoreTimeout):
                await store.put(items("a"))
            await store.aclose()
            assert told.killed == [11.0]
            assert not store._timers
        told = Killable()
        store = Timeout(told, call_s=5.0, kill_s=6.0, close_s=20.0)
        async with opened(store):
            told.hang()
            begun = now()
            putting = asyncio.ensure_future(store.put(items("a")))
            await turns(3)
            # its deadline comes while the store closes
            await store.aclose()
            assert isinstance(putting.exception(), StoreTimeout)
            assert told.killed == [begun + 10.0]
            assert not store._timers

    run_sim(play())


def test_a_probe_that_hangs_is_killed_and_the_next_one_closes_the_breaker():
    async def play():
        told = Killable()
        states = []
        store = Limits(Timeout(told, call_s=1.0, kill_s=4.0), max_calls=1, max_nbytes=1 << 20, max_wait_s=1.0)
        store = Breaker(store, cooldown_s=1.0, probe_s=1.0, on_state=lambda state, _: states.append((state, now())))
        async with opened(store):
            # what hangs first takes the only place: the probe has to wait for its end
            told.hang(2)
            with pytest.raises(StoreTimeout):
                await store.exists_prefix(["a"])
            await asyncio.sleep(30.0)
            assert store.state == "closed"
            assert told.killed == [4.0]
            assert states[-1][1] < 12.0

    run_sim(play())


def test_opening_has_a_deadline():
    class NeverOpens(Told):
        async def open(self, regions):
            await asyncio.sleep(1000.0)

    async def play():
        store = Timeout(NeverOpens(), call_s=1.0, open_s=5.0)
        with pytest.raises(StoreTimeout, match="open did not end within 5 s") as found:
            await store.open([])
        assert now() == pytest.approx(5.0)
        found.value.ended.cancel()
        await store.aclose()

    run_sim(play())


def test_a_kill_or_a_close_that_hangs_has_a_deadline():
    class NeverEnds(Told):
        async def kill(self, why):
            await asyncio.sleep(100.0)
            return True

        async def aclose(self):
            await asyncio.sleep(100.0)

    async def play():
        store = Timeout(NeverEnds(), call_s=1.0, close_s=3.0)
        await store.open([])
        assert not await store.kill("a test")
        assert now() == pytest.approx(3.0)
        with pytest.raises(StoreTimeout, match="aclose did not end within 3 s"):
            await store.aclose()
        await asyncio.sleep(200.0)

    run_sim(play())


# -- trace ----------------------------------------------------------------------------------------------


def test_a_trace_tells_of_every_call():
    async def play():
        calls = []
        told = Told(
            2, 1.0, [EXISTS, DONE], [DONE, MISS, Outcome("damaged", "x")], 1, StoreUnavailable("told", "gone"), 50.0
        )
        store = Trace(told, calls.append)
        async with opened(store):
            await store.exists_prefix(["a", "b", "c"])
            await store.put(items("a", "b"))
            await store.put(items("a", "b"))
            await store.get_into(items("a", "b", "c"))
            await store.delete(["a", "b"])
            with pytest.raises(StoreUnavailable):
                await store.get_into(items("a"))
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(0.5)
            putting.cancel()
            await asyncio.wait([putting])
            await store.usage()

        def call(verb, count, nbytes=0, done=0, seconds=0.0, outcomes=None, error=""):
            return StoreCall(
                store="told",
                verb=verb,
                items=count,
                nbytes=nbytes,
                done_nbytes=done,
                seconds=pytest.approx(seconds, abs=1e-6),
                outcomes=outcomes or {},
                error=error,
            )

        assert calls == [
            call("exists_prefix", 3, outcomes={"exists": 2, "miss": 1}),
            call("put", 2, 2 * NBYTES, 2 * NBYTES, 1.0, {"done": 2}),
            call("put", 2, 2 * NBYTES, NBYTES, 0.0, {"exists": 1, "done": 1}),
            call("get_into", 3, 3 * NBYTES, NBYTES, 0.0, {"done": 1, "miss": 1, "damaged": 1}),
            call("delete", 2, outcomes={"done": 1, "miss": 1}),
            call("get_into", 1, NBYTES, error="StoreUnavailable: store told: gone"),
            call("put", 1, NBYTES, seconds=0.5, error="CancelledError"),
            call("usage", 0),
        ]

    run_sim(play())


# -- latency --------------------------------------------------------------------------------------------


def test_latency_is_by_the_call_and_by_its_bytes():
    async def play():
        store = Latency(Told(), call_s=1.0, gib_s=float(1 << 30))
        async with opened(store):
            await store.exists_prefix(["a"])
            assert now() == pytest.approx(1.0)
            await store.put([item("a", 4)])
            assert now() == pytest.approx(6.0)

    run_sim(play())


def test_jitter_is_drawn_within_its_share():
    async def times(seed):
        told = Told()
        store = Latency(told, call_s=1.0, jitter=0.25, random=Random(seed))
        async with opened(store):
            for _ in range(50):
                await store.exists_prefix(["a"])
        return [later - sooner for sooner, later in zip(told.times, told.times[1:], strict=False)]

    first = run_sim(times(1))
    assert first == run_sim(times(1))
    assert first != run_sim(times(2))
    assert 0.75 <= min(first) < 0.85
    assert 1.15 < max(first) <= 1.25


@pytest.mark.parametrize("how", ["kill", "aclose", "cancel"])
def test_what_waits_for_its_delay_never_begins_once_it_is_ended(how):
    async def play():
        told = Told()
        store = Latency(told, call_s=10.0)
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
        assert told.calls == []

    run_sim(play())


# -- faults ---------------------------------------------------------------------------------------------


def faulty(**plan):
    return FaultyStore(memory(), StoreFaults(**plan))


def test_a_fault_that_never_struck_fails_the_test_that_asks():
    async def play():
        store = faulty(fail_call=1e-9, drop_put=1.0)
        async with opened(store):
            await store.put(items("a", "b"))
            store.plan = StoreFaults(flip_bit=1.0)
            store.assert_struck("drop_put")
            told = r"faults of store memory never struck: fail_call, flip_bit \(struck: drop_put 2; calls: put 1\)"
            with pytest.raises(AssertionError, match=told):
                store.assert_struck()
            with pytest.raises(AssertionError, match="never struck: hang"):
                store.assert_struck("hang")
        nothing = faulty()
        with pytest.raises(AssertionError, match="no fault of store memory was planned"):
            nothing.assert_struck()
        # whatever was planned before is asked for, too
        sure = faulty(fail_call=1.0)
        async with opened(sure):
            with pytest.raises(StoreUnavailable):
                await sure.put(items("a"))
            sure.plan = StoreFaults()
            sure.assert_struck()

    run_sim(play())


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"flip_bit": 1.5}, "StoreFaults.flip_bit: 1.5 is no rate"),
        ({"hang": -0.1}, "StoreFaults.hang: -0.1 is no rate"),
        ({"delay": 0.5}, "StoreFaults.delay: a delay of 0 s delays nothing; set delay_s"),
        ({"delay": 0.5, "delay_s": -1.0}, "StoreFaults.delay_s: -1.0 is no number of seconds"),
        ({"delay_s": float("nan")}, "StoreFaults.delay_s: nan is no number"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(plan, problem):
    with pytest.raises(BadInput, match=problem):
        StoreFaults(**plan)


def test_a_fault_that_does_not_exist_is_not_asked_for():
    with pytest.raises(BadInput, match=r"no fault 'flip'; faults: fail_call, .*flip_bit"):
        faulty().assert_struck("flip")


def test_a_plan_set_anew_is_drawn_from_its_own_seed():
    async def struck(before):
        store = faulty(fail_item=0.5, seed=before)
        async with opened(store):
            await store.put(items(*map(str, range(before))))
            store.plan = StoreFaults(fail_item=0.5, seed=7)
            return [outcome.status for outcome in await store.put(items(*map(str, range(100, 140))))]

    assert run_sim(struck(3)) == run_sim(struck(5))


def test_bytes_that_nobody_reads_are_not_spoiled():
    # as a sealed block lies: a header of a page, a section that fills a quarter of one, padding
    read_nbytes, nbytes = PAGE_NBYTES + 1024, 2 * PAGE_NBYTES
    parts = (Part(0, 0, PAGE_NBYTES), Part(0, PAGE_NBYTES, 1024), Part(0, read_nbytes, PAGE_NBYTES - 1024))

    async def play():
        store, region = faulty(), SharedRegion.create("spoiled", nbytes)
        await store.open([region])
        ones = b"\1" * nbytes
        region.view()[:] = ones
        await store.put([Item("a", parts)])
        for fault in ("flip_bit", "truncate"):
            for seed in range(40):
                store.plan = StoreFaults(seed=seed, **{fault: 1.0})
                await store.get_into([Item("a", parts)])
                assert region.view(0, read_nbytes) != ones[:read_nbytes]
                assert region.view(read_nbytes) == ones[read_nbytes:]
        assert store.counts == {"flip_bit": 40, "truncate": 40}
        # zeros instead of zeros are no fault
        region.view()[:] = bytes(nbytes)
        await store.put([Item("b", parts)])
        await store.get_into([Item("b", parts)])
        assert store.counts["truncate"] == 40
        await store.aclose()
        region.close()

    run_sim(play())


def test_a_failed_call_did_nothing_and_a_lost_answer_did():
    async def play():
        store = faulty(fail_call=1.0)
        async with opened(store):
            with pytest.raises(StoreUnavailable, match="the call failed"):
                await store.put(items("a"))
            store.plan = StoreFaults(lose_answer=1.0)
            with pytest.raises(StoreUnavailable, match="the answer was lost"):
                await store.put(items("b"))
            store.plan = StoreFaults()
            assert [await store.exists_prefix([key]) for key in "ab"] == [0, 1]
            assert store.counts == {"fail_call": 1, "lose_answer": 1}

    run_sim(play())


def test_failed_items_and_dropped_puts():
    async def play():
        store = faulty(fail_item=0.5, seed=3)
        async with opened(store):
            names = [str(number) for number in range(20)]
            outcomes = await store.put(items(*names))
            failed = [one.status == "failed" for one in outcomes]
            assert 0 < sum(failed) < 20
            assert all(one.transient and one.problem for one in outcomes if one.status == "failed")
            store.plan = StoreFaults()
            assert [not await store.exists_prefix([name]) for name in names] == failed
            store.plan = StoreFaults(drop_put=1.0)
            assert await store.put(items("dropped")) == [DONE]
            assert await store.exists_prefix(["dropped"]) == 0

    run_sim(play())


def test_truncated_reads_and_flipped_bits_are_done_and_wrong():
    async def play():
        store = faulty()
        async with opened(store) as region:
            data = value("data", 3 * NBYTES)
            parts = msgspec.structs.replace(item("a"), parts=sum((one.parts for one in items(1, 2, 3)), ()))
            region.view(0, len(data))[:] = data
            await store.put([parts])
            for seed in range(20):
                store._random = Random(seed)
                store.plan = StoreFaults(flip_bit=1.0)
                assert await store.get_into([parts]) == [DONE]
                found = bytes(region.view(0, len(data)))
                wrong = [one ^ other for one, other in zip(data, found, strict=True) if one != other]
                assert len(wrong) == 1
                assert wrong[0].bit_count() == 1
                store.plan = StoreFaults(truncate=1.0)
                assert await store.get_into([parts]) == [DONE]
                found = bytes(region.view(0, len(data)))
                kept = len(found.rstrip(b"\0"))
                assert kept < len(data)
                assert found[:kept] == data[:kept]
            assert set(bytes(region.view(len(data), 5000))) == {0}

    run_sim(play())


def test_delays_are_up_to_their_length():
    async def play():
        store = faulty(delay=1.0, delay_s=10.0)
        async with opened(store):
            spent = []
            for _ in range(50):
                begun = now()
                await store.exists_prefix(["a"])
                spent.append(now() - begun)
            assert 0 <= min(spent) < 1.5
            assert 8.5 < max(spent) <= 10.0

    run_sim(play())


@pytest.mark.parametrize("how", ["kill", "aclose"])
def test_what_hangs_ends_by_kill_or_aclose_and_not_by_cancelling(how):
    async def play():
        store = faulty(hang=1.0)
        async with opened(store):
            calls = [store.put(items("a")), store.exists_prefix(["a"]), store.delete(["a"]), store.usage()]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(1000.0)
            tasks[0].cancel()
            await asyncio.sleep(1000.0)
            assert not any(task.done() for task in tasks)
            assert store.hanging == 4
            if how == "kill":
                assert await store.kill("a test")
            else:
                await store.aclose()
            await asyncio.wait(tasks)
            assert tasks[0].cancelled()
            assert all(isinstance(task.exception(), StoreUnavailable) for task in tasks[1:])
            assert store.hanging == 0

    run_sim(play())


EVERY_RATE = ("fail_call", "lose_answer", "fail_item", "drop_put", "truncate", "flip_bit")


@given(
    rates=st.fixed_dictionaries({name: st.sampled_from([0.0, 0.3, 1.0]) for name in EVERY_RATE}),
    order=st.permutations(range(6)),
    seed=st.integers(0, 1000),
)
@case_settings(40)
def test_faults_by_key_do_not_depend_on_order(rates, order, seed):
    async def play(places):
        store = faulty(by="key", seed=seed, **rates)
        found = {}
        async with opened(store) as region:
            for place in places:
                one = item(place, 64, 64 * place)
                region.view(64 * place, 64)[:] = value(place, 64)
                for verb in (store.put, store.get_into):
                    try:
                        (outcome,) = await verb([one])
                        read = bytes(region.view(64 * place, 64)) if outcome.status == "done" else b""
                        found[place, verb.__name__] = (outcome.status, read)
                    except StoreUnavailable as error:
                        found[place, verb.__name__] = error.problem
            return found, store.counts

    assert run_sim(play(order)) == run_sim(play(range(6)))


def test_faults_are_those_of_their_seed():
    async def play(seed):
        store = faulty(seed=seed, fail_item=0.2, drop_put=0.2)
        async with opened(store):
            outcomes = await store.put(items(*range(60)))
            return [one.status for one in outcomes], await store.usage()

    assert run_sim(play(1)) == run_sim(play(1))
    assert run_sim(play(1)) != run_sim(play(2))
