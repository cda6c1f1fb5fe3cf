"""The deadlines of the guard: late calls, kills of what takes too long, late ends, closing."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fdasync.cache.store.base import DONE
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import StoreTimeout, StoreUnavailable
from fdasync.testing.harness.bounded import turns
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.cache.store.guard.scripted_store import (
    LATER,
    Guarded,
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

# -- timeout --------------------------------------------------------------------------------------------


@simulated
async def test_a_timeout_stops_the_waiting_and_hands_on_the_end():
    async with guarded(Scripted(5.0), call_s=2.0) as (store, scripted):
        with pytest.raises(StoreTimeout, match="put did not end within 2 s") as found:
            await store.put(items("a"))
        assert now() == pytest.approx(2.0)
        error = found.value
        assert isinstance(error, TimeoutError)
        assert (error.deadline_s, error.ended.done(), len(store._running), scripted.running) == (2.0, False, 1, 1)
        # others are not held up for longer than the breaker takes to look
        await asyncio.sleep(0.01)
        assert await store.exists_prefix(["a"]) == 1
        assert await error.ended == [DONE]
        assert now() == pytest.approx(5.0)
        assert len(store._running) == 0


@pytest.mark.ci
@pytest.mark.parametrize("asked", [True, False])
@simulated
async def test_a_late_error_is_handed_on_and_asyncio_logs_nothing(asked):
    contexts = logged()
    late = never_ends()
    async with guarded(Scripted(late), call_s=1.0) as (store, _):
        with pytest.raises(StoreTimeout) as found:
            await store.put(items("a"))
        late.set_exception(StoreUnavailable("scripted", "at last"))
        await asyncio.wait([found.value.ended])
        if asked:
            assert isinstance(found.value.ended.exception(), StoreUnavailable)
        del found
        await turns(3)
        gc.collect()
    assert not contexts


@simulated
async def test_cancelling_goes_inside_and_waits_for_the_end():
    async with guarded(Scripted(5.0), call_s=2.0) as (store, scripted):
        putting = asyncio.ensure_future(store.put(items("a")))
        await asyncio.sleep(1.0)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        assert store.breaker.state == "closed"
        assert (now(), scripted.running, len(store._running)) == (pytest.approx(1.0), 0, 0)


@simulated
async def test_cancelling_what_cannot_stop_ends_at_the_deadline_with_the_parts_still_leased():
    stuck = never_ends()
    async with guarded(Scripted(stuck), call_s=2.0) as (store, _):
        putting = asyncio.ensure_future(store.put(items("a")))
        await asyncio.sleep(1.0)
        putting.cancel()
        await asyncio.wait([putting])
        assert now() == pytest.approx(2.0)
        error = putting.exception()
        assert isinstance(error, StoreTimeout)
        assert not error.ended.done()
        assert store.breaker.state == "open", "a store that hangs is left alone, whoever still waits"
        stuck.set_result(None)
        await asyncio.wait([error.ended])
        assert isinstance(error.ended.exception(), StoreUnavailable)


@simulated
async def test_aclose_waits_then_kills_then_names_what_is_left():
    async with guarded(Scripted(3.0), call_s=1.0, close_s=10.0) as (store, scripted):
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
        await store.aclose()
        # it ended by itself
        assert now() == pytest.approx(3.0)
        assert scripted.life == ["open", "aclose"]
    stuck = never_ends()
    async with guarded(Scripted(stuck), call_s=1.0, close_s=10.0) as (store, scripted):
        begun = now()
        with pytest.raises(StoreTimeout) as first:
            await store.put(items("a"))
        with pytest.raises(StoreTimeout, match="put of store scripted did not end within 10 s") as found:
            await store.aclose()
        # all of it under one deadline
        assert now() - begun == pytest.approx(11.0)
        assert found.value.ended is first.value.ended
        assert scripted.life[1].startswith("kill: put of store scripted did not end in 5 s")
        assert scripted.life[2] == "aclose"
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.put(items("a"))
        stuck.set_result(None)


@simulated
async def test_what_hangs_ends_by_a_kill_and_the_store_is_used_further():
    async with guarded(FaultyStore(memory(), StoreFaults(hang=1.0)), call_s=1.0) as (store, faults):
        with pytest.raises(StoreTimeout) as found:
            await store.put(items("a"))
        assert faults.hanging == 1
        assert await store.kill("a test")
        with pytest.raises(StoreUnavailable, match="the call was ended"):
            await found.value.ended
        assert (faults.hanging, len(store._running)) == (0, 0)
        faults.plan = StoreFaults()
        await asyncio.sleep(2.0)
        assert await store.put(items("a")) == [DONE]
        assert await store.exists_prefix(["a"]) == 1


@simulated
async def test_a_store_that_says_it_was_killed_and_goes_on_has_its_verbs_cancelled():
    class Boasts(MemoryStore):
        """As one that inherits `kill` from a store whose verbs never wait."""

        async def put(self, items):
            await never_ends()

    async with guarded(Boasts(MemoryConfig()), call_s=1.0, close_s=10.0) as (store, _):
        with pytest.raises(StoreTimeout) as found:
            await store.put(items("a"))
        assert await store.kill("a test")
        assert isinstance(found.value.ended.exception(), StoreUnavailable)
        assert len(store._running) == 0


@simulated
async def test_what_was_killed_while_it_was_delayed_does_not_hang_afterwards():
    faults = FaultyStore(memory(), StoreFaults(delay=1.0, delay_s=100.0, hang=1.0))
    async with guarded(faults, call_s=0.1) as (store, _):
        with pytest.raises(StoreTimeout) as found:
            await store.put(items("a"))
        assert await store.kill("a test")
        assert found.value.ended.done()
        assert faults.hanging == 0


class Killable(Scripted):
    """Its running verbs end when it is killed, after `kill_takes_s`."""

    kill_takes_s = 0.5

    def hang(self, count=1):
        self.hung = [never_ends() for _ in range(count)]
        self.script = list(self.hung)

    async def kill(self, why):
        self.life.append((now(), why))
        await asyncio.sleep(self.kill_takes_s)
        for line in self.hung:
            if not line.done():
                line.set_exception(StoreUnavailable("scripted", why))
        return True

    @property
    def killed(self):
        return [round(entry[0], 3) for entry in self.life if isinstance(entry, tuple)]


@pytest.mark.parametrize("verb", ["exists_prefix", "get_into", "put", "delete", "usage"])
@simulated
async def test_a_verb_that_grows_too_old_has_the_store_killed_once(verb):
    async with guarded(Killable(), call_s=1.0, kill_s=4.0) as (store, scripted):
        scripted.hang()
        argument = {"get_into": [items("a")], "put": [items("a")], "usage": []}.get(verb, [["a"]])
        with pytest.raises(StoreTimeout) as found:
            await getattr(store, verb)(*argument)
        await asyncio.wait([found.value.ended])
        assert now() == pytest.approx(4.5)
        error = found.value.ended.exception()
        assert isinstance(error, StoreUnavailable)
        assert error.problem == f"{verb} of store scripted had not ended after 4 s"
        await asyncio.sleep(100.0)
        assert scripted.killed == [4.0]
        assert len(store._running) == 0
        # and it is used further
        assert await store.exists_prefix(["a"]) == 1


@simulated
async def test_no_verb_is_killed_before_its_deadline():
    async with guarded(Killable(9.0), call_s=10.0, kill_s=2.0) as (store, scripted):
        assert await store.put(items("a")) == [DONE]
        scripted.hang()
        with pytest.raises(StoreTimeout, match="put did not end within 10 s") as found:
            await store.put(items("a"))
        await asyncio.wait([found.value.ended])
        assert now() == pytest.approx(19.5)
        assert found.value.ended.exception().problem == "put of store scripted had not ended after 10 s"
        assert scripted.killed == [19.0]


@simulated
async def test_a_call_that_ends_in_time_kills_no_store():
    async with guarded(Killable(3.9, 3.0, LATER, 2.0), call_s=1.0, kill_s=4.0) as (store, scripted):
        tasks = [asyncio.ensure_future(store.put(items("a"))) for _ in range(4)]
        await asyncio.sleep(0.5)
        tasks[3].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(100.0)
        assert scripted.killed == []
    async with guarded(Scripted(50.0), call_s=1.0, close_s=100.0) as (store, scripted):
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
    assert scripted.life == ["open", "aclose"], "without a limit it may take as long as it likes"


@simulated
async def test_verbs_that_one_kill_ends_cost_no_other():
    contexts = logged()
    async with guarded(Killable(), call_s=1.0, kill_s=4.0) as (store, scripted):
        scripted.kill_takes_s = 0.0
        scripted.hang(3)
        tasks = puts(store, "ab")
        await asyncio.sleep(1.5)
        tasks.append(asyncio.ensure_future(store.put(items("c"))))
        await asyncio.sleep(100.0)
        assert all(isinstance(task.exception(), StoreTimeout) for task in tasks)
        assert set(scripted.killed) == {4.0}
        assert len(store._running) == 0
    assert not contexts, "no timer is left of a verb that has ended"


@pytest.mark.ci
@pytest.mark.parametrize("how", ["raises", "refuses"])
@simulated
async def test_a_store_that_cannot_be_killed_is_asked_once_and_nothing_is_logged(how):
    class Unkillable(Scripted):
        async def kill(self, why):
            self.life.append(why)
            if how == "raises":
                raise OSError("no")
            return False

    contexts = logged()
    stuck = never_ends()
    async with guarded(Unkillable(stuck), call_s=1.0, kill_s=4.0) as (store, scripted):
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
        await asyncio.sleep(100.0)
        assert scripted.life == ["open", "put of store scripted had not ended after 4 s"]
        assert len(store._running) == 1
        stuck.set_result(None)
        await turns(3)
        gc.collect()
    assert not contexts


@simulated
async def test_closing_has_its_own_deadline_and_no_timer_is_left():
    async with guarded(Killable(), call_s=1.0, kill_s=4.0, close_s=20.0) as (store, scripted):
        scripted.hang()
        with pytest.raises(StoreTimeout):
            await store.put(items("a"))
        await store.aclose()
        assert scripted.killed == [11.0]
    async with guarded(Killable(), call_s=5.0, kill_s=6.0, close_s=20.0) as (store, scripted):
        scripted.hang()
        begun = now()
        putting = asyncio.ensure_future(store.put(items("a")))
        await turns(3)
        # its deadline comes while the store closes
        await store.aclose()
        assert isinstance(putting.exception(), StoreTimeout)
        assert scripted.killed == [begun + 10.0]


@simulated
async def test_a_probe_that_hangs_is_killed_and_the_next_one_closes_the_breaker():
    limits = {"call_s": 1.0, "kill_s": 4.0, "max_calls": 1, "retry_s": 1.0}
    async with guarded(Killable(probes=True), **limits) as (store, scripted):
        # what hangs first takes the only place: the probe has to wait for its end
        scripted.hang(2)
        with pytest.raises(StoreTimeout):
            await store.exists_prefix(["a"])
        await asyncio.sleep(30.0)
        assert store.breaker.state == "closed"
        assert scripted.killed[0] == 4.0
        assert store.states[-1][1] < 12.0


@simulated
async def test_opening_has_a_deadline():
    class NeverOpens(Scripted):
        async def open(self, regions):
            await asyncio.sleep(1000.0)

    store = Guarded(NeverOpens(), call_s=1.0, open_s=5.0)
    with pytest.raises(StoreTimeout, match="open did not end within 5 s") as found:
        await store.open([])
    assert now() == pytest.approx(5.0)
    found.value.ended.cancel()
    await store.aclose()


@simulated
async def test_a_kill_or_a_close_that_hangs_has_a_deadline():
    class NeverEnds(Scripted):
        async def kill(self, why):
            await asyncio.sleep(100.0)
            return True

        async def aclose(self):
            await asyncio.sleep(100.0)

    store = Guarded(NeverEnds(), call_s=1.0, close_s=3.0)
    await store.open([])
    assert not await store.kill("a test")
    assert now() == pytest.approx(3.0)
    with pytest.raises(StoreTimeout, match="aclose did not end within 3 s"):
        await store.aclose()
    await asyncio.sleep(200.0)
