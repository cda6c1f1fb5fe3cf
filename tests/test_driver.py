"""The shell around the scheduler, with a runner that answers when the test says so: `driver.py`."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from fdasync.engine.driver import Driver
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
from fdasync.events.catalog import AbortRequested, StepDone, StepFailed, StopChecked, SwapDone, TimerFired
from fdasync.events.trace import TraceRing
from fdasync.runner.base import CopyOutput, Runner, StepOutput
from fdasync.scheduler import Scheduler, SchedulerConfig
from tests.helpers import hold_up, make_request

pytestmark = pytest.mark.both_loops

NOTHING = (0, 0, 0)
OUT, IN = SwapOut(0, (1, 2), (5, 6)), SwapIn(1, (7,), (3,), (3,), (9,))


class HandRunner(Runner):
    """Steps and copies end when the test ends them."""

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, log):
        self.log = log
        self.flights: list[tuple[int, asyncio.Future[StepOutput]]] = []
        self.copies: dict[int, asyncio.Future[CopyOutput]] = {}

    def launch(self, step):
        self.log.append(("launch", step.step_id))
        done = asyncio.get_running_loop().create_future()
        self.flights.append((step.step_id, done))
        return done

    def end(self, *tokens):
        step_id, done = self.flights.pop(0)
        done.set_result(StepOutput(step_id, tokens))

    def copy(self, copy):
        self.log.append(("copy", copy.copy_id))
        self.copies[copy.copy_id] = done = asyncio.get_running_loop().create_future()
        return done

    async def open(self):
        raise NotImplementedError

    async def bind(self, num_blocks, arena, host=None):
        raise NotImplementedError

    async def aclose(self):
        raise NotImplementedError


class Output:
    """Writes down what it is told to do."""

    def __init__(self, log):
        self.log = log
        self.broken = False

    def emit(self, action, output):
        assert action.step_id == output.step_id
        self.log.append(("emit", action.tokens, output.tokens))

    def copy_rows(self, spans):
        self.log.append(("rows", sum(span.count for span in spans)))

    def finish(self, action):
        if self.broken:
            raise OSError("the disk is full")
        self.log.append(("finish", action.key, action.reason))


class Told:
    """Stands where the keeper and the rehasher stand: writes down what each verb was given."""

    def __init__(self, log):
        for verb in ("look_up", "fetch", "write", "add"):
            setattr(self, verb, lambda action, verb=verb: log.append((verb, action)))


class Script:
    """A scheduler that does as it is told: a list of actions for each turn."""

    config = SchedulerConfig(block_tokens=4, num_blocks=8, max_running=4, max_step_tokens=16)

    def __init__(self, *turns):
        self.turns = list(turns)
        self.seen = []

    def handle(self, events):
        self.seen.append(list(events))
        answer = self.turns.pop(0) if self.turns else []
        if isinstance(answer, Exception):
            raise answer
        return answer


class Stage:
    def __init__(self, scheduler=None, **options):
        self.log = []
        self.failures = []
        self.loop = asyncio.get_running_loop()
        self.runner = HandRunner(self.log)
        self.output = Output(self.log)
        self.scheduler = scheduler or Scheduler(Script.config)
        values = {"step_deadline_s": 60.0, "trace": None, "on_failure": self.failures.append}
        self.driver = Driver(self.loop, self.scheduler, self.runner, **{**values, **options})
        self.driver.output = self.output
        self.bus = self.driver.bus

    async def turns(self, count=3):
        for _ in range(count):
            await asyncio.sleep(0)


async def test_one_turn_for_all_events_of_a_loop_turn():
    stage = Stage(Script())
    for key in range(3):
        stage.bus.publish(StopChecked(key=key, num_tokens=1))
    assert stage.scheduler.seen == []
    await stage.turns()
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert [len(turn) for turn in stage.scheduler.seen] == [3, 1]


async def test_what_an_action_publishes_belongs_to_the_next_turn():
    finish = FinishRequest(1, "stop", (), 0, NOTHING, ())
    stage = Stage(Script([finish], []))
    stage.output.finish = lambda _action: stage.bus.publish(StopChecked(key=1, num_tokens=1))
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert [[type(event) for event in turn] for turn in stage.scheduler.seen] == [[TimerFired], [StopChecked]]


async def test_actions_are_performed_in_the_order_given():
    stage = Stage()
    stage.bus.publish(make_request(1, range(5), 1, 4, emits=True))
    stage.bus.publish(make_request(2, range(50, 59), 2, 4))
    await stage.turns()
    stage.runner.end(7, 8)
    await stage.turns()
    assert stage.log == [
        ("launch", 0),
        ("emit", (7,), (7, 8)),
        ("rows", 5 + 8),
        ("finish", 1, "length"),
        ("launch", 1),
    ]
    stage.driver.stop()


async def test_a_whole_request_and_then_idle():
    stage = Stage()
    stage.bus.publish(make_request(1, range(5), 2, 4))
    await stage.turns()
    assert stage.driver.steps_in_flight == 1
    idle = asyncio.ensure_future(stage.driver.wait_idle())
    stage.runner.end(7)
    await stage.turns()
    assert not idle.done()
    stage.runner.end(8)
    await idle
    assert stage.log[-1] == ("finish", 1, "length")
    await stage.driver.wait_idle()
    stage.driver.stop()


async def test_taps_are_fed_after_the_turn_and_in_order():
    stage = Stage()
    async with stage.bus.subscribe() as tap:
        stage.bus.publish(make_request(1, range(5), 1, 4))
        await stage.turns()
        stage.runner.end(7)
        await stage.turns()
        kinds = [type(await anext(tap)).__name__ for _ in range(tap.pending)]
    assert kinds == ["RequestPrepared", "StepDone"]
    stage.driver.stop()


async def test_turns_are_recorded():
    scheduler = Scheduler(Script.config)
    ring = TraceRing(scheduler.config, 10)
    stage = Stage(scheduler, trace=ring)
    stage.bus.publish(make_request(1, range(5), 1, 4))
    await stage.turns()
    assert len(ring.encode().splitlines()) == 2
    stage.driver.stop()


async def test_the_timer_publishes_an_event_and_a_later_one_replaces_it():
    now = asyncio.get_running_loop().time()
    stage = Stage(Script([WakeAt(now + 3600)], [WakeAt(now)]))
    stage.bus.publish(StopChecked(key=1, num_tokens=1))
    await stage.turns()
    earlier = stage.driver._timer
    stage.bus.publish(StopChecked(key=1, num_tokens=1))
    async with stage.bus.subscribe(TimerFired) as tap:
        assert isinstance(await anext(tap), TimerFired)
    assert earlier.cancelled()
    assert len(stage.scheduler.seen) == 3
    stage.driver.stop()


# -- failures


@pytest.mark.parametrize("where", ["handle", "action", "unknown action"])
async def test_an_exception_in_a_turn_fails_the_engine_once(where):
    error = ValueError("no")
    finish = FinishRequest(1, "stop", (), 0, NOTHING, ())
    stage = Stage(Script({"handle": error, "action": [finish, finish]}.get(where, ["dance"])))
    stage.output.broken = True
    stage.driver.keeper = Told(stage.log)
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
    error = await asyncio.wait_for(failed, 10.0)
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
    stage.driver._watch()
    assert stage.failures == []
    assert stage.driver._watchdog is not first
    stage.driver._steps.clear()
    stage.driver._watch()
    assert stage.driver._watchdog is None
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


async def test_a_failure_wakes_who_waits_for_idle():
    stage = Stage()
    stage.bus.publish(make_request(1, range(5), 3, 4))
    await stage.turns()
    idle = asyncio.ensure_future(stage.driver.wait_idle())
    await asyncio.sleep(0)
    stage.runner.flights[0][1].set_exception(RunnerError("smoke", 0))
    await asyncio.wait_for(idle, 10.0)
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
    stage = Stage(Script([action]))
    stage.driver.keeper = stage.driver.rehasher = Told(stage.log)
    stage.driver.attendant = lambda action: stage.log.append(("elsewhere", action))
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
async def test_what_concerns_other_instances_needs_somebody_who_talks_to_them(kind):
    stage = Stage(Script([SAMPLES[kind][0]]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    # news that nobody wants are no defect
    assert [type(failure) for failure in stage.failures] == ([] if kind is TellBlocks else [InvariantBroken])
    stage.driver.stop()


# -- copies of blocks


async def test_each_copy_ends_in_one_event_that_tells_what_was_moved_in_any_order():
    stage = Stage(Script([OUT, IN]))
    async with stage.bus.subscribe(SwapDone) as tap:
        stage.bus.publish(TimerFired())
        await stage.turns()
        assert stage.log == [("copy", 0), ("copy", 1)]
        stage.runner.copies[1].set_result(CopyOutput(1, 100, 0))
        await stage.turns()
        stage.runner.copies[0].set_result(CopyOutput(0, 200, 7))
        await stage.turns()
        ended = [await anext(tap) for _ in range(tap.pending)]
    assert [(end.copy_id, end.kv_nbytes, end.aux_nbytes) for end in ended] == [(1, 100, 0), (0, 200, 7)]
    assert all(end.seconds >= 0 for end in ended)
    assert [[type(event) for event in turn] for turn in stage.scheduler.seen] == [[TimerFired], [SwapDone], [SwapDone]]
    assert stage.driver._copy_watches == {}
    stage.driver.stop()


@pytest.mark.parametrize("how", ["error", "cancelled", "another one"])
async def test_a_copy_that_fails_fails_the_engine(how):
    stage = Stage(Script([OUT]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    done = stage.runner.copies[0]
    if how == "error":
        done.set_exception(RunnerError("smoke", 0))
    elif how == "cancelled":
        done.cancel()
    else:
        done.set_result(CopyOutput(3, 0, 0))
    await stage.turns()
    want = {"error": RunnerError, "cancelled": asyncio.CancelledError, "another one": InvariantBroken}[how]
    assert [type(failure) for failure in stage.failures] == [want]
    assert len(stage.scheduler.seen) == 1
    assert not stage.driver.broken


async def test_a_copy_that_is_overdue_fails_the_engine_and_is_named():
    stage = Stage(Script([OUT, IN]), step_deadline_s=0.01)
    failed = stage.loop.create_future()
    stage.driver._on_failure = failed.set_result
    stage.bus.publish(TimerFired())
    await stage.turns()
    stage.runner.copies[0].set_result(CopyOutput(0, 0, 0))
    error = await asyncio.wait_for(failed, 10.0)
    assert isinstance(error, DeadlineExceeded)
    assert (error.what, error.deadline_s) == ("copy 1", 0.01)


async def test_a_copy_that_came_while_the_loop_was_blocked_is_not_overdue():
    stage = Stage(Script([OUT]), step_deadline_s=0.02)
    stage.bus.publish(TimerFired())
    await stage.turns()
    # the copy's end is read only after its deadline's timer has rung
    stage.loop.call_soon(hold_up, 0.1)
    stage.loop.call_later(0.03, stage.runner.copies[0].set_result, CopyOutput(0, 0, 0))
    await stage.driver.wait_until(lambda: not stage.driver._copies)
    assert stage.failures == []
    assert [type(event) for event in stage.scheduler.seen[1]] == [SwapDone]
    assert stage.driver._copy_watches == {}
    stage.driver.stop()


@pytest.mark.parametrize("how", ["result", "error", "cancelled"])
async def test_a_copy_that_ends_after_stop_is_ignored(how):
    stage = Stage(Script([OUT]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    stage.driver.stop()
    assert stage.driver._copy_watches == {}
    done = stage.runner.copies[0]
    if how == "result":
        done.set_result(CopyOutput(0, 1, 1))
    elif how == "error":
        done.set_exception(RunnerError("late", 0))
    else:
        done.cancel()
    await stage.turns()
    assert (stage.failures, stage.bus.drain(), len(stage.scheduler.seen)) == ([], [], 1)


# -- waiting for turns


async def test_idle_means_that_no_copy_is_in_flight_either():
    stage = Stage(Script([OUT]))
    stage.bus.publish(TimerFired())
    await stage.turns()
    idle = asyncio.ensure_future(stage.driver.wait_idle())
    await stage.turns()
    assert not idle.done()
    stage.runner.copies[0].set_result(CopyOutput(0, 0, 0))
    await asyncio.wait_for(idle, 10.0)
    # the turn that takes it is over
    assert [type(event) for event in stage.scheduler.seen[-1]] == [SwapDone]
    stage.driver.stop()


async def test_a_condition_is_looked_at_after_each_turn():
    stage = Stage(Script())
    waits = [
        asyncio.ensure_future(stage.driver.wait_until(lambda number=number: len(stage.scheduler.seen) >= number))
        for number in (0, 1, 2)
    ]
    await stage.turns()
    assert [wait.done() for wait in waits] == [True, False, False]
    for want in ([True, True, False], [True, True, True]):
        stage.bus.publish(TimerFired())
        await stage.turns()
        assert [wait.done() for wait in waits] == want
    assert stage.driver._waiters == []
    stage.driver.stop()


async def test_who_waits_no_longer_is_forgotten_and_the_end_of_turns_wakes_the_rest():
    stage = Stage(Script())
    first, second = (asyncio.ensure_future(stage.driver.wait_until(lambda: False)) for _ in range(2))
    await stage.turns()
    first.cancel()
    await stage.turns()
    assert first.cancelled()
    assert len(stage.driver._waiters) == 1
    stage.driver.stop()
    await asyncio.wait_for(second, 10.0)
    await asyncio.wait_for(stage.driver.wait_until(lambda: False), 10.0)
    assert stage.driver._waiters == []


async def test_a_failure_after_stop_is_ignored():
    stage = Stage(Script([FinishRequest(1, "stop", (), 0, NOTHING, ())]))

    def finish(action):
        stage.driver.stop()
        raise OSError("too late to matter")

    stage.output.finish = finish
    stage.bus.publish(TimerFired())
    await stage.turns()
    assert stage.failures == []
