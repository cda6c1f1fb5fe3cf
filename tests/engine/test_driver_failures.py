"""The shell around the scheduler when something fails, is late, or was never asked for: `driver.py`."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.errors import DeadlineExceeded, InvariantBroken, RunnerError
from fdasync.events.actions import (
    ELSEWHERE,
    Action,
    AnswerLease,
    AskLease,
    ConfirmHandOver,
    CopyRows,
    DropLease,
    EmitTokens,
    FetchBlocks,
    FinishRequest,
    GiveUpLease,
    HandOver,
    HashAgain,
    LookUp,
    ReceiveBlocks,
    RunStep,
    SendBlocks,
    StoreBlocks,
    SwapIn,
    SwapOut,
    TellBlocks,
    WakeAt,
)
from fdasync.events.catalog import AbortRequested, StepDone, StepFailed, StopChecked, TimerFired
from fdasync.ipc.deadlines import GRACE_S
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync.testing import until
from tests.engine.driver_stage import Script, Stage
from tests.support import skips
from tests.support.helpers import make_request

pytestmark = pytest.mark.both_loops


NOTHING = (0, 0, 0)


OUT, IN = SwapOut(0, (1, 2), (5, 6)), SwapIn(1, (7,), (3,), (3,), (9,))


# -- failures


@pytest.mark.parametrize("where", ["handle", "action", "unknown action"])
async def test_an_exception_in_a_turn_fails_the_engine_once(where):
    error = ValueError("no")
    finish = FinishRequest(1, "stop", (), 0, NOTHING, ())
    stage = Stage(Script({"handle": error, "action": [finish, finish]}.get(where, ["dance"])))
    stage.output.broken = True
    stage.bus.publish(TimerFired())
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert [type(failure) for failure in stage.failures] == [
        {"handle": ValueError, "action": OSError, "unknown action": TypeError}[where]
    ]
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert len(stage.scheduler.seen) == 1
    assert len(stage.failures) == 1
    assert stage.driver.broken


@pytest.mark.parametrize("error", [asyncio.CancelledError("of a future"), GeneratorExit()])
async def test_whatever_cuts_a_turn_short_fails_the_engine(error):
    stage = Stage(Script(error))
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert stage.failures == [error]
    assert stage.driver.broken


@pytest.mark.parametrize("callback", ["timer", "copy", "step", "copy is overdue", "step is overdue"])
async def test_whatever_a_callback_raises_fails_the_engine(callback):
    error = ValueError("no")

    def raises(*_):
        raise error

    late = callback.endswith("overdue")
    turns = {"timer": [WakeAt(0.0)], "copy": [OUT], "copy is overdue": [OUT]}
    stage = Stage(Script(turns[callback]) if callback in turns else None, step_deadline_s=0.01 if late else 60.0)
    stage.bus.publish(TimerFired() if callback in turns else make_request(1, range(5), 3, 4))
    if callback == "timer":
        # the turn sets it for a time that has passed
        stage.loop.call_soon(lambda: setattr(stage.bus, "publish", raises))
    await stage.turns(1)
    stage.bus.publish = stage.runner.overdue = raises
    if callback == "copy":
        stage.runner.copies[0].set_result(CopyOutput(0, 1, 1))
    elif callback == "step":
        stage.runner.end(1)
    await until(lambda: bool(stage.failures))
    assert stage.failures == [error]


async def test_taps_see_the_events_of_the_turn_that_failed():
    stage = Stage(Script(ValueError("no")))
    async with stage.bus.subscribe() as tap:
        stage.bus.publish(AbortRequested(keys=(1,)))
        await stage.turns()
        assert tap.pending == 1


@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_a_failed_step_fails_the_engine_and_the_taps_are_told(how):
    stage = Stage()
    async with stage.bus.subscribe(StepFailed) as tap:
        stage.bus.publish(make_request(1, range(5), 3, 4))
        await stage.turns()
        (_, done) = stage.runner.flights[0]
        if how == "error":
            done.set_exception(RunnerError("smoke", 0))
        else:
            done.cancel()
        await stage.turns()
        assert tap.pending == 1
        failed = await anext(tap)
    assert failed.step_id == 0
    assert [type(failure) for failure in stage.failures] == [RunnerError if how == "error" else asyncio.CancelledError]
    assert not stage.driver.broken


async def test_a_step_that_is_overdue_fails_the_engine():
    stage = Stage(step_deadline_s=0.01)
    stage.bus.publish(make_request(1, range(5), 3, 4))
    failed = stage.loop.create_future()
    stage.driver._on_failure = failed.set_result
    error = await asyncio.wait_for(failed, 300)
    assert isinstance(error, DeadlineExceeded)
    assert error.what == "step 0"
    assert error.deadline_s == 0.01


async def test_one_watchdog_looks_at_the_oldest_step_only():
    stage = Stage(step_deadline_s=5.0)
    stage.bus.publish(make_request(1, range(5), 9, 4))
    await stage.turns()
    first = stage.driver._watchdog
    stage.runner.end(7)
    await stage.turns()
    assert stage.driver._watchdog is first
    # it rings for a step that is done; the one in flight now has time left
    stage.driver._watch(first._due - 0.001)  # uvloop's clock has milliseconds
    assert stage.failures == []
    assert stage.driver._watchdog is not first
    stage.driver._steps.clear()
    stage.driver._watch(first._due)
    assert stage.driver._watchdog is None
    stage.driver.stop()


@pytest.mark.skips
async def test_a_step_is_not_overdue_by_a_timer_of_another():
    """It was launched, the loop was blocked, and the timer of a step before it rings before its end is seen."""
    stage = Stage(step_deadline_s=5.0)
    stage.bus.publish(make_request(1, range(5), 9, 4))
    await stage.turns()
    before = stage.driver._watchdog._due - 0.001  # uvloop's clock has milliseconds
    stage.runner.end(7)
    await stage.turns()
    skips.block(seconds=60.0)
    stage.driver._watchdog.cancel()
    stage.driver._watch(before)
    stage.runner.end(7)
    await asyncio.sleep(2 * GRACE_S)
    assert stage.failures == []
    # one that does not end is
    skips.block(seconds=60.0)
    await until(lambda: stage.failures)
    stage.driver.stop()


async def test_what_ends_after_stop_is_ignored():
    stage = Stage()
    stage.bus.publish(make_request(1, range(5), 3, 4))
    await stage.turns()
    stage.driver.stop()
    stage.driver.stop()
    stage.runner.flights[0][1].set_exception(RunnerError("late", 0))
    await stage.turns()
    assert stage.failures == []
    assert stage.log == [("launch", 0)]
    assert stage.bus.drain() == []


async def test_stop_takes_the_timers_with_it():
    now = asyncio.get_running_loop().time()
    stage = Stage(Script([WakeAt(now)]))
    stage.bus.publish(StopChecked(key=1, num_tokens=1))
    stage.loop.call_soon(stage.driver.stop)
    await stage.turns(5)
    assert len(stage.scheduler.seen) == 1


async def test_a_failure_wakes_callers_that_wait_for_idle():
    stage = Stage()
    stage.bus.publish(make_request(1, range(5), 3, 4))
    await stage.turns()
    idle = asyncio.ensure_future(stage.driver.wait_idle())
    await asyncio.sleep(0)
    stage.runner.flights[0][1].set_exception(RunnerError("smoke", 0))
    await asyncio.wait_for(idle, 300)
    assert len(stage.failures) == 1


async def test_an_event_that_nobody_asked_for_is_a_failure_not_a_silence():
    stage = Stage()
    stage.bus.publish(StepDone(step_id=5, tokens=()))
    await stage.turns()
    assert len(stage.failures) == 1


SAMPLES: dict[type, tuple[Action, str]] = {
    RunStep: (RunStep(0), "launch"),
    SwapOut: (OUT, "copy"),
    SwapIn: (IN, "copy"),
    EmitTokens: (EmitTokens(0, (1,), (7,), (0,)), "emit"),
    CopyRows: (CopyRows(()), "rows"),
    FinishRequest: (FinishRequest(1, "stop", (), 0, NOTHING, ()), "finish"),
    LookUp: (LookUp(0, b"n", (b"k",), 9.0), "look_up"),
    FetchBlocks: (FetchBlocks(0, b"n", (b"k",), (1,), (2,), (3,), 9.0), "fetch"),
    StoreBlocks: (StoreBlocks(0, b"n", (b"k",), (1,), (2,), (1,)), "write"),
    HashAgain: (HashAgain(1, b"", ""), "add"),
    AskLease: (AskLease(1, 0, "ipc://d", b"n", (), 1.0, 2.0, 3.0, 5.0), "elsewhere"),
    GiveUpLease: (GiveUpLease(1, 0, "ipc://d"), "elsewhere"),
    SendBlocks: (SendBlocks(0, 1, 0, "ipc://d", (0,), (0,), (0,), (1,)), "elsewhere"),
    HandOver: (HandOver(0, 1, 0, "ipc://d", 1, 0, 7, -1, 0, -1, -1, -1, NOTHING), "elsewhere"),
    AnswerLease: (AnswerLease(1, "granted"), "elsewhere"),
    DropLease: (DropLease(1, "why"), "elsewhere"),
    ReceiveBlocks: (ReceiveBlocks(0, 1, (0,), (0,), (0,), (0,), (1,), (4,), 9.0), "elsewhere"),
    ConfirmHandOver: (ConfirmHandOver(1, 1, True), "elsewhere"),
    TellBlocks: (TellBlocks((b"k",), ()), "elsewhere"),
    WakeAt: (WakeAt(1e9), ""),
}


def test_every_action_has_a_sample():
    assert set(Action.__args__) == set(SAMPLES)


@pytest.mark.parametrize("kind", SAMPLES)
async def test_every_action_has_a_performer(kind):
    action, word = SAMPLES[kind]
    stage = Stage(Script([action]), has_store=True, has_attendant=True)
    if kind is EmitTokens:
        stage.driver._outputs[0] = StepOutput(0, (7,))
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert stage.failures == []
    assert [entry[0] for entry in stage.log] == ([word] if word else [])
    if word in ("look_up", "fetch", "write", "add", "elsewhere"):
        assert stage.log[0][1] is action
    stage.driver.stop()


@pytest.mark.parametrize("kind", [LookUp, FetchBlocks, StoreBlocks])
async def test_asking_for_a_store_where_there_is_none_is_a_defect(kind):
    stage = Stage(Script([SAMPLES[kind][0]]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert [type(failure) for failure in stage.failures] == [InvariantBroken]
    assert kind.__name__ in str(stage.failures[0])


@pytest.mark.parametrize("kind", ELSEWHERE)
async def test_actions_for_other_instances_need_an_attendant(kind):
    stage = Stage(Script([SAMPLES[kind][0]]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    # events without a reader are no defect
    assert [type(failure) for failure in stage.failures] == ([] if kind is TellBlocks else [InvariantBroken])
    stage.driver.stop()
