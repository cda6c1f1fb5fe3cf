"""All instances of a router have one weights id: who comes with another, updates that are cancelled, two routers."""

from __future__ import annotations

import asyncio

import pytest
from weights_scene import come_back, dropped, problems, serve

from fdasync import GroupTensors, TensorMeta
from fdasync.errors import PeerRefused, PeerUnreachable, UpdateUnderWay
from tests.support.router_scene import NAMESPACE, done, in_scene, kv_batch, settle, standing, status_of

PROMPT = tuple(range(12))
PART = GroupTensors(group="trainer", tensors=(TensorMeta("a", "float32", (1,)),))


NEW, OTHER = b"w" * 16, b"o" * 16


# -- who comes with others


@in_scene("m0", "m1")
async def test_one_that_comes_back_with_old_weights_is_brought_up_to_date_before_it_serves(scene):
    await scene.router.update_weights(1, "/w", "keep")
    again = await come_back(scene, "m1")
    (command,) = again.commands
    assert (command.verb, command.version, command.path, command.mode) == ("update_weights", "1", "/w", "keep")
    assert "other weights" in problems(scene)["m1"]
    serve(scene.m0, again)
    # it would be chosen, by load
    scene.m0.status = status_of("running", 5, 500, 1, 50)
    await settle(1.0)
    for _ in range(3):
        await scene.router.complete(PROMPT)
    assert (len(scene.m0.submits), len(again.submits)) == (3, 0)
    again.router.send(done(command.number, "", "", NEW, 1))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}
    await scene.router.complete(PROMPT)
    assert len(again.submits) == 1
    assert scene.router.stats().instances[1].weight_version == "1"
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_one_that_was_away_during_the_update_is_brought_up_to_date(scene):
    """The same process: it was stopped, or cut off."""
    scene.network.partition(scene.router._wire, scene.m1.wire)
    await settle(5.0)
    await scene.router.update_weights(1, "/w")
    assert scene.m1.commands == []
    scene.network.heal(scene.router._wire, scene.m1.wire)
    await settle(5.0)
    assert [command.version for command in scene.m1.commands] == ["1"]
    assert problems(scene) == {"m0": "", "m1": ""}
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_one_that_took_the_version_already_is_up_to_date(scene):
    """Its answer was lost; it compares the folder with what it has."""
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    again.router.send(done(again.commands[0].number, "", "", NEW, 1))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}


@pytest.mark.parametrize(
    ("error", "namespace"), [("WeightsRejected", NAMESPACE), ("BadInput", OTHER), ("", OTHER), ("WeightsBroken", NEW)]
)
def test_one_that_does_not_come_to_the_routers_weights_is_dropped_by_name(error, namespace):
    @in_scene("m0", "m1")
    async def play(scene):
        await scene.router.update_weights(1, "/w")
        again = await come_back(scene, "m1")
        again.router.send(done(again.commands[0].number, error, "no such folder", namespace, 1))
        await settle()
        ((address, problem),) = dropped(scene).items()
        assert address == again.address
        assert "did not come to version 1" in problem
        assert len(scene.router.table.instances) == 1

    play()


@in_scene("m0", absent_s=1.0)
async def test_the_last_one_waits_for_the_next_update_where_the_folder_is_gone(scene):
    """A trainer may delete each folder that was loaded. Without an instance no update could bring new weights."""
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m0")
    again.router.send(done(again.commands[0].number, "WeightsRejected", "no such folder", NAMESPACE, 0))
    await settle(5.0)
    # it is not asked again and again
    assert len(again.commands) == 1
    assert dropped(scene) == {}
    (load,) = scene.router.load().instances
    for problem in (problems(scene)["m0"], load.problem):
        assert "did not come to version 1" in problem
        assert "no such folder" in problem
    with pytest.raises(PeerUnreachable, match="no such folder"):
        await scene.router.complete(PROMPT)
    again.obeys = lambda command: done(command.number, "", "", OTHER, 2)
    await scene.router.update_weights(2, "/v")
    assert problems(scene) == {"m0": ""}
    assert scene.router.load().instances[0].problem == ""
    serve(again)
    await scene.router.complete(PROMPT)


@in_scene("p0", "d0")
async def test_the_last_one_of_its_role_waits_for_the_next_update(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "d0")
    again.router.send(done(again.commands[0].number, "WeightsRejected", "no such folder", NAMESPACE, 0))
    await settle(5.0)
    assert dropped(scene) == {}
    assert "no such folder" in problems(scene)["d0"]


@in_scene("m0", "m1", command_s=20.0)
async def test_one_that_never_answers_is_dropped_and_one_whose_weights_change_is_asked_again(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    again.router.send(done(again.commands[0].number, "UpdateUnderWay", "wait", NAMESPACE, 0))
    await settle(1.0)
    assert len(again.commands) == 2
    assert dropped(scene) == {}
    await settle(25.0)
    assert "within" in dropped(scene)[again.address]


@in_scene("m0", "m1")
async def test_one_that_dies_while_it_is_brought_up_to_date_is_told_again(scene):
    await scene.router.update_weights(1, "/w")
    await come_back(scene, "m1")
    again = await come_back(scene, "m1")
    assert len(again.commands) == 1
    again.router.send(done(again.commands[0].number, "", "", NEW, 1))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}


@in_scene("m0", "m1")
async def test_one_that_goes_and_comes_between_two_questions_is_told_again(scene):
    await scene.router.update_weights(1, "/w")
    first = await come_back(scene, "m1")
    first.router.send(done(first.commands[0].number, "UpdateUnderWay", "wait", NAMESPACE, 0))
    await settle(0.1)
    await first.links.aclose(0.0)
    scene.begin("m1").obeys = lambda command: done(command.number, "", "", NEW, 1)
    await settle(3.0)
    assert problems(scene) == {"m0": "", "m1": ""}


@in_scene("m0", "m1")
async def test_one_that_somebody_else_updates_meanwhile_is_not_dropped(scene):
    refusal = lambda command: done(command.number, "UpdateUnderWay", "wait", NAMESPACE, 0)  # noqa: E731
    scene.m1.obeys = refusal
    await scene.router.update_weights(1, "/w")
    await settle(1.0)
    assert "other weights" in problems(scene)["m1"]
    scene.m1.obeys = lambda command: done(command.number, "", "", NEW, 1)
    await settle(1.0)
    assert problems(scene) == {"m0": "", "m1": ""}
    assert dropped(scene) == {}
    # where nobody takes it, it has not begun
    scene.m0.obeys = scene.m1.obeys = refusal
    with pytest.raises(UpdateUnderWay):
        await scene.router.update_weights(2, "/w")


@in_scene("m0", "m1")
async def test_without_an_update_one_with_other_weights_is_dropped_by_name(scene):
    again = await come_back(scene, "m1", OTHER)
    assert "other weights" in dropped(scene)[again.address]
    assert again.commands == []
    with pytest.raises(PeerRefused, match="other weights"):
        await scene.router.add(again.address)
    serve(scene.m0)
    await scene.router.complete(PROMPT)


@in_scene("m0")
async def test_an_instance_alone_may_have_any_weights(scene):
    again = await come_back(scene, "m0", OTHER)
    serve(again)
    await scene.router.complete(PROMPT)
    assert dropped(scene) == {}


@in_scene("m0")
async def test_one_that_joins_is_brought_up_to_date_first(scene):
    await scene.router.update_weights(1, "/w")
    joined = scene.begin("m1")
    joined.obeys = None
    task = asyncio.ensure_future(scene.router.add(joined.address))
    await settle(1.0)
    assert not task.done()
    joined.router.send(done(joined.commands[0].number, "", "", NEW, 1))
    await asyncio.wait_for(task, 1.0)
    other = scene.begin("m2")
    other.obeys = lambda command: done(command.number, "WeightsRejected", "no such folder", NAMESPACE)
    with pytest.raises(PeerRefused, match="no such folder"):
        await scene.router.add(other.address)
    # also where it would be the only one
    scene.m0.die()
    joined.die()
    await settle(4.0)
    last = scene.begin("m3")
    last.obeys = other.obeys
    with pytest.raises(PeerRefused, match="no such folder"):
        await scene.router.add(last.address)


@in_scene("m0")
async def test_one_that_joins_during_an_update_is_brought_up_to_date_after_it(scene):
    scene.m0.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    joined = scene.begin("m1", OTHER)
    task = asyncio.ensure_future(scene.router.add(joined.address))
    await settle(1.0)
    assert joined.commands == []
    assert dropped(scene) == {}
    scene.m0.router.send(done(scene.m0.commands[0].number, "", "", NEW, 1))
    await update
    await asyncio.wait_for(task, 1.0)
    assert [command.version for command in joined.commands] == ["1"]


@in_scene("m0", "m1")
async def test_an_update_waits_for_one_that_is_being_brought_up_to_date(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    update = asyncio.ensure_future(scene.router.update_weights(2, "/v"))
    await settle(1.0)
    assert len(scene.m0.commands) == 1
    again.router.send(done(again.commands[0].number, "", "", NEW, 1))
    await settle()
    scene.m0.obeys = again.obeys = None
    assert [command.version for command in again.commands] == ["1", "2"]
    again.router.send(done(again.commands[1].number, "", "", NEW, 2))
    await update


# -- somebody else updates them


@in_scene("p0", "d0", "d1")
async def test_instances_that_somebody_else_updates_are_followed_when_most_have_changed(scene):
    await settle()
    serve(scene.p0, scene.d0, scene.d1)

    def changes(script):
        script.router.send(kv_batch(OTHER, 1, True, (), ()))

    changes(scene.d0)
    await settle()
    assert [name for name, problem in problems(scene).items() if problem] == ["d0"]
    await scene.router.complete(PROMPT)
    assert scene.p0.submits[-1].decoders == (scene.d1.address,)
    changes(scene.p0)
    await settle()
    assert [name for name, problem in problems(scene).items() if problem] == ["d1"]
    await scene.router.complete(PROMPT)
    assert scene.p0.submits[-1].decoders == (scene.d0.address,)
    changes(scene.d1)
    await settle()
    assert not any(problems(scene).values())
    # who comes with old ones is left to whoever updated the others
    again = await come_back(scene, "d1")
    assert "other weights" in problems(scene)["d1"]
    changes(again)
    await settle()
    assert not any(problems(scene).values())
    assert dropped(scene) == {}


@in_scene("m0", "m1", "m2")
async def test_after_following_others_its_own_older_update_counts_no_more_and_its_next_one_does(scene):
    await scene.router.update_weights(1, "/w")
    for script in (scene.m0, scene.m1, scene.m2):
        script.router.send(kv_batch(OTHER, 1, True, (), ()))
        await settle()
    again = await come_back(scene, "m0")
    assert again.commands == []
    for script in (scene.m1, scene.m2):
        scene.network.partition(scene.router._wire, script.wire)
    await settle(5.0)
    again.obeys = lambda command: done(command.number, "", "", NEW, 2)
    await scene.router.update_weights(2, "/v")
    for script in (scene.m1, scene.m2):
        script.namespace = OTHER
        scene.network.heal(scene.router._wire, script.wire)
    await settle(5.0)
    for script in (scene.m1, scene.m2):
        assert [command.version for command in script.commands] == ["1", "2"]
    assert not any(problems(scene).values())


# -- earlier weights


@pytest.mark.parametrize("knows", ["it served them", "it followed", "its own update, which another's replaced"])
def test_no_instance_is_followed_to_an_earlier_version_than_the_fleet_had(knows):
    """All that had version 5 are started again, one after the other, with the weights of their checkpoint."""

    @in_scene("m0", "m1", absent_s=5.0)
    async def play(scene):
        await settle()
        if knows == "it served them":
            for script in (scene.m0, scene.m1):
                script.die()
            await settle(4.0)
            for name in ("m0", "m1"):
                scene.begin(name, OTHER).version = 5
            await settle(2.0)
        else:
            if knows != "it followed":
                await scene.router.update_weights(1, "/w")
            for script in (scene.m0, scene.m1):
                # the label may come a moment after the weights
                script.router.send(kv_batch(OTHER, 1, True, (), ()))
                script.router.send(kv_batch(OTHER, 5, False, (), ()))
            await settle()
        serve(scene.m0, scene.m1)
        assert {one.weight_version for one in scene.router.stats().instances} == {"5"}
        first = await come_back(scene, "m0")
        serve(first)
        await scene.router.complete(PROMPT)
        assert len(scene.m1.submits) == 1
        second = await come_back(scene, "m1")
        serve(second)
        for problem in problems(scene).values():
            assert "of version 0, which is earlier than version 5: it gets no requests until" in problem
        loop = asyncio.get_running_loop()
        for named in ({}, {"prefill": first.address}, {"decoders": [second.address]}):
            began = loop.time()
            with pytest.raises(PeerUnreachable, match=r"for 5 s that takes it; m0: .* earlier than version 5: "):
                await scene.router.complete(PROMPT, **named)
            assert loop.time() - began == pytest.approx(5.0, abs=1.0)
        assert first.submits == second.submits == first.commands == second.commands == []
        assert dropped(scene) == {}
        # nor where somebody gives one of them something earlier; a later version is followed
        first.router.send(kv_batch(NEW, 4, True, (), ()))
        await settle()
        assert "of version 4, which is earlier than version 5" in problems(scene)["m0"]
        first.router.send(kv_batch(b"l" * 16, 6, True, (), ()))
        await settle()
        assert [name for name, problem in problems(scene).items() if problem] == ["m1"]
        await scene.router.complete(PROMPT)
        assert len(first.submits) == 1

    play()


@in_scene("m0", "m1", "m2")
async def test_an_instance_that_came_with_the_weights_that_the_others_get_later_waits_for_none(scene):
    await settle()
    for script in scene.scripts.values():
        script.router.send(kv_batch(OTHER, 5, True, (), ()))
    await settle()
    scene.m2.die()
    await settle(4.0)
    early = scene.begin("m2", NEW)
    early.version = 6
    await settle(2.0)
    assert "other weights" in problems(scene)["m2"]
    for script in (scene.m0, scene.m1):
        script.router.send(kv_batch(NEW, 6, True, (), ()))
    await settle()
    assert not any(problems(scene).values())
    assert scene.router.table.may_serve(early.address, ())
    serve(early)
    await scene.router.complete(PROMPT, prefill=early.address)


@in_scene("m0", "m1")
async def test_a_router_s_own_update_may_go_back(scene):
    """A version is its caller's label."""
    for version, namespace in ((5, NEW), (3, OTHER)):
        for script in (scene.m0, scene.m1):
            script.obeys = lambda command, version=version, namespace=namespace: done(
                command.number, "", "", namespace, version
            )  # fmt: skip
        await scene.router.update_weights(version, "/w")
    again = await come_back(scene, "m0", b"l" * 16)
    assert [command.version for command in again.commands] == ["3"]
    again.router.send(done(again.commands[0].number, "", "", OTHER, 3))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}
    serve(scene.m1, again)
    await scene.router.complete(PROMPT)


@in_scene("m0", "m1")
async def test_one_that_comes_later_is_brought_to_a_checkpoint_and_its_deltas_one_after_the_other(scene):
    have = {"/w": b"w" * 16, "/d1": b"1" * 16, "/d2": b"2" * 16}

    def obeys(script):
        def obey(command):
            base = {"/d1": have["/w"], "/d2": have["/d1"]}.get(command.path, script.namespace)
            if script.namespace != base:
                return done(command.number, "WeightsRejected", "is a delta to others", script.namespace)
            script.namespace = have.get(command.path, script.namespace)
            reply = done(command.number, "", "", script.namespace, command.order)
            return standing(reply, is_delta=command.path.startswith("/d"))

        return obey

    def told(script):
        return [(command.verb, command.path, command.version) for command in script.commands]

    for script in (scene.m0, scene.m1):
        script.obeys = obeys(script)
    await scene.router.update_weights(1, "/w")
    await scene.router.update_weights(2, "/d1")
    await scene.router.update_weights(3, "/d2")
    await scene.router.set_weight_version(4)
    scene.m1.die()
    await settle(4.0)
    for namespace, lacks in (
        (NAMESPACE, [("/w", "1"), ("/d1", "2"), ("/d2", "4")]),
        (have["/d1"], [("/d2", "4")]),
        (have["/d2"], []),
    ):
        again = scene.begin("m1", namespace)
        again.obeys = obeys(again)
        again.version = 4 if not lacks else 0
        await settle(4.0)
        assert told(again) == [("update_weights", path, version) for path, version in lacks]
        assert problems(scene) == {"m0": "", "m1": ""}
        again.die()
        await settle(4.0)
    # no folder of the router's brought what a delta was applied to: it waits for the next update
    scene.m0.obeys = lambda command: standing(
        done(command.number, "", "", b"g" * 16 if command.version == "5" else b"h" * 16, command.order),
        is_delta=command.version == "6",
    )
    await scene.router.update_weights(5, PART)
    await scene.router.update_weights(6, "/d3")
    again = scene.begin("m1")
    await settle(4.0)
    assert told(again) == []
    assert "until it is updated" in problems(scene)["m1"]
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_requests_go_round_one_that_waits_for_weights(scene):
    serve(scene.m0, scene.m1)
    obeys = scene.m1.obeys
    scene.m1.obeys = lambda command: standing(obeys(command), state="waits_for_weights")
    scene.m1.status = status_of("waits_for_weights")
    assert await scene.router.wake() == "waits_for_weights"
    for _ in range(4):
        await scene.router.complete(PROMPT)
    await settle(2.0)
    await scene.router.complete(PROMPT)
    assert (len(scene.m0.submits), len(scene.m1.submits)) == (5, 0)
    scene.m1.status = status_of("running")
    scene.m0.die()
    await settle(4.0)
    await scene.router.complete(PROMPT)
    assert len(scene.m1.submits) == 1
