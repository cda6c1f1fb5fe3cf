"""Interrupts of the program, and cancellations that a plugin lets out, in the work of an engine: it fails by name, and
what is an interrupt reaches the program."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.drafting import Drafter, DrafterLimits, DrafterStats, Speculation
from fdasync.errors import DecodeFailed, EngineFailed, PluginError
from fdasync.events.tap import Tap, TapTasks
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing import check_idle, run_sim, synthetic_config, synthetic_engine, until
from fdasync.testing.harness.engines import LetterTokenizer

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)
RAISED = [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()]
INTERRUPTS = (KeyboardInterrupt, SystemExit)


class Raises(Drafter):
    """Raises in its third proposal."""

    calls = 0
    error: BaseException

    def begin(self, *_, **__):
        pass

    def take(self, keys, counts, tokens):
        pass

    def propose(self, keys, most):
        self.calls += 1
        if self.calls >= 3:
            raise self.error
        return most, np.zeros(int(most.sum()), np.int32)

    def end(self, key, *, now=0.0):
        pass

    def stats(self):
        return DrafterStats(sequences=0, prompts=0, nbytes=0, limit_nbytes=0)


def interrupted(loop: asyncio.AbstractEventLoop, work: asyncio.Future) -> list[BaseException]:
    """Run until the work is done, as a notebook runs its cells: an interrupt ends the cell, and not the loop."""
    came = []
    while not work.done():
        try:
            loop.run_until_complete(asyncio.wait([work]))
        except INTERRUPTS as error:
            came.append(error)
    return came


def play(make, call, error):
    """The engine's failure, and the interrupts that the program got, when `call` meets `error` in an engine."""
    loop = asyncio.new_event_loop()
    try:
        engine = loop.run_until_complete(_start(make))
        work = asyncio.ensure_future(call(engine), loop=loop)
        came = interrupted(loop, work)
        with suppress(asyncio.CancelledError):
            failed = work.exception()
        later = loop.run_until_complete(_failure(engine))
        closing = asyncio.ensure_future(engine.aclose(), loop=loop)
        assert interrupted(loop, closing) == []
        assert engine.state == "failed"
        assert came == ([error] if isinstance(error, INTERRUPTS) else [])
        return failed, later
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _start(make):
    engine = make()
    await engine.start()
    return engine


async def _failure(engine):
    try:
        await engine.complete([1, 2, 3], PARAMS)
    except EngineFailed as error:
        return error
    raise AssertionError("the engine goes on")


def ask(count=3):
    async def call(engine):
        calls = [engine.complete([number, 2, 3], PARAMS) for number in range(count)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineFailed) for end in ends)
        raise ends[0]

    return call


def make_drafting(error):
    config = synthetic_config(
        {}, speculation=Speculation(drafter="own", max_tokens=3, budget=False), max_step_tokens=64
    )
    drafter = Raises(None, DrafterLimits.of(3, 2, 8))
    drafter.error = error
    return Engine(config, drafter=drafter)


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_what_a_drafter_lets_out_fails_the_engine(error):
    failed, later = play(lambda: make_drafting(error), ask(), error)
    for end in (failed, later):
        assert isinstance(end, EngineFailed)
        assert end.cause is error if isinstance(error, INTERRUPTS) else isinstance(end.cause, PluginError)
    assert "its propose raised CancelledError" in str(failed) or isinstance(error, INTERRUPTS)


class Runner(SyntheticRunner):
    """Raises where it is told to."""

    where = ""
    error: BaseException

    def launch(self, step):
        if self.where == "launch":
            raise self.error
        return super().launch(step)

    async def fingerprint_weights(self, with_tensors=False):
        if self.where == "update":
            raise self.error
        return await super().fingerprint_weights(with_tensors)

    async def release_memory(self, parts, *, keep_weights):
        if self.where == "sleep":
            raise self.error
        return await super().release_memory(parts, keep_weights=keep_weights)


def make_running(where, error):
    config = synthetic_config({})
    runner = Runner(_own(config), config.runner_limits())
    runner.where, runner.error = where, error
    return Engine(config, runner=runner)


def _own(config):
    from fdasync.runner.synthetic.oracle import SyntheticConfig

    return SyntheticConfig(**config.runner_config)


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("where", ["launch", "update", "sleep"])
def test_what_comes_in_a_call_of_the_runner_fails_the_engine(where, error):
    calls = {"launch": ask(), "update": Engine.weights_fingerprint, "sleep": Engine.sleep}
    _, later = play(lambda: make_running(where, error), calls[where], error)
    if isinstance(error, INTERRUPTS) or where == "launch":
        assert later.cause is error


@pytest.mark.parametrize("error", [*RAISED[:2], ValueError("no")], ids=repr)
def test_a_task_of_the_engine_that_ends_so_fails_it(error, monkeypatch):
    from fdasync.engine import engine as module

    async def call(engine):
        request = asyncio.ensure_future(ask(1)(engine))
        await asyncio.sleep(0)

        def tick(_now):
            raise error

        engine._sights.tick = tick
        await request

    monkeypatch.setattr(module, "_LATENESS_PERIOD_S", 0.001)
    slow = {"step_s": 0.05}
    failed, later = play(lambda: synthetic_engine(synthetic_config(slow)), call, error)
    assert isinstance(failed, EngineFailed)
    assert later.cause is failed.cause


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("no")], ids=repr)
async def test_a_tokenizer_that_cancels_itself_ends_its_request_alone(error):
    class Tokenizer(LetterTokenizer):
        raises = False

        def decode(self, token_ids):
            if self.raises:
                raise error
            return super().decode(token_ids)

    tokenizer = Tokenizer()
    async with synthetic_engine(synthetic_config({"vocab_size": 60}), tokenizer=tokenizer) as engine:
        await engine.complete([1, 2, 3], PARAMS)
        tokenizer.raises = True
        with pytest.raises(DecodeFailed) as caught:
            await engine.complete([1, 2, 3], PARAMS)
        assert caught.value.cause is error
        tokenizer.raises = False
        await engine.complete([1, 2, 3], PARAMS)
        check_idle(engine)


@pytest.mark.parametrize("verb", ["exists_prefix", "get_into", "put"])
async def test_a_store_that_cancels_itself_is_one_that_does_not_answer(verb):
    class Cancels(MemoryStore):
        pass

    async def cancels(*_):
        raise asyncio.CancelledError

    store = Cancels(MemoryConfig())
    setattr(store, verb, cancels)
    config = synthetic_config({"num_blocks": 12}, host_blocks=4, fetch_min_tokens=0, write_through="all")
    async with synthetic_engine(config, store=store) as engine:
        for number in (1, 2, 1, 2):
            result = await engine.complete([number] * 30, PARAMS)
            assert result.finish_reason == "length"
        assert engine.state == "running"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_tap_that_ends_so_says_it(error):
    class Ends(Tap):
        async def run(self, events):
            raise error

    from fdasync.events.bus import EventBus
    from fdasync.ipc.deadlines import wait_within

    loop = asyncio.new_event_loop()
    taps = TapTasks({"own": Ends(None)})

    async def work():
        taps.start(EventBus(loop.time))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    try:
        came = interrupted(loop, asyncio.ensure_future(work(), loop=loop))
        assert came == ([error] if isinstance(error, INTERRUPTS) else [])
        assert type(error).__name__ in taps.failures["own"].problem
        loop.run_until_complete(taps.aclose(1.0, wait_within))
    finally:
        loop.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_failure_that_only_a_change_without_its_caller_met_is_raised_at_the_end(waits):
    async def work():
        async with make_running("sleep", ValueError("no memory")) as engine:
            sleep = asyncio.ensure_future(engine.sleep())
            await asyncio.sleep(0)
            if waits:
                with pytest.raises(EngineFailed):
                    await sleep
            else:
                # it goes on, and nobody reads how it ends
                sleep.cancel()
                await until(lambda: engine.state == "failed")

    if waits:
        run_sim(work())
    else:
        with pytest.raises(EngineFailed, match="no memory"):
            run_sim(work())
