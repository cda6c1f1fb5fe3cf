"""The shell around the scheduler, with a runner that answers when the test says so: `driver.py`."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.errors import DeadlineExceeded, InvariantBroken, RunnerError
from fdasync.events.actions import FinishRequest, SwapIn, SwapOut, WakeAt
from fdasync.events.catalog import StopChecked, SwapDone, TimerFired
from fdasync.events.trace import TraceRing
from fdasync.runner.base import CopyOutput
from fdasync.scheduler import make_scheduler
from tests.engine.driver_stage import Script, Stage
from tests.support.helpers import hold_up, make_request

pytestmark = pytest.mark.both_loops


NOTHING = (0, 0, 0)


OUT, IN = SwapOut(0, (1, 2), (5, 6)), SwapIn(1, (7,), (3,), (3,), (9,))


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
    scheduler = make_scheduler(Script.config)
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
    error = await asyncio.wait_for(failed, 300)
    assert isinstance(error, DeadlineExceeded)
    assert (error.what, error.deadline_s) == ("copy 1", 0.01)


async def test_a_copy_that_came_while_the_loop_was_blocked_is_not_overdue():
    stage = Stage(Script([OUT]), step_deadline_s=1.0)
    stage.bus.publish(TimerFired())
    await stage.turns()
    # the copy's end is read only after its deadline's timer has rung
    stage.loop.call_soon(hold_up, 1.5)
    stage.loop.call_later(1.1, stage.runner.copies[0].set_result, CopyOutput(0, 0, 0))
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
    await asyncio.wait_for(idle, 300)
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


async def test_a_waiter_that_left_is_forgotten_and_the_end_of_turns_wakes_the_rest():
    stage = Stage(Script())
    first, second = (asyncio.ensure_future(stage.driver.wait_until(lambda: False)) for _ in range(2))
    await stage.turns()
    first.cancel()
    await stage.turns()
    assert first.cancelled()
    assert len(stage.driver._waiters) == 1
    stage.driver.stop()
    await asyncio.wait_for(second, 300)
    await asyncio.wait_for(stage.driver.wait_until(lambda: False), 300)
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
