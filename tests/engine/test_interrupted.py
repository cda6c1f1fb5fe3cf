"""What others do to an engine's loop and tasks: block it, cancel everything, cancel one of several waits."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import EngineClosed, EngineFailed, TaskCancelled
from fdasync.testing import check_sample, held_engine, oracle_of, synthetic_config, until
from fdasync.testing.harness.processes import stop_process
from tests.support import skips

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
LONG = SamplingParams(max_tokens=200, temperature=0.0)
PROMPT = list(range(1, 11))

pytestmark = [pytest.mark.both_loops, pytest.mark.usefixtures("forked_children")]


def new_weights(number: int):
    return [("weights", "uint64", (1,), number.to_bytes(8, "little"))]


# -- a loop that its user blocks ----------------------------------------------------------------------


@pytest.mark.ci(after=2)
@pytest.mark.skips
@pytest.mark.parametrize("verb", ["pause", "aclose", "update"])
async def test_a_loop_blocked_past_a_step_s_deadline_fails_no_pause_update_or_close(verb):
    config = synthetic_config(
        {"step_s": 0.03}, process="worker", step_deadline_s=skips.LIMIT_S, close_deadline_s=skips.LIMIT_S,
        update_deadline_s=2 * skips.BLOCKED_S, request_deadline_s=2 * skips.BLOCKED_S, pipeline_depth=1,
    )  # fmt: skip
    engine = Engine(config)
    calls = {"pause": engine.pause, "update": lambda: engine.update_weights(1, new_weights(5)), "aclose": engine.aclose}
    await engine.start()
    worker = engine._runtime.runner
    # its first step lasts until the loop is blocked
    stop_process(worker.pid)
    running = asyncio.create_task(engine.complete(PROMPT, LONG))
    await until(lambda: engine.stats().steps_in_flight > 0)
    call = asyncio.create_task(calls[verb]())
    # the wait has begun, and a step is still in flight
    await until(lambda: engine.stats().scheduler.paused or verb == "aclose")
    os.kill(worker.pid, signal.SIGCONT)
    skips.block(lambda: skips.said(worker._child))
    await call
    if verb == "pause":
        assert engine.stats().steps_in_flight == 0
        await engine.resume()
    await engine.aclose()
    assert engine.state == "closed"
    assert (await running).finish_reason == "abort"


# -- tasks that others cancel -------------------------------------------------------------------------


async def cancel_all_but(*spared: asyncio.Task) -> None:
    for task in asyncio.all_tasks():
        if task not in (asyncio.current_task(), *spared):
            task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_an_engine_whose_tasks_are_all_cancelled_fails_at_once_and_leaves_nothing(process):
    engine = Engine(synthetic_config({"step_s": 0.01}, process=process, host_blocks=8, store="memory"))
    await engine.start()
    cancelled = asyncio.create_task(engine.complete(PROMPT, LONG))
    spared = asyncio.create_task(engine.complete(PROMPT, LONG))
    await until(lambda: engine.stats().scheduler.steps > 3)
    await cancel_all_but(spared)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(cancelled, 300)
    with pytest.raises(EngineFailed) as found:
        await asyncio.wait_for(spared, 300)
    assert isinstance(found.value.cause, TaskCancelled)
    # whichever of the engine's own was cancelled first
    assert found.value.cause.task.startswith("fdasync")
    sample = found.value.partial.samples[0]
    assert len(sample.token_ids) > 0
    check_sample(sample, PROMPT, LONG, oracle_of(engine.config))
    for call in (lambda: engine.complete(PROMPT, GREEDY), engine.pause, engine.drain):
        with pytest.raises(EngineFailed):
            await call()
    # nobody cancelled this caller
    await engine.aclose()
    await engine.aclose()
    assert engine.state == "failed"


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("after", [*range(0, 12, 6), *range(1, 6), *range(7, 12)])
async def test_everything_cancelled_again_and_again_while_it_closes_leaves_nothing(after):
    """The fixtures that look for leaks say what was left behind."""
    engine = Engine(synthetic_config({"step_s": 0.01}, process="worker", host_blocks=8, store="memory"))
    await engine.start()
    running = asyncio.create_task(engine.complete(PROMPT, LONG))
    await until(lambda: engine.stats().steps_in_flight > 0)
    closing = asyncio.create_task(engine.aclose())
    for _ in range(after):
        await asyncio.sleep(0)
    for _ in range(3):
        await cancel_all_but(closing)
    await asyncio.wait_for(closing, 300)
    assert engine.state in ("closed", "failed")
    await asyncio.wait([running])
    with pytest.raises((EngineClosed, EngineFailed)):
        await engine.complete(PROMPT, GREEDY)
    # retrieved: how it ended depends on the turn
    _ = running.cancelled() or running.exception()


@pytest.mark.parametrize("when", ["before its first step", "as it loads"])
async def test_an_update_whose_task_others_cancel_fails_the_engine(when, monkeypatch):
    # nobody can tell what the runner has of the new weights
    engine, _ = held_engine()
    await engine.start()
    runner, loading = engine._runtime.runner, asyncio.Event()

    async def hang(*_):
        loading.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(runner, "write_tensor", hang)
    before = asyncio.all_tasks()
    update = asyncio.create_task(engine.update_weights(1, new_weights(5)))
    await asyncio.sleep(0)
    if when == "as it loads":
        await loading.wait()
    for task in asyncio.all_tasks() - before - {update}:
        task.cancel()
    asked = asyncio.create_task(engine.complete(PROMPT, GREEDY))
    await asyncio.wait([update, asked], timeout=300)
    assert [type(task.exception()) for task in (update, asked)] == [EngineFailed, EngineFailed]
    assert isinstance(update.exception().cause, TaskCancelled)
    assert "fdasync-update_weights" in str(update.exception())
    await engine.aclose()
    assert engine.state == "failed"


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("turns", [*range(0, 40, 8), *range(4, 40, 8)])
async def test_a_close_in_the_middle_of_a_load_copies_nothing_into_half_of_the_weights(turns, monkeypatch):
    runner_config = {"num_blocks": 12, "max_context_tokens": 48, "load_s": 0.001}
    engine = Engine(synthetic_config(runner_config, host_blocks=20, max_step_tokens=64, store="memory"))
    await engine.start()
    runner, loading = engine._runtime.runner, asyncio.Event()
    write = runner.write_tensor

    async def hang(*chunk):
        await write(*chunk)
        loading.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(runner, "write_tensor", hang)
    prompts = [[(7 * number + at) % 100 for at in range(40)] for number in range(8)]
    asked = [asyncio.create_task(engine.complete(prompt, SamplingParams(max_tokens=6))) for prompt in prompts]
    # at any moment some blocks wait to be copied
    for _ in range(turns):
        await asyncio.sleep(0)
    update = asyncio.create_task(engine.update_weights(1, new_weights(5)))
    await loading.wait()
    await engine.aclose()
    assert engine.state == "closed"
    await asyncio.wait([update, *asked])
    assert {(await request).finish_reason for request in asked} <= {"abort", "length"}
    with pytest.raises(EngineClosed):
        await update


async def test_a_supervisor_cancelled_before_its_first_step_hangs_no_start():
    engine = Engine(synthetic_config())
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.state == "starting")
    await cancel_all_but(starting)
    with pytest.raises((EngineClosed, EngineFailed)):
        await asyncio.wait_for(starting, 300)
    await engine.aclose()
    assert engine.state in ("closed", "failed")


def test_a_program_that_ends_without_closing_its_engine_ends():
    ended = []

    async def main() -> None:
        engine = Engine(synthetic_config({"step_s": 0.01}, process="worker"))
        await engine.start()
        ended.append((engine, asyncio.create_task(engine.complete(PROMPT, LONG))))
        await until(lambda: engine.stats().steps_in_flight > 0)

    asyncio.run(main())
    engine, call = ended[0]
    assert call.cancelled()
    assert engine.state == "failed"


@pytest.mark.parametrize("turns", range(12))
async def test_a_start_that_is_cancelled_in_any_turn_leaves_an_engine_that_runs_or_one_that_is_closed(turns):
    engine = Engine(synthetic_config())
    starting = asyncio.create_task(engine.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        assert engine.state in ("new", "closed")
        with pytest.raises(EngineClosed):
            await engine.complete(PROMPT, GREEDY)
    else:
        assert (await engine.complete(PROMPT, GREEDY)).finish_reason == "length"
    await engine.aclose()
    assert engine.state == "closed"


# -- one of several that wait for a pause -------------------------------------------------------------


@pytest.mark.parametrize("gives_up", [0, 1])
async def test_a_caller_that_gives_up_waiting_for_a_pause_does_not_end_another_s(gives_up):
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, GREEDY))
        await faults.reached(0)
        pauses = [asyncio.create_task(engine.pause()) for _ in range(2)]
        await until(lambda: engine.stats().scheduler.paused)
        pauses[gives_up].cancel()
        with pytest.raises(asyncio.CancelledError):
            await pauses[gives_up]
        faults.release()
        await pauses[1 - gives_up]
        assert engine.stats().scheduler.paused
        assert engine.stats().steps_in_flight == 0
        steps = engine.stats().scheduler.steps
        await asyncio.sleep(0.02)
        assert engine.stats().scheduler.steps == steps
        await engine.resume()
        assert (await running).finish_reason == "length"


async def test_when_all_give_up_waiting_for_a_pause_the_engine_goes_on():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, GREEDY))
        await faults.reached(0)
        pauses = [asyncio.create_task(engine.pause()) for _ in range(3)]
        await until(lambda: engine.stats().scheduler.paused)
        for pause in pauses:
            pause.cancel()
        await asyncio.wait(pauses)
        faults.release()
        assert (await running).finish_reason == "length"


async def test_a_caller_that_was_resumed_while_it_waited_holds_no_pause():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, GREEDY))
        await faults.reached(0)
        pauses = [asyncio.create_task(engine.pause()) for _ in range(2)]
        await until(lambda: engine.stats().scheduler.paused)
        await engine.resume()
        await asyncio.gather(*pauses)
        faults.release()
        assert (await running).finish_reason == "length"
        # and nothing of those pauses is left
        await engine.update_weights(1, new_weights(5))
        assert not engine.stats().scheduler.paused
