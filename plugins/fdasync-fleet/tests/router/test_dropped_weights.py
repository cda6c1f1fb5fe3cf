"""Instances that wake without the weights that a sleep dropped: the router brings them its last update."""

from __future__ import annotations

import asyncio

import pytest
from sleepers import asks, cut_off, sleepers
from weights_scene import dropped, problems

from fdasync.errors import WeightsRejected
from tests.support.router_scene import in_scene, settle, status_of


async def sleep(scene, *told):
    """Drop the weights of all, and forget what these were told until then."""
    await scene.router.sleep(2)
    for each in told:
        each.told.clear()


@in_scene("m0", "m1")
async def test_those_that_cannot_load_what_a_sleep_dropped_are_brought_the_last_update(scene):
    one, two = sleepers(scene)
    await scene.router.update_weights(1, "/w")
    await sleep(scene, one, two)
    assert await scene.router.wake() == "running"
    assert one.told == two.told == [("wake", ()), ("update_weights", "1")]
    assert await asks(scene) == {"m0": 2, "m1": 2}
    assert not any(problems(scene).values())


@in_scene("m0", "m1")
async def test_those_that_lost_a_checkpoint_and_a_delta_to_it_are_brought_both(scene):
    one, two = sleepers(scene, 2)
    await scene.router.update_weights(1, "/w")
    await scene.router.update_weights(2, "/d2")
    await sleep(scene, one, two)
    assert await scene.router.wake() == "running"
    assert one.told == two.told == [("wake", ()), ("update_weights", "1"), ("update_weights", "2")]
    assert (one.version, two.version) == (2, 2)


@in_scene("m0", "m1")
async def test_one_that_was_brought_its_weights_while_another_one_woke_is_brought_them_once(scene):
    one, two = sleepers(scene)
    await scene.router.update_weights(1, "/w")
    await sleep(scene, one, two)
    obeys = scene.m1.obeys
    held = []
    scene.m1.obeys = lambda command: held.append(command) if command.verb == "wake" else obeys(command)
    waking = asyncio.ensure_future(scene.router.wake())
    await settle(10.0)
    scene.m1.router.send(obeys(held[0]))
    assert await waking == "running"
    assert one.told == [("wake", ()), ("update_weights", "1")]


@in_scene("m0", "m1")
async def test_those_that_do_not_answer_the_update_are_kept_for_the_next_one(scene):
    one, two = sleepers(scene)
    await scene.router.update_weights(1, "/w")
    await scene.router.sleep(2)
    for script in (scene.m0, scene.m1):
        obeys = script.obeys
        script.obeys = lambda command, obeys=obeys: None if command.verb == "update_weights" else obeys(command)
    assert await scene.router.wake() == "waits_for_weights"
    assert dropped(scene) == {}
    for each in (one, two):
        each.script.obeys = each._obey
    await scene.router.update_weights(2, "/v")
    assert await asks(scene) == {"m0": 2, "m1": 2}


@pytest.mark.parametrize("error", ["", "WeightsRejected", "WeightsBroken"])
def test_one_that_wakes_late_without_weights_is_brought_the_last_update(error):
    @in_scene("m0", "m1")
    async def play(scene):
        _one, two = sleepers(scene)
        await scene.router.update_weights(1, "/w")
        await scene.router.sleep(2)
        cut_off(scene, "m1")
        await settle(5.0)
        two.late = error
        assert await scene.router.wake() == "running"
        two.told.clear()
        scene.network.heal(scene.router._wire, scene.m1.wire)
        await settle(5.0)
        assert two.told == [("wake", ()), ("update_weights", "1")]
        assert await asks(scene) == {"m0": 2, "m1": 2}
        assert not any(problems(scene).values())
        assert dropped(scene) == {}

    play()


@in_scene("m0", "m1")
async def test_one_that_only_its_status_tells_to_be_without_weights_is_brought_the_last_update(scene):
    _, two = sleepers(scene)
    await scene.router.update_weights(1, "/w")
    two.told.clear()
    # it woke while its link was down, and could not load them
    two.lacks = "waits_for_weights"
    scene.m1.status = status_of(two.lacks)
    await settle(2.0)
    assert two.told == [("update_weights", "1")]
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "m1")
async def test_one_that_no_update_brings_what_a_sleep_dropped_goes_on_when_it_has_loaded_it(scene):
    _one, two = sleepers(scene)
    await scene.router.update_weights(1, "/w")
    await scene.router.sleep(2)
    two.late = two.refuses = "WeightsRejected"
    with pytest.raises(WeightsRejected):
        await scene.router.wake()
    assert await asks(scene) == {"m0": 4, "m1": 0}
    assert dropped(scene) == {}
    two.late, two.lacks = "", ""
    assert await scene.router.wake() == "running"
    assert await asks(scene) == {"m0": 2, "m1": 2}
    assert not any(problems(scene).values())
