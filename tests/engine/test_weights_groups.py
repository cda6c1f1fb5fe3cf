"""Joins of a trainer's group: steps go on until its store answers, and whoever wants the join no more ends it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fdasync import Engine
from fdasync.errors import EngineClosed, UpdateUnderWay, WeightsRejected
from fdasync.testing import check_idle, synthetic_config
from tests.engine.updates import ask, play, weights
from tests.support.broadcast_runner import GROUP, part, runner_of

NEVER_S = 1e6


def engine_of(phase):
    """An engine whose joins wait in this phase: for the store to "answer", or for the ranks to "meet"."""
    config = synthetic_config({"step_s": 0.01, "load_s": 0.1, "weights_id": 1})
    runner = runner_of(config)
    if phase == "answer":
        runner.reach_s = NEVER_S
    else:
        runner.meet_s = NEVER_S
    return Engine(config, runner=runner), runner


def joining(engine, **changes):
    return asyncio.create_task(engine.join_weights_group(msgspec.structs.replace(GROUP, **changes)))


def test_steps_go_on_until_the_store_answers_and_wait_until_the_ranks_have_met():
    async def work():
        engine, runner = engine_of("answer")
        async with engine:
            runner.reach_s, runner.meet_s = 5.0, 3.0
            join = joining(engine)
            await asyncio.sleep(1)
            assert engine.load().doing == "running"
            await ask(engine, 1)
            # a pause is the caller's own meanwhile
            await engine.pause()
            await engine.resume()
            await ask(engine, 1)
            await asyncio.sleep(5)
            assert engine.load().doing == "updating"
            asked = asyncio.create_task(ask(engine, 1))
            await asyncio.sleep(1)
            assert not asked.done()
            await join
            await asked
            assert runner.groups == {GROUP.name}
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("phase", ["answer", "meet"])
def test_other_calls_are_told_of_the_join_and_the_time_that_is_left(phase):
    async def work():
        engine, _ = engine_of(phase)
        async with engine:
            join = joining(engine, timeout_s=100.0)
            await asyncio.sleep(30)
            for call in (
                engine.update_weights(None, weights(5)), engine.begin_weight_update(), engine.sleep(1), engine.wake(),
                engine.join_weights_group(GROUP), engine.leave_weights_group("another"), engine.weights_fingerprint(),
                engine.set_weight_version("best"),
            ):  # fmt: skip
                with pytest.raises(UpdateUnderWay, match=r"it joins the group 'trainer' by .*:29500, for up to 70 s"):
                    await call
            with pytest.raises(WeightsRejected):
                # nobody comes
                await join
            await engine.update_weights(None, weights(5))
            await ask(engine, 5)
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("phase", ["answer", "meet"])
@pytest.mark.parametrize("way", ["left", "cancelled"])
def test_a_join_that_is_wanted_no_more_ends_at_once(phase, way):
    async def work():
        engine, runner = engine_of(phase)
        async with engine:
            join = joining(engine)
            await asyncio.sleep(30)
            began = asyncio.get_running_loop().time()
            if way == "left":
                await engine.leave_weights_group(GROUP.name)
                with pytest.raises(WeightsRejected, match="'trainer' was not joined: it was left meanwhile"):
                    await join
            else:
                join.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await join
            await ask(engine, 1)
            assert asyncio.get_running_loop().time() - began < 2
            assert not runner.groups
            # and may begin anew
            runner.reach_s = runner.meet_s = 0.0
            await engine.join_weights_group(GROUP)
            runner.sends = 5
            await engine.update_weights(None, part())
            await ask(engine, 5)
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("turns", range(8))
def test_a_join_that_is_left_as_it_begins_says_so(turns):
    async def work():
        engine, _ = engine_of("answer")
        async with engine:
            join = joining(engine)
            # in one of these its work has not begun yet
            await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.leave_weights_group(GROUP.name)
            with pytest.raises(WeightsRejected, match="'trainer' was not joined: it was left meanwhile"):
                await join
            await ask(engine, 1)
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("phase", ["answer", "meet"])
def test_an_engine_that_closes_waits_for_no_join(phase):
    async def work():
        engine, _ = engine_of(phase)
        await engine.start()
        join = joining(engine, timeout_s=600.0)
        await asyncio.sleep(30)
        began = asyncio.get_running_loop().time()
        await engine.aclose()
        assert asyncio.get_running_loop().time() - began < 5
        with pytest.raises(EngineClosed):
            await join

    play(work)


@pytest.mark.parametrize(("phase", "words"), [("answer", "nobody answers at"), ("meet", "have not met")])
def test_a_join_ends_at_its_limit(phase, words):
    async def work():
        engine, _ = engine_of(phase)
        async with engine:
            began = asyncio.get_running_loop().time()
            with pytest.raises(WeightsRejected, match=words):
                await joining(engine, timeout_s=7.0)
            # a worker has some seconds more to say who did not come
            assert 7 <= asyncio.get_running_loop().time() - began < 60
            await ask(engine, 1)

    play(work)
