"""Labels of weights on a router's instances: given to all, kept by those that come back, told by another router."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_fleet.messages import KvEventBatch, Reply
from weights_scene import come_back, dropped, problems, serve

from fdasync.errors import UpdateUnderWay, WeightsBroken, WeightsDiffer
from tests.support.router_scene import NAMESPACE, done, in_scene, replied, settle

PROMPT = tuple(range(12))
NEW, OTHER = b"w" * 16, b"o" * 16


def same_weights(command):
    """What an instance replies to a new label."""
    return replied(command.number, "", "", NAMESPACE, command.version, command.order)


def labels(scene):
    return {one.name: one.weight_version for one in scene.router.stats().instances}


@in_scene("m0", "m1")
async def test_all_get_the_label_while_requests_wait(scene):
    scene.m0.obeys, scene.m1.obeys = same_weights, None
    serve(scene.m0, scene.m1)
    label = asyncio.ensure_future(scene.router.set_weight_version("best"))
    await settle()
    task = asyncio.ensure_future(scene.router.complete(PROMPT))
    await settle()
    assert scene.m0.submits == scene.m1.submits == []
    with pytest.raises(UpdateUnderWay):
        await scene.router.update_weights(1, "/w")
    # the same call waits for it
    again = asyncio.ensure_future(scene.router.set_weight_version("best"))
    (command,) = scene.m1.commands
    assert (command.verb, command.version, command.order) == ("relabel", "best", 1)
    scene.m1.router.send(same_weights(command))
    await asyncio.gather(label, again, task)
    assert len(scene.m0.commands) == 1
    assert labels(scene) == {"m0": "best", "m1": "best"}


@in_scene("m0", "m1")
async def test_one_that_comes_back_with_the_weights_gets_the_label_before_it_serves(scene):
    await scene.router.update_weights(1, "/w")
    scene.m0.obeys = scene.m1.obeys = lambda command: replied(
        command.number, "", "", NEW, command.version, command.order
    )  # fmt: skip
    await scene.router.set_weight_version("best")
    again = await come_back(scene, "m1", NEW)
    (command,) = again.commands
    assert (command.verb, command.version, command.order, command.path) == ("relabel", "best", 2, "")
    assert "other weights" in problems(scene)["m1"]
    again.router.send(replied(command.number, "", "", NEW, "best", 2))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}
    # one with other weights gets both in one
    another = await come_back(scene, "m1")
    (command,) = another.commands
    assert (command.verb, command.version, command.order, command.path) == ("update_weights", "best", 2, "/w")
    another.router.send(replied(command.number, "", "", NEW, "best", 2))
    await settle()
    assert labels(scene) == {"m0": "best", "m1": "best"}
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_one_that_cannot_take_the_label_is_dropped_by_name(scene):
    scene.m0.obeys = same_weights
    scene.m1.obeys = lambda command: done(
        command.number, "BadInput", "other weights had it", NAMESPACE, field="version"
    )
    await scene.router.set_weight_version("best")
    assert "other weights had it" in dropped(scene)[scene.m1.address]
    scene.m0.obeys = lambda command: done(command.number, "WeightsBroken", "half-way", NAMESPACE)
    with pytest.raises(WeightsBroken):
        await scene.router.set_weight_version("better")
    assert labels(scene) == {"m0": "best"}


@in_scene("m0", "m1")
async def test_one_with_other_weights_does_not_get_their_label(scene):
    await settle()
    for script in (scene.m0, scene.m1):
        script.router.send(KvEventBatch(OTHER, "5", True, (), (), 5))
    await settle()
    waits, claims = await come_back(scene, "m1"), []
    waits.claims = lambda command: claims.append(command.verb) or Reply(command.number)
    scene.m0.obeys = lambda command: replied(command.number, "", "", OTHER, command.version, command.order)
    await scene.router.set_weight_version("best")
    assert waits.commands == []
    await settle()
    # it has nothing to do, and another router may have it again
    assert claims == ["claim", "release"]
    assert labels(scene) == {"m0": "best", "m1": "0"}
    assert "of version 0, which is earlier than version best" in problems(scene)["m1"]
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_a_label_that_another_router_gave_later_is_kept(scene):
    await scene.router.update_weights(1, "/w")
    for script in (scene.m0, scene.m1):
        script.router.send(KvEventBatch(NEW, "theirs", False, (), (), 2))
        script.obeys = lambda command: replied(command.number, "", "", NEW, command.version, command.order)
    await settle()
    assert [len(script.commands) for script in (scene.m0, scene.m1)] == [1, 1]
    again = await come_back(scene, "m1")
    assert [(one.verb, one.version, one.order) for one in again.commands] == [("update_weights", "theirs", 2)]
    again.router.send(replied(again.commands[0].number, "", "", NEW, "theirs", 2))
    await scene.router.update_weights(None, "/v")
    assert scene.m0.commands[-1].version == "theirs-1"
    # a label may return, and counts as later
    await scene.router.update_weights("1", "/w")
    assert [(one.version, one.order) for one in scene.m0.commands[-2:]] == [("theirs-1", 3), ("1", 4)]


@in_scene("m0", "m1")
async def test_the_fingerprint_is_that_of_all_that_have_the_routers_weights(scene):
    def says(held, error="", problem=""):
        return lambda command: replied(command.number, error, problem, NAMESPACE, "0", 0, held=held)

    scene.m0.obeys = scene.m1.obeys = says("a" * 32)
    assert await scene.router.weights_fingerprint() == "a" * 32
    assert [one.commands[-1].verb for one in (scene.m0, scene.m1)] == ["fingerprint"] * 2
    scene.m1.obeys = says("b" * 32)
    with pytest.raises(WeightsDiffer, match="m1") as caught:
        await scene.router.weights_fingerprint()
    assert (caught.value.expected, caught.value.held, caught.value.where) == ("a" * 32, "b" * 32, "m1")
    scene.m1.obeys = says("", "UpdateUnderWay", "of this engine")
    with pytest.raises(UpdateUnderWay, match="m1"):
        await scene.router.weights_fingerprint()
    # one with other weights waits for the router's, and is not asked
    scene.m1.obeys = says("b" * 32)
    again = await come_back(scene, "m1", OTHER)
    asked = len(again.commands)
    assert await scene.router.weights_fingerprint() == "a" * 32
    assert len(again.commands) == asked
