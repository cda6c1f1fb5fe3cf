"""What weights in use came from, and what a wake of dropped ones does with it (docs/design.md, rule 44); updates that
bring some tensors only, after weights that nobody wanted."""

from __future__ import annotations

import asyncio
import os

import pytest

from fdasync import Engine
from fdasync.errors import BadInput, UpdateUnderWay, WeightsBroken, WeightsDiffer, WeightsRejected
from fdasync.testing import check_idle, synthetic_config
from tests.engine.updates import ask, play, weights
from tests.support.broadcast_runner import GROUP, HALF, HIGH, LOW, halves, part, runner_of

COSTS = {"step_s": 0.01, "sleep_s": 0.5, "load_s": 0.3}


def id_of(number):
    return f"{number:032x}"


def folder(path, number, base=None):
    path.mkdir(exist_ok=True)
    more = "" if base is None else f', "base": {base}'
    (path / "weights.json").write_text(f'{{"weights_id": {number}{more}}}')
    return str(path)


def engine_of(weights_id=1, **options):
    config = synthetic_config({**COSTS, "weights_id": weights_id}, **options)
    runner = runner_of(config)
    return Engine(config, runner=runner), runner


def test_a_wake_loads_the_checkpoint_and_the_deltas_applied_since(tmp_path, blocking_calls):
    whole, first, second = folder(tmp_path / "5", 5), folder(tmp_path / "6", 6, 5), folder(tmp_path / "7", 7, 6)
    away, other = tmp_path / "away", folder(tmp_path / "8", 8, 5)

    def move(one, to):
        blocking_calls.deactivate()
        os.rename(one, to)
        blocking_calls.activate()

    async def work():
        # the weights that it starts with are a folder like any other
        engine, _ = engine_of(model=whole, weights_id=5)
        async with engine:
            assert engine.stats().reloadable
            await engine.update_weights(1, first)
            await engine.update_weights(2, second)
            await engine.sleep(2)
            began = asyncio.get_running_loop().time()
            assert await engine.wake() == "running"
            assert asyncio.get_running_loop().time() - began == pytest.approx(3 * 0.5 + 3 * 0.3, abs=0.01)
            await ask(engine, 7)
            # the version in use, with the folder that was the last: they are the same weights
            await engine.sleep(2)
            await engine.wake(["weights"])
            await engine.update_weights(2, second)
            assert await engine.wake() == "running"
            await ask(engine, 7)
            # one of them is gone: they stay dropped, and half of them is nothing to add tensors to
            await engine.sleep(2)
            move(first, away)
            with pytest.raises(WeightsRejected):
                await engine.wake()
            assert engine.load().doing == "waits_for_weights"
            with pytest.raises(WeightsRejected):
                await engine.update_weights(3, halves(9, "low"))
            with pytest.raises(WeightsRejected):
                await engine.update_weights(3, other)
            assert engine.load().doing == "waits_for_weights"
            move(away, first)
            assert await engine.wake() == "running"
            await ask(engine, 7)
            # an update mends it as well
            await engine.sleep(2)
            move(first, away)
            with pytest.raises(WeightsRejected):
                await engine.wake()
            await engine.update_weights(3, whole)
            assert engine.load().doing == "running"
            await ask(engine, 5)
            # it holds others by now
            await engine.update_weights(4, other)
            move(other, tmp_path / "old")
            move(away, other)
            await engine.sleep(2)
            with pytest.raises(WeightsDiffer):
                await engine.wake()
            assert engine.load().doing == "broken"
            await engine.update_weights(5, whole)
            await ask(engine, 5)
            check_idle(engine)

    play(work)


def test_tensors_between_and_too_many_deltas_make_a_wake_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("fdasync.engine.weights.state.MOST_DELTAS", 2)
    whole = folder(tmp_path / "5", 5)
    deltas = [folder(tmp_path / str(number), number, number - 1) for number in range(6, 10)]

    async def work():
        engine, runner = engine_of()
        async with engine:
            assert not engine.stats().reloadable
            await engine.update_weights(None, whole)
            for delta in deltas[:2]:
                await engine.update_weights(None, delta)
                assert engine.stats().reloadable
            await engine.update_weights(None, deltas[2])
            assert not engine.stats().reloadable
            await engine.sleep(2)
            assert await engine.wake() == "waits_for_weights"
            await engine.update_weights(None, whole)
            assert engine.stats().reloadable
            await engine.update_weights(None, halves(7, "low"))
            assert not engine.stats().reloadable
            # a delta on tensors
            await engine.update_weights(None, deltas[2])
            await engine.sleep(2)
            assert await engine.wake() == "waits_for_weights"
            await engine.update_weights("whole", weights(5))
            await ask(engine, 5)
            # the same weights in a folder, under the version in use: from now on they can be had again
            await engine.update_weights("same", weights(5), expected=id_of(5))
            await engine.update_weights("same", whole)
            assert engine.stats().reloadable
            await engine.join_weights_group(GROUP)
            runner.sends = 6
            await engine.update_weights(None, part())
            assert not engine.stats().reloadable
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("way", ["tensors", "group", "parts"])
def test_some_tensors_do_not_mend_weights_that_differ(way):
    async def work():
        engine, runner = engine_of()

        async def update(number, *names, **options):
            runner.sends = number
            metas = [{"low": LOW, "high": HIGH}[name] for name in names]
            if way == "tensors":
                await engine.update_weights(None, halves(number, *names), **options)
            elif way == "group":
                await engine.join_weights_group(GROUP)
                await engine.update_weights(None, part(*metas), **options)
            else:
                await engine.join_weights_group(GROUP)
                await engine.begin_weight_update()
                await engine.update_weights(None, part(*metas))
                await engine.end_weight_update(**options)

        async with engine:
            wanted, wrong = 5 + 6 * HALF, 7 + 8 * HALF
            with pytest.raises(WeightsDiffer):
                await update(wrong, "low", "high", expected=id_of(wanted))
            for _ in range(2):
                # the other half is of weights that nobody wants
                with pytest.raises((WeightsRejected, WeightsBroken)):
                    await update(wanted, "low")
                assert engine.load().doing == "broken"
            await update(wanted, "low", "high")
            await ask(engine, wanted)
            with pytest.raises(WeightsDiffer):
                await update(wanted + 1, "low", expected=id_of(wanted))
            if way != "parts":
                # what comes of them is compared
                with pytest.raises(WeightsDiffer):
                    await update(wanted + 2, "low", expected=id_of(wanted))
                await update(wanted, "low", expected=id_of(wanted))
                await ask(engine, wanted)
            await update(wrong, "low", "high", expected=id_of(wrong))
            await ask(engine, wrong)
            check_idle(engine)

    play(work)


def test_a_delta_mends_weights_that_differ(tmp_path):
    delta = folder(tmp_path / "6", 6, 5)

    async def work():
        engine, _ = engine_of()
        async with engine:
            with pytest.raises(WeightsDiffer):
                await engine.update_weights(None, weights(5), expected=id_of(7))
            await engine.update_weights(None, delta)
            await ask(engine, 6)
            # nobody knows a folder of what it was applied to
            assert not engine.stats().reloadable

    play(work)


def test_a_group_is_left_only_between_updates():
    async def work():
        engine, runner = engine_of()
        async with engine:
            await engine.join_weights_group(GROUP)
            runner.sends = 5
            update = asyncio.create_task(engine.update_weights(1, part()))
            await asyncio.sleep(0.1)
            with pytest.raises(UpdateUnderWay):
                await engine.leave_weights_group(GROUP.name)
            await update
            # it was over when its caller heard of it, and its group may be left in that turn
            begun = asyncio.create_task(engine.begin_weight_update())
            await asyncio.sleep(0)
            with pytest.raises(UpdateUnderWay):
                await engine.leave_weights_group(GROUP.name)
            await begun
            await engine.update_weights(None, part(LOW))
            with pytest.raises(UpdateUnderWay):
                await engine.leave_weights_group(GROUP.name)
            await engine.update_weights(None, part(HIGH))
            await engine.end_weight_update()
            asked = asyncio.create_task(ask(engine, 5))
            await asyncio.sleep(0.02)
            leaving = asyncio.create_task(engine.leave_weights_group(GROUP.name))
            await asyncio.sleep(0.1)
            assert engine.load().doing == "updating"
            with pytest.raises(UpdateUnderWay):
                await engine.update_weights(None, weights(7))
            leaving.cancel()
            await asked
            assert not runner.groups
            with pytest.raises(BadInput):
                await engine.update_weights(None, [])
            check_idle(engine)

    play(work)


@pytest.mark.parametrize("between", ["an update that its caller left", "parts", "a label"])
def test_tensors_of_a_group_in_one_pause_have_the_version_of_those_before(tmp_path, between):
    whole = folder(tmp_path / "9", 9)

    async def work():
        engine, runner = engine_of()
        async with engine:
            await engine.join_weights_group(GROUP)
            await engine.pause()
            runner.sends = 5
            for _ in range(2):
                await engine.update_weights(None, part(LOW))
                assert engine.facts().weight_version == "1"
            if between == "a label":
                await engine.set_weight_version("7")
                await engine.update_weights(None, part(HIGH))
                assert engine.facts().weight_version == "7"
                return
            if between == "parts":
                await engine.begin_weight_update()
                await engine.update_weights(None, part(LOW))
                await engine.end_weight_update()
            else:
                update = asyncio.create_task(engine.update_weights(None, whole))
                await asyncio.sleep(0.1)
                update.cancel()
                await asyncio.sleep(1)
            # version 1 named the weights before
            assert engine.facts().weight_version == "2"
            await engine.update_weights(None, part())
            assert engine.facts().weight_version == "3"
            check_idle(engine)

    play(work)
