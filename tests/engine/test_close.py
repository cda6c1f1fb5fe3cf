"""Closing takes its deadline, whatever hangs, and no longer: in virtual time, and with processes that are stopped."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.base import finish
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import DeadlineExceeded, StoreTimeout, StoreUnavailable, WorkerStuck
from fdasync.ipc.deadlines import Closing
from fdasync.testing import check_idle, held_engine, run_sim, synthetic_config, until
from fdasync.testing.harness.processes import stop_process

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
CLOSE_S = 2.0


def prompt(number):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, 40)]]


def now():
    return asyncio.get_running_loop().time()


class Hung(MemoryStore):
    """One of its verbs never ends; "stubborn" ones not even when they are cancelled, until `let_go`."""

    def __init__(self, verb, how):
        super().__init__(MemoryConfig())
        self.verb = verb
        self.how = how
        self.hanging = []

    async def _hang(self, verb):
        if verb == self.verb:
            self.hanging.append(asyncio.get_running_loop().create_future())
            await (finish(self.hanging[-1]) if self.how == "stubborn" else self.hanging[-1])

    async def exists_prefix(self, keys):
        await self._hang("exists_prefix")
        return await super().exists_prefix(keys)

    async def put(self, items):
        await self._hang("put")
        return await super().put(items)

    async def kill(self, why):
        await self._hang("kill")
        return False

    async def aclose(self):
        await self._hang("aclose")
        await super().aclose()

    def let_go(self):
        for future in self.hanging:
            if not future.done():
                future.set_exception(StoreUnavailable("memory", "it was let go"))


def hung_config(runner=None, **values):
    runner = {"num_blocks": 12, "max_context_tokens": 48, "step_s": 0.05, "token_s": 0.005, "copy_s": 0.001,
              **(runner or {})}  # fmt: skip
    # calls are waited for longer than closing takes
    defaults = {"host_blocks": 64, "max_step_tokens": 64, "store": "memory", "store_deadline_s": 100.0,
                "store_kill_s": 1000.0, "close_deadline_s": CLOSE_S}  # fmt: skip
    return synthetic_config(runner, **{**defaults, **values})


@pytest.mark.parametrize(
    ("verb", "how", "named"),
    [
        # what ends when it is cancelled is nobody's error
        ("put", "hangs", ""),
        ("exists_prefix", "hangs", ""),
        ("put", "stubborn", "put of store memory"),
        ("exists_prefix", "stubborn", "exists_prefix of store memory"),
        ("aclose", "hangs", "aclose"),
        ("aclose", "stubborn", "aclose"),
        # the write waits its time out, then nobody is there to end it
        ("kill", "stubborn", ""),
    ],
)
def test_a_hung_store_in_the_engine_s_process_costs_the_deadline_and_is_named(verb, how, named):
    async def work():
        store = Hung(verb, how)
        engine = Engine(hung_config(), store=store)
        await engine.start()
        answer = asyncio.ensure_future(engine.complete(prompt(0), PARAMS))
        await asyncio.sleep(0.3)
        begun = now()
        if named:
            with pytest.raises((DeadlineExceeded, StoreTimeout), match=named) as caught:
                await engine.aclose()
            assert f"within {CLOSE_S:g} s" in str(caught.value)
        else:
            await engine.aclose()
        took_s = now() - begun
        assert took_s <= CLOSE_S + 1e-3
        await answer
        assert engine.state == "closed"
        store.let_go()
        await asyncio.sleep(200.0)
        assert len(asyncio.all_tasks()) == 1

    run_sim(work())


def test_a_store_that_closes_slowly_has_all_of_the_deadline():
    class Slow(MemoryStore):
        async def aclose(self):
            await asyncio.sleep(0.9 * CLOSE_S)
            await super().aclose()

    async def work():
        engine = Engine(hung_config(), store=Slow(MemoryConfig()))
        await engine.start()
        await engine.complete(prompt(0), PARAMS)
        begun = now()
        await engine.aclose()
        assert now() - begun == pytest.approx(0.9 * CLOSE_S, abs=0.05)

    run_sim(work())


def test_a_runner_that_hangs_as_it_is_closed_costs_the_deadline_and_is_named():
    async def work():
        engine, runner = held_engine(hung_config())
        runner.aclose = asyncio.get_running_loop().create_future
        await engine.start()
        await engine.complete(prompt(0), PARAMS)
        begun = now()
        with pytest.raises(DeadlineExceeded, match="closing the runner"):
            await engine.aclose()
        assert now() - begun == pytest.approx(CLOSE_S, abs=0.01)

    run_sim(work())


def test_steps_that_take_the_whole_deadline_leave_some_of_it_for_the_rest():
    class Slow(MemoryStore):
        async def aclose(self):
            await asyncio.sleep(0.2 * CLOSE_S)
            await super().aclose()

    async def work():
        # two steps are in flight, one after the other: together they take nearly all of it
        engine = Engine(hung_config({"step_s": 0.42 * CLOSE_S}), store=Slow(MemoryConfig()))
        await engine.start()
        answer = asyncio.ensure_future(engine.complete(prompt(0), PARAMS))
        await until(lambda: engine.stats().steps_in_flight == 2, every_s=0.001)
        begun = now()
        await engine.aclose()
        assert CLOSE_S < now() - begun < 1.25 * CLOSE_S
        assert engine.state == "closed"
        assert (await answer).samples[0].finish_reason == "abort"

    run_sim(work())


def test_a_shared_deadline_counts_from_its_beginning_and_is_never_negative():
    async def work():
        closing = Closing(3.0)
        await asyncio.sleep(1.0)
        assert closing.left_s == 3.0
        closing.begin()
        await asyncio.sleep(1.0)
        closing.begin()
        assert closing.left_s == pytest.approx(2.0)
        closing.grant(0.5)
        assert closing.left_s == pytest.approx(2.0)
        await asyncio.sleep(5.0)
        assert closing.left_s == 0.0
        closing.grant(0.5)
        assert closing.left_s == pytest.approx(1.5)

    run_sim(work())


# -- processes that are stopped


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stopped", "busy"),
    [(("store",), True), (("store",), False), (("worker",), True), (("worker",), False), (("store", "worker"), True)],
    ids=["store writing", "store idle", "worker in a step", "worker idle", "both"],
)
async def test_a_process_that_is_stopped_costs_the_deadline_and_is_reaped(stopped, busy, tmp_path):
    config = hung_config(
        process="worker", store="file", store_config={"path": str(tmp_path / "kv"), "max_nbytes": 1 << 24},
        close_deadline_s=0.8, store_deadline_s=3600.0,
    )  # fmt: skip
    engine = Engine(config)
    await engine.start()
    await engine.complete(prompt(0), PARAMS)
    await until(lambda: not engine.stats().scheduler.writing)
    answer = None
    if "store" in stopped:
        stop_process(engine.store_pid)
        if busy:
            await engine.complete(prompt(1), PARAMS)
            assert engine.stats().scheduler.writing
    if "worker" in stopped:
        if busy:
            answer = asyncio.ensure_future(engine.complete(prompt(2), PARAMS))
            await until(lambda: engine.stats().steps_in_flight > 0)
        stop_process(engine._runtime.runner.pid)
    begun = now()
    await engine.aclose()
    # far below what its verbs may take
    assert now() - begun < 300.0
    if answer is not None:
        # it is told what came of it before the engine gives the step up
        assert (await answer).samples[0].finish_reason == "abort"
        assert isinstance(engine._failure, WorkerStuck)
    else:
        check_idle(engine)
