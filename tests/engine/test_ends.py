"""How requests and engines end: aborts, deadlines, the frontend, closing, failing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.engine.prepare import Preparer
from fdasync.errors import (
    DeadlineExceeded,
    DuplicateRequestId,
    EngineClosed,
    EngineFailed,
    InvariantBroken,
    RunnerError,
    WorkerDied,
    WorkerStuck,
)
from fdasync.events.catalog import RequestPrepared
from fdasync.testing import (
    StepFault,
    check_idle,
    check_sample,
    held_engine,
    oracle_of,
    run_sim,
    synthetic_config,
    synthetic_engine,
    until,
)

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = list(range(1, 11))


async def ask(engine: Engine, prompt=PROMPT, params=GREEDY, **options):
    """Complete, and hold every sample against the oracle."""
    result = await engine.complete(prompt, params, **options)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle_of(engine.config), start=options.get("start", 0))
    return result


# -- aborts, deadlines, the frontend ----------------------------------------------------------------------


@pytest.mark.both_loops
async def test_cancelling_complete_aborts():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        task = asyncio.create_task(engine.complete(PROMPT, GREEDY))
        await faults.reached(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().live == 0
        faults.release()
        await until(lambda: not engine.stats().steps_in_flight)
        check_idle(engine)
        assert engine.stats().scheduler.dropped_tokens > 0
        await ask(engine)


async def test_an_aborted_request_returns_the_rows_of_completed_passes():
    config = synthetic_config(max_step_tokens=8, pipeline_depth=1)
    engine, faults = held_engine(config)
    prompt = [token % 100 for token in range(30)]
    async with engine:
        faults.hold()
        task = asyncio.create_task(engine.complete(prompt, GREEDY, request_id="mine"))
        for step_id in range(2):
            await faults.reached(step_id)
            faults.release(1)
        await faults.reached(2)
        assert engine.abort("mine")
        result = await task
        assert result.finish_reason == "abort"
        assert result.token_ids == ()
        # two chunks of eight completed; the third is in flight
        assert len(result.routing.array) == 16
        check_sample(result.samples[0], prompt, GREEDY, oracle_of(config))
        faults.release()
        await until(lambda: not engine.stats().steps_in_flight)
        check_idle(engine)
        # what was in flight sealed its blocks all the same
        assert (await ask(engine, prompt)).cached_tokens == 24


async def test_abort_knows_live_requests():
    async with synthetic_engine() as engine:
        assert engine.abort("nobody") is False
        async with engine.generate(PROMPT, GREEDY, request_id="mine") as stream:
            assert engine.abort("mine") is True
            assert engine.abort("mine") is True
            assert (await stream.finished()).finish_reason == "abort"
        assert engine.abort("mine") is False
        stream.abort()


async def test_request_ids_are_unique_among_the_living():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        task = asyncio.create_task(engine.complete(PROMPT, GREEDY, request_id="mine"))
        await faults.reached(0)
        with pytest.raises(DuplicateRequestId) as caught:
            await engine.complete(PROMPT, GREEDY, request_id="mine")
        assert caught.value.request_id == "mine"
        faults.release()
        assert (await task).request_id == "mine"
        assert (await ask(engine, request_id="mine")).request_id == "mine"
        drawn = {(await ask(engine)).request_id for _ in range(3)}
        assert len(drawn) == 3


async def test_the_door_pushes_back():
    engine, faults = held_engine(synthetic_config(max_running=1, max_requests=2))
    async with engine, asyncio.TaskGroup() as group:
        faults.hold()
        tasks = [group.create_task(ask(engine, request_id=str(number))) for number in range(4)]
        await faults.reached(0)
        await until(lambda: engine.stats().waiting_for_place == 2)
        assert engine.stats().live == 2
        # one who waits in the frontend can be aborted, or give up, and is not waited for
        assert engine.abort("3")
        assert (await asyncio.wait_for(tasks[3], 300)).finish_reason == "abort"
        giving_up = group.create_task(engine.complete(PROMPT, GREEDY))
        await until(lambda: engine.stats().waiting_for_place == 2)
        giving_up.cancel()
        await asyncio.wait([giving_up])
        assert engine.stats().waiting_for_place == 1
        faults.release()
        await asyncio.wait(tasks)
        await engine.drain(timeout_s=300.0)
        assert engine.stats().live == engine.stats().waiting_for_place == 0


async def test_drain_does_not_wait_for_a_request_that_gave_up_waiting_for_a_place():
    engine, faults = held_engine(synthetic_config(max_running=1, max_requests=1))
    async with engine, asyncio.TaskGroup() as group:
        faults.hold()
        running = group.create_task(ask(engine))
        await faults.reached(0)
        waiting = group.create_task(engine.complete(PROMPT, GREEDY))
        await until(lambda: engine.stats().waiting_for_place == 1)
        draining = group.create_task(engine.drain(timeout_s=300.0))
        await until(lambda: engine.state == "draining")
        waiting.cancel()
        faults.release()
        await asyncio.wait([running])
        await draining


@pytest.mark.both_loops
@pytest.mark.parametrize("deadline_s", [0.02, 0.0104, 0.0007])
@pytest.mark.parametrize("where", ["frontend", "queue", "run"])
async def test_a_deadline_ends_a_request_wherever_it_is(where, deadline_s):
    limit = 1 if where == "frontend" else 8
    engine, faults = held_engine(synthetic_config(max_running=1, max_requests=limit))
    async with engine:
        faults.hold()
        blocker = None
        if where != "run":
            blocker = asyncio.create_task(ask(engine))
            await faults.reached(0)
        # no step completes meanwhile: the deadline alone ends it
        async with asyncio.timeout(300):
            result = await engine.complete(PROMPT, GREEDY, deadline_s=deadline_s)
        assert result.finish_reason == "deadline"
        assert result.token_ids == ()
        assert result.samples[0].index == 0
        faults.release()
        if blocker is not None:
            await blocker
        await until(lambda: not engine.stats().steps_in_flight)
        check_idle(engine)


def test_a_deadline_in_a_stream_keeps_what_came():
    async def play():
        engine, faults = held_engine(synthetic_config(pipeline_depth=1))
        async with engine:
            faults.hold()
            async with engine.generate(PROMPT, GREEDY, deadline_s=0.1) as stream:
                for step_id in range(3):
                    await faults.reached(step_id)
                    faults.release(1)
                deltas = [delta async for delta in stream]
            assert sum(len(delta.token_ids) for delta in deltas) == 3
            assert deltas[-1].finish_reason == "deadline"
            check_sample(stream.result.samples[0], PROMPT, GREEDY, oracle_of(engine.config))
            assert len(stream.result.routing.array) == len(PROMPT) + 2
            faults.release()

    run_sim(play())


# -- life ---------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_drain_lets_the_live_ones_end_and_aclose_does_not():
    for ends in ("drain", "aclose"):
        engine, faults = held_engine()
        async with engine, asyncio.TaskGroup() as group:
            faults.hold()
            task = group.create_task(engine.complete(PROMPT, GREEDY))
            await faults.reached(0)
            ending = group.create_task(engine.drain() if ends == "drain" else engine.aclose())
            await until(lambda engine=engine: engine.state in ("draining", "closing"))
            with pytest.raises(EngineClosed):
                await engine.complete(PROMPT, GREEDY)
            assert not ending.done()
            faults.release()
            result = await task
            await ending
        assert result.finish_reason == ("length" if ends == "drain" else "abort")
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config))
        assert engine.state == "closed"
        check_idle(engine)


@pytest.mark.parametrize("when", ["closing", "closed"])
async def test_a_request_in_preparation_when_the_engine_closes_is_told_and_not_published(monkeypatch, when):
    honest, gate, reached = Preparer.prepare, asyncio.Event(), asyncio.Event()

    async def held(self, *arguments, **options):
        events = await honest(self, *arguments, **options)
        reached.set()
        await gate.wait()
        return events

    monkeypatch.setattr(Preparer, "prepare", held)
    engine = synthetic_engine()
    await engine.start()
    arrivals = engine.bus.subscribe(RequestPrepared)
    task = asyncio.create_task(engine.complete(PROMPT, GREEDY))
    async with asyncio.timeout(300):
        await reached.wait()
        closing = asyncio.create_task(engine.aclose())
        await until(lambda: engine.state != "running")
        if when == "closed":
            await closing
        gate.set()
        with pytest.raises(EngineClosed):
            await task
        await closing
        assert [event async for event in arrivals] == []
    assert engine.stats().live == 0


async def test_drain_has_a_deadline_and_can_be_tried_again():
    engine, faults = held_engine()
    async with engine, asyncio.TaskGroup() as group:
        faults.hold()
        task = group.create_task(ask(engine))
        await faults.reached(0)
        with pytest.raises(DeadlineExceeded):
            await engine.drain(timeout_s=0.01)
        faults.release()
        await engine.drain()
        assert (await task).finish_reason == "length"


async def test_entered_and_left_in_different_tasks():
    engine = synthetic_engine()
    await asyncio.create_task(engine.start())
    await asyncio.create_task(ask(engine))
    await asyncio.create_task(engine.aclose())
    await engine.aclose()
    assert engine.state == "closed"


async def test_an_engine_is_started_once_and_closed_at_any_time():
    engine = synthetic_engine()
    with pytest.raises(EngineClosed):
        await engine.complete(PROMPT, GREEDY)
    with pytest.raises(EngineClosed):
        engine.stats()
    await engine.start()
    with pytest.raises(EngineClosed):
        await engine.start()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.drain()
    never = synthetic_engine()
    await never.aclose()
    assert never.state == "closed"


async def test_a_cancelled_start_leaves_nothing():
    engine, faults = held_engine()
    entered = asyncio.Event()

    async def hang():
        entered.set()
        await asyncio.Event().wait()

    faults.inner.open = hang
    starting = asyncio.create_task(engine.start())
    await entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.aclose()


async def test_a_start_has_a_deadline():
    engine, faults = held_engine(synthetic_config(start_deadline_s=0.01))
    faults.inner.open = asyncio.Event().wait
    with pytest.raises(DeadlineExceeded, match="starting the runner"):
        await engine.start()


# -- failure ------------------------------------------------------------------------------------------


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["fail", "die", "hang"])
async def test_a_failed_step_fails_the_engine_and_everyone_gets_what_there_is(kind):
    # a step that hangs fails after a second, for real; one that works has minutes
    config = synthetic_config(step_deadline_s=1.0 if kind == "hang" else 300.0)
    engine, _ = held_engine(config, fault=StepFault(kind, 6))
    cause = {"fail": RunnerError, "die": WorkerDied, "hang": WorkerStuck}[kind]
    caught = []
    deltas = []

    async def complete():
        with pytest.raises(EngineFailed) as failed:
            await engine.complete(PROMPT, SamplingParams(max_tokens=50, temperature=0.0, n=2))
        caught.append(failed.value)

    async def read():
        async with engine.generate(PROMPT, SamplingParams(max_tokens=50, temperature=0.0)) as tokens:
            async for delta in tokens:
                deltas.append(delta)  # noqa: PERF401 - what came before the error counts

    async def stream():
        with pytest.raises(EngineFailed) as failed:
            await read()
        caught.append(failed.value)

    async with engine:
        await asyncio.gather(complete(), stream())
        with pytest.raises(EngineFailed) as late:
            await engine.complete(PROMPT, GREEDY)
        assert late.value.partial is None
        assert isinstance(late.value.cause, cause)
    assert engine.state == "failed"
    for error in caught:
        assert isinstance(error.cause, cause)
        assert error.__cause__ is error.cause
        for sample in error.partial.samples:
            assert sample.finish_reason == "failed"
            assert 1 <= len(sample.token_ids) <= 6
            check_sample(sample, PROMPT, SamplingParams(max_tokens=50, temperature=0.0), oracle_of(config))
    streamed = next(error.partial for error in caught if len(error.partial.samples) == 1)
    assert tuple(token for delta in deltas for token in delta.token_ids) == streamed.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * len(deltas)


async def test_a_failure_that_no_caller_saw_is_raised_at_the_end():
    engine, faults = held_engine(fault=StepFault("fail", 1))
    with pytest.raises(EngineFailed):  # noqa: PT012
        async with engine:
            task = asyncio.create_task(engine.complete(PROMPT, GREEDY))
            faults.hold()
            await faults.reached(0)
            task.cancel()
            await asyncio.wait([task])
            faults.release()
            # step 1 was planned at once, at depth 2
            await until(lambda: engine.state == "failed" or not engine.stats().steps_in_flight)
            assert engine.state == "failed"


async def test_the_bodys_own_error_is_not_hidden_by_the_engines():
    engine, _ = held_engine(fault=StepFault("fail", 0))
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with engine:
            with pytest.raises(EngineFailed):
                await engine.complete(PROMPT, GREEDY)
            raise ZeroDivisionError


async def test_rows_that_capture_missed_fail_the_engine_and_are_never_given(monkeypatch):
    # without a cache the second request gets the slots of the first, with the first one's rows in them
    engine, faults = held_engine(synthetic_config(prefix_cache=False))
    async with engine:
        first = await ask(engine)

        def scatter_most(index, generations, values, scatter=faults.inner._arena.scatter):
            scatter(index[:-1], generations[:-1], {name: rows[:-1] for name, rows in values.items()})

        monkeypatch.setattr(faults.inner._arena, "scatter", scatter_most)
        with pytest.raises(EngineFailed) as caught:
            await engine.complete([7] * 12, GREEDY)
        assert isinstance(caught.value.cause, InvariantBroken)
        partial = caught.value.partial.samples[0]
        digests = oracle_of(engine.config).digests([7] * 12)[: len(partial.routing.array)]
        assert np.array_equal(partial.routing.array, oracle_of(engine.config).rows(digests))
    check_sample(first.samples[0], PROMPT, GREEDY, oracle_of(engine.config))


async def test_a_hung_step_does_not_hold_aclose_up():
    engine, _ = held_engine(synthetic_config(close_deadline_s=0.05), fault=StepFault("hang", 3))
    await engine.start()
    task = asyncio.create_task(engine.complete(PROMPT, SamplingParams(max_tokens=50, temperature=0.0)))
    await until(lambda: engine.stats().scheduler.steps == 3)
    await engine.aclose()
    assert (await task).finish_reason == "abort"
    assert engine.state == "failed"
