"""Engines whose store cannot be opened when they start: they serve without it, say so, and use it when it is there."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.base import finish
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import ConfigError, DeadlineExceeded, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.events.catalog import BreakerChanged
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config, until
from fdasync.testing.harness.processes import stop_process
from fdasync.testing.stores.wrapper import Wrapper
from tests.support import skips
from tests.support.plugins import install_plugin

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
# computing is so slow that what the store has is worth a lookup
COSTS = {"num_blocks": 12, "max_context_tokens": 48, "step_s": 0.05, "token_s": 0.005, "copy_s": 0.001}


def prompt(number):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, 40)]]


def store_config(**values):
    defaults = {"host_blocks": 64, "max_step_tokens": 64, "store": "memory", "store_open_deadline_s": 2.0,
                "store_retry_s": 0.5, "store_kill_s": 6.0, "close_deadline_s": 2.0}  # fmt: skip
    return synthetic_config(COSTS, **{**defaults, **values})


async def ask(engine, number):
    result = await engine.complete(prompt(number), PARAMS)
    check_sample(result.samples[0], prompt(number), PARAMS, oracle_of(engine.config))
    return result


def now():
    return asyncio.get_running_loop().time()


class Opens(Wrapper):
    """A memory store that outlives engines; each `open` is by the next line of the script, then it works.

    A line is an exception, "hang" (until it is cancelled), "stubborn" (cancelled or not), or seconds that it takes.
    """

    def __init__(self, *script):
        super().__init__(MemoryStore(MemoryConfig()))
        self.script = list(script)
        self.opened_at = []

    async def open(self, regions):
        self.opened_at.append(now())
        line = self.script.pop(0) if self.script else 0.0
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, float):
            await asyncio.sleep(line)
        elif line == "hang":
            await asyncio.get_running_loop().create_future()
        else:
            self.stuck = asyncio.get_running_loop().create_future()
            await finish(self.stuck)
        await self.inner.open(regions)

    async def aclose(self):
        self.end()


def play(work):
    with no_leaks():
        run_sim(work())


async def comes_back(engine, told):
    """The store is used from now on, and has what is asked for from now on."""
    states = []
    # no limit here: tests skip time, and what hangs ends their run
    while not states or states[-1].state != "closed":
        states.append(await anext(told))
    assert engine.stats().scheduler.written_blocks == 0
    await ask(engine, 7)
    await until(lambda: engine.stats().scheduler.written_blocks >= 10, every_s=0.01)
    return states


GONE = StoreUnavailable("memory", "nobody is there")


@pytest.mark.parametrize(
    ("script", "started_s", "reason", "opened_at"),
    [
        ([GONE], 0.0, "nobody is there", [0.0, 0.5]),
        ([GONE, GONE, GONE], 0.0, "nobody is there", [0.0, 0.5, 1.5, 3.5]),
        ([OSError("no route to host")], 0.0, "no route to host", [0.0, 0.5]),
        # it is waited for, then it goes on, and is used when it has ended
        ([5.0], 2.0, "open did not end within 2 s", [0.0]),
        # what never ends is ended, and tried again
        (["hang"], 2.0, "open did not end within 2 s", [0.0, 6.5]),
    ],
    ids=["absent", "absent for long", "a defect", "slow", "hangs"],
)
def test_an_engine_starts_without_its_store_and_uses_it_when_it_is_there(script, started_s, reason, opened_at):
    async def work():
        store = Opens(*script)
        engine = Engine(store_config(), store=store)
        await engine.start()
        assert now() == pytest.approx(started_s)
        # whoever listens only now is told first how it stands
        async with engine.bus.subscribe(BreakerChanged) as told, PrometheusTap(engine) as metrics:
            await asyncio.sleep(0.0)
            assert b'fdasync_store_breaker_state{store="memory"} 2.0' in metrics.exposition()
            assert reason in engine.stats().store_problem
            # it serves, and nobody waits for the store
            begun = now()
            await ask(engine, 1)
            assert now() - begun < 0.5
            states = await comes_back(engine, told)
            assert engine.stats().store_problem == ""
            assert (states[0].state, states[0].store) == ("open", "memory")
            assert reason in states[0].problem
            assert b'fdasync_store_breaker_state{store="memory"} 0.0' in metrics.exposition()
        # one that works tells newcomers nothing
        async with engine.bus.subscribe(BreakerChanged) as told:
            assert told.pending == 0
        await engine.aclose()
        check_idle(engine)
        assert store.opened_at == pytest.approx(opened_at)
        async with Engine(store_config(), store=store) as other:
            results = [await ask(other, 7)]
            assert results[0].cached.store == 40 // 4 * 4 - 4

    play(work)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [(GONE, StoreUnavailable, "nobody is there"), ("hang", StoreTimeout, "store memory: open did not end within 2 s")],
)
def test_a_store_that_is_required_and_cannot_be_opened_is_an_error_of_the_start(script, error, words):
    async def work():
        engine = Engine(store_config(store_required=True), store=Opens(script))
        with pytest.raises(error, match=words):
            await engine.start()
        assert now() < 2.5
        await engine.aclose()

    play(work)


@pytest.mark.parametrize(
    "error", [StoreRejected("memory", "no such pool", "name another"), ConfigError("store_config.pool", "is odd")]
)
@pytest.mark.parametrize("required", [True, False])
def test_a_store_that_is_configured_wrongly_is_an_error_of_the_start(error, required):
    async def work():
        engine = Engine(store_config(store_required=required), store=Opens(error))
        with pytest.raises(type(error)) as caught:
            await engine.start()
        assert caught.value is error
        await engine.aclose()

    play(work)


def test_a_store_that_turns_out_to_be_configured_wrongly_later_ends_no_request():
    async def work():
        store = Opens(GONE, StoreRejected("memory", "no such pool"))
        async with Engine(store_config(), store=store) as engine, engine.bus.subscribe(BreakerChanged) as told:
            states = await comes_back(engine, told)
            assert any("no such pool" in event.problem for event in states)

    play(work)


def test_closing_ends_an_opening_and_names_one_that_cannot_be_ended():
    async def work():
        for line in (GONE, "hang", 50.0):
            engine = Engine(store_config(), store=Opens(line))
            await engine.start()
            begun = now()
            await engine.aclose()
            assert now() == begun
        store = Opens("stubborn")
        engine = Engine(store_config(), store=store)
        await engine.start()
        begun = now()
        with pytest.raises((StoreTimeout, DeadlineExceeded), match="open"):
            await engine.aclose()
        assert now() - begun == pytest.approx(2.0, abs=0.01)
        store.stuck.set_result(None)
        await asyncio.sleep(1.0)

    play(work)


# -- stores in processes of their own


LATE = '''
import os, time
from fdasync.cache.store.file.store import FileStore
from fdasync.errors import StoreUnavailable

class LateStore(FileStore):
    """A file store that cannot be opened by a process that was started while LATE_WHY had a reason."""

    async def open(self, regions):
        why = os.environ.get("LATE_WHY")
        if why == "hang":
            time.sleep(600)
        elif why:
            raise StoreUnavailable("late", why)
        await super().open(regions)
'''


@pytest.fixture
def late_config(tmp_path, monkeypatch):
    install_plugin(tmp_path, monkeypatch, LATE, "fdasync.stores", {"late": "fdasync_bad:LateStore"})

    def make(**values):
        runner = {"num_blocks": 12, "max_context_tokens": 48, "step_s": 0.01, "token_s": 0.005}
        defaults = {"host_blocks": 64, "max_step_tokens": 64, "store": "late", "store_open_deadline_s": 0.2,
                    "store_retry_s": 0.1, "store_kill_s": 300.0,
                    "store_config": {"path": str(tmp_path / "kv"), "max_nbytes": 1 << 24}}  # fmt: skip
        return synthetic_config(runner, **{**defaults, **values})

    return make


@pytest.mark.ci
@pytest.mark.skips
@pytest.mark.parametrize("why", ["hang", "the disk is away"])
async def test_a_process_store_that_cannot_be_opened_is_used_when_it_can(why, late_config, monkeypatch):
    monkeypatch.setenv("LATE_WHY", why)
    # what is heard first is its own reason; what hangs is heard of when time was skipped
    engine = Engine(
        late_config(
            store_open_deadline_s=skips.LIMIT_S,
            store_deadline_s=skips.LIMIT_S,
            store_kill_s=2 * skips.LIMIT_S,
            start_deadline_s=1e6,
            request_deadline_s=1e6,
        )
    )
    starting = asyncio.ensure_future(engine.start())
    if why == "hang":
        await until(lambda: engine._runtime is not None and engine._runtime.store_pid != -1)
        hangs = engine._runtime.store_pid
        skips.block(seconds=1.5 * skips.LIMIT_S)
    await starting
    async with engine.bus.subscribe(BreakerChanged) as told:
        await ask(engine, 1)
        if why == "hang":
            # not killed yet, and not tried again
            assert engine.store_pid == hangs
        monkeypatch.delenv("LATE_WHY")
        if why == "hang":
            # it is killed for its age
            skips.block(seconds=skips.LIMIT_S)
        back = asyncio.ensure_future(comes_back(engine, told))
        breaker = engine._runtime.store.breaker
        await skips.go_on(back.done, lambda: breaker.state == "open" and engine.store_pid == -1)
        states = await back
        assert (states[0].state, states[0].store) == ("open", "late")
        assert ("open did not end within 600 s" if why == "hang" else why) in states[0].problem
        assert engine.store_pid != -1
        for number in (8, 9):
            await ask(engine, number)
        await until(lambda: not engine.stats().scheduler.writing)
    await engine.aclose()
    check_idle(engine)
    async with Engine(late_config(store_open_deadline_s=300.0, store_required=True)) as other:
        # the first ones teach it what things cost here
        for number in range(20, 24):
            await ask(other, number)
        assert max([(await ask(other, number)).cached.store for number in (7, 8, 9)]) >= 32


@pytest.mark.ci
async def test_a_process_store_that_is_required_and_hangs_is_named_in_its_time(late_config, monkeypatch):
    monkeypatch.setenv("LATE_WHY", "hang")
    engine = Engine(late_config(store_required=True, store_kill_s=3600.0, close_deadline_s=3600.0))
    begun = now()
    with pytest.raises(StoreTimeout, match=r"store late: open did not end within 0\.2 s"):
        await engine.start()
    await engine.aclose()
    # whoever never opened it has nothing to close in it
    assert now() - begun < 300.0


@pytest.mark.skips
async def test_a_store_process_that_is_stopped_as_it_opens_holds_up_no_start(late_config, monkeypatch):
    monkeypatch.setenv("LATE_WHY", "hang")
    engine = Engine(late_config(store_kill_s=1e6, store_open_deadline_s=skips.LIMIT_S, start_deadline_s=1e6))
    starting = asyncio.ensure_future(engine.start())
    await until(lambda: engine._runtime is not None and engine._runtime.store_pid != -1)
    stop_process(engine._runtime.store_pid)
    skips.block()
    await starting
    await ask(engine, 1)
    begun = now()
    await engine.aclose()
    assert now() - begun < 300.0
    check_idle(engine)


@pytest.mark.ci
async def test_a_place_that_is_not_there_yet_is_made_and_one_that_cannot_be_is_an_error(tmp_path):
    config = {"max_nbytes": 1 << 24}
    there = synthetic_config(host_blocks=16, store="file", store_config={"path": f"{tmp_path}/a/b/c", **config})
    async with Engine(there) as engine:
        assert engine.store_pid != -1
    wrong = synthetic_config(host_blocks=16, store="file", store_config={"path": f"{__file__}/b", **config})
    engine = Engine(wrong)
    with pytest.raises(StoreRejected, match="name a folder"):
        await engine.start()
    await engine.aclose()
