"""Instances that sleep while others get weights, and such as are out of reach when they are woken."""

from __future__ import annotations

import asyncio

import pytest
from sleepers import PART, PROMPT, asks, asleep_and_cut_off, cut_off, mend, sleep_but_one, sleepers
from weights_scene import dropped, namespace_of, problems, serve

from fdasync.errors import (
    Asleep,
    DeadlineExceeded,
    PeerUnreachable,
    UpdateUnderWay,
    WakeFailed,
    WeightsBroken,
    WeightsRejected,
)
from tests.support.router_scene import Command, in_scene, replied, settle, status_of


@in_scene("m0", "m1", request_deadline_s=1e9)
async def test_a_sleep_that_may_wait_as_long_as_a_request_may_take_puts_all_to_sleep(scene):
    both = sleepers(scene)
    await scene.router.sleep(mode="wait")
    assert [one.told for one in both] == [[("sleep", ())]] * 2


# -- new weights while some sleep


@in_scene("m0", "m1")
async def test_one_that_sleeps_during_an_update_gets_the_weights_when_it_is_woken(scene):
    one, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, "/w")
    assert (one.version, two.version) == (1, 0)
    assert dropped(scene) == {}
    assert "slept while the others got other weights" in problems(scene)["m1"]
    assert await asks(scene) == {"m0": 4, "m1": 0}
    # not asked again for as long as it sleeps
    await settle(10.0)
    assert two.told == [("sleep", ()), ("update_weights", "1")]
    assert await scene.router.wake() == "running"
    assert (one.version, two.version) == (1, 1)
    assert not any(problems(scene).values())
    serve(scene.m1)
    scene.m0.die()
    await settle(4.0)
    assert (await asks(scene))["m1"] == 4


@in_scene("m0", "m1")
async def test_weights_that_none_takes_are_refused_for_the_reason_of_one_that_is_awake(scene):
    _, two = sleepers(scene)
    await scene.router.sleep()
    scene.m1.router.send(scene.m1.obeys(Command(0, "wake")))
    await settle(2.0)
    two.refuses = "WeightsRejected"
    with pytest.raises(WeightsRejected, match="m1"):
        await scene.router.update_weights(1, "/nowhere")
    assert dropped(scene) == {}
    await scene.router.sleep()
    with pytest.raises(Asleep, match="m0"):
        await scene.router.update_weights(1, "/w")


@in_scene("m0", "m1")
async def test_one_that_has_memory_for_weights_alone_gets_them_and_sleeps_on(scene):
    _, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, "/w")
    assert await scene.router.wake(["weights"]) == "asleep"
    assert two.version == 1
    assert not any(problems(scene).values())


@in_scene("m0", "m1")
async def test_one_that_somebody_else_wakes_gets_them_too(scene):
    _, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, "/w")
    two._released.clear()
    scene.m1.status = scene.m0.status
    await settle(3.0)
    assert two.version == 1
    assert not any(problems(scene).values())


@in_scene("m0", "m1")
async def test_one_that_sleeps_and_comes_back_meanwhile_is_not_dropped(scene):
    _, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, "/w")
    scene.network.partition(scene.router._wire, scene.m1.wire)
    await settle(5.0)
    scene.network.heal(scene.router._wire, scene.m1.wire)
    await settle(5.0)
    assert dropped(scene) == {}
    await scene.router.wake()
    assert two.version == 1


@in_scene("m0", "m1")
async def test_one_whose_weights_a_sleep_dropped_is_brought_all_from_the_checkpoint_on(scene):
    one, two = sleepers(scene, 2, 3)
    await scene.router.update_weights(1, "/w")
    await scene.router.update_weights(2, "/d2")
    await sleep_but_one(scene, level=2)
    one.lacks = ""
    await scene.router.update_weights(3, "/d3")
    two.told.clear()
    assert await scene.router.wake() == "running"
    updates = [label for verb, label in two.told if verb == "update_weights"]
    assert updates == ["3", "1", "2", "3"]
    assert (one.version, two.version) == (3, 3)
    assert not any(problems(scene).values())


@in_scene("m0", "m1")
async def test_weights_that_came_once_are_missed_by_name_until_a_whole_update(scene):
    one, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, PART)
    assert (one.version, two.version) == (1, 0)
    assert await scene.router.wake() == "waits_for_weights"
    assert "until it is updated" in problems(scene)["m1"]
    assert [load.doing for load in scene.router.load().instances] == ["running", "waits_for_weights"]
    assert await asks(scene) == {"m0": 4, "m1": 0}
    assert dropped(scene) == {}
    await scene.router.update_weights(2, "/w")
    assert (one.version, two.version) == (2, 2)
    assert not any(problems(scene).values())


@in_scene("m0", "m1")
async def test_one_that_does_not_take_them_after_its_sleep_is_kept_for_the_next_update(scene):
    one, two = sleepers(scene)
    await sleep_but_one(scene)
    await scene.router.update_weights(1, "/w")
    two.refuses = "WeightsRejected"
    assert await scene.router.wake() == "waits_for_weights"
    assert "the weights were not taken" in problems(scene)["m1"]
    assert await asks(scene) == {"m0": 4, "m1": 0}
    assert dropped(scene) == {}
    two.refuses = ""
    await scene.router.update_weights(2, "/v")
    assert (one.version, two.version) == (2, 2)
    assert not any(problems(scene).values())


@pytest.mark.parametrize("state", ["broken", "waits_for_weights"])
def test_one_without_whole_weights_refuses_a_delta_and_is_brought_all_from_the_checkpoint_on(state):
    @in_scene("m0", "m1")
    async def play(scene):
        one, two = sleepers(scene, 2)
        await scene.router.update_weights(1, "/w")
        two.lacks = state
        await scene.router.update_weights(2, "/d2")
        await settle()
        assert dropped(scene) == {}
        assert (one.version, two.version) == (2, 2)
        assert [label for _, label in two.told] == ["1", "2", "2", "1", "2"]
        assert not any(problems(scene).values())
        assert await asks(scene) == {"m0": 2, "m1": 2}

    play()


@in_scene("m0", "m1")
async def test_where_all_sleep_an_update_is_refused_and_nothing_changes(scene):
    one, two = sleepers(scene)
    await scene.router.sleep()
    with pytest.raises(Asleep):
        await scene.router.update_weights(1, "/w")
    await scene.router.wake()
    assert (one.version, two.version) == (0, 0)
    assert await asks(scene, 2) == {"m0": 1, "m1": 1}


@in_scene("m0", "m1")
async def test_an_update_in_parts_goes_round_one_that_sleeps(scene):
    one, two = sleepers(scene)
    await sleep_but_one(scene)
    obeys = {name: script.obeys for name, script in scene.scripts.items()}

    def parts(name):
        def obey(command):
            reply = obeys[name](command)
            if command.verb in ("begin_update", "update_part", "end_update") and name == "m1":
                return replied(command.number, "Asleep", "no", namespace_of(0), state="asleep")
            if command.verb == "end_update":
                one.version = command.order
                return replied(command.number, "", "", namespace_of(1), command.version, command.order)
            return reply

        return obey

    for name, script in scene.scripts.items():
        script.obeys = parts(name)
    await scene.router.begin_weight_update()
    await scene.router.update_weights(None, PART)
    await scene.router.end_weight_update(1)
    assert dropped(scene) == {}
    assert [verb for verb, _ in two.told] == ["sleep", "begin_update"]
    assert "until it is updated" in problems(scene)["m1"]


# -- out of reach when the others are woken


@in_scene("m0", "m1")
async def test_one_that_was_out_of_reach_is_woken_before_it_gets_requests(scene):
    _, two = await asleep_and_cut_off(scene)
    assert await scene.router.wake() == "running"
    # its memory is not there at first
    two.fails = "WakeFailed"
    mend(scene, "m1")
    while not scene.router.stats().instances[1].is_up:
        await settle(0.01)
    await settle(0.1)
    assert two.told == [("sleep", ()), ("wake", ())]
    assert scene.router.load().asleep
    assert "did not wake" in problems(scene)["m1"]
    assert await asks(scene) == {"m0": 4, "m1": 0}
    await settle(2.0)
    assert two.told == [("sleep", ()), ("wake", ()), ("wake", ())]
    assert not any(problems(scene).values())
    assert not scene.router.load().asleep
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "m1")
async def test_one_that_is_lost_while_it_is_woken_is_woken_again(scene):
    _, two = sleepers(scene)
    await scene.router.sleep()
    obeys, scene.m1.obeys = scene.m1.obeys, None
    waking = asyncio.ensure_future(scene.router.wake())
    await settle()
    cut_off(scene, "m1")
    with pytest.raises(PeerUnreachable):
        await waking
    scene.m1.obeys = obeys
    mend(scene, "m1")
    await settle(8.0)
    assert two.state == "running"
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "m1")
async def test_parts_that_it_missed_are_woken_and_no_others(scene):
    _, two = await asleep_and_cut_off(scene)
    await scene.router.wake(["weights"])
    mend(scene, "m1")
    await settle(5.0)
    assert two.told == [("sleep", ()), ("wake", ("weights",))]
    cut_off(scene, "m1")
    await settle(5.0)
    await scene.router.wake(["kv_cache"])
    await scene.router.wake(["cuda_graph", "scheduling"])
    mend(scene, "m1")
    await settle(5.0)
    assert two.told[2:] == [("wake", ())]
    assert two.state == "running"


@in_scene("m0", "m1")
async def test_one_that_is_to_sleep_again_by_then_sleeps_on(scene):
    _, two = await asleep_and_cut_off(scene)
    await scene.router.wake()
    await scene.router.sleep()
    mend(scene, "m1")
    await settle(5.0)
    assert two.told == [("sleep", ())]
    await scene.router.wake()
    assert two.state == "running"
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "m1")
async def test_a_sleep_that_all_refuse_leaves_the_wake_that_one_owes(scene):
    _, two = await asleep_and_cut_off(scene)
    await scene.router.wake()
    obeys = scene.m0.obeys
    scene.m0.obeys = lambda command: replied(command.number, "UpdateUnderWay", "busy")
    with pytest.raises(UpdateUnderWay):
        await scene.router.sleep()
    scene.m0.obeys = obeys
    mend(scene, "m1")
    await settle(5.0)
    assert two.state == "running"


@in_scene("m0", "m1")
async def test_a_sleep_that_one_did_not_get_gives_its_claim_back(scene):
    sleepers(scene)
    claims, told = scene.m1.claims, []
    scene.m1.claims = lambda command: (told.append(command.verb), claims(command))[1]
    scene.m1.obeys = None
    with pytest.raises(DeadlineExceeded, match="sleep"):
        await scene.router.sleep()
    await settle()
    assert told == ["claim", "release"]


@in_scene("m0", "m1")
async def test_one_that_fails_to_wake_gets_no_requests_until_it_is_woken_again(scene):
    _, two = sleepers(scene)
    await scene.router.sleep()
    two.fails = "WakeFailed"
    with pytest.raises(WakeFailed, match="m1"):
        await scene.router.wake()
    # its caller knows
    await settle(10.0)
    assert two.told == [("sleep", ()), ("wake", ())]
    assert await asks(scene) == {"m0": 4, "m1": 0}
    await scene.router.wake()
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "m1")
async def test_what_another_router_has_put_to_sleep_sleeps_on(scene):
    _, two = sleepers(scene)
    scene.m1.obeys(Command(0, "sleep"))
    cut_off(scene, "m1")
    await settle(5.0)
    mend(scene, "m1")
    await settle(5.0)
    assert two.told == [("sleep", ())]
    assert two.state == "asleep"


@in_scene("m0", "m1")
async def test_one_that_joins_asleep_when_the_others_were_woken_is_woken(scene):
    sleepers(scene)
    await scene.router.sleep()
    scene.router.remove(scene.m1.address)
    await scene.router.wake()
    await settle(3.0)
    await scene.router.add(scene.m1.address)
    await settle(1.0)
    assert await asks(scene) == {"m0": 2, "m1": 2}
    assert not scene.router.load().asleep


# -- one whose weights are broken


@in_scene("m0", "m1")
async def test_requests_go_round_one_whose_weights_are_broken(scene):
    serve(scene.m0, scene.m1)
    scene.m1.answers = lambda submit: scene.m1.failed(submit.request, "WeightsBroken", retriable=False)
    # its status is of before
    assert await asks(scene, 2) == {"m0": 2, "m1": 1}
    assert await asks(scene, 2) == {"m0": 2, "m1": 0}
    scene.m1.status = status_of("broken")
    await settle(2.0)
    assert await asks(scene) == {"m0": 4, "m1": 0}
    # mended
    serve(scene.m1)
    scene.m1.status = scene.m0.status
    await settle(2.0)
    assert await asks(scene) == {"m0": 2, "m1": 2}


@in_scene("m0", "p0", "d0", absent_s=5.0)
async def test_where_all_are_broken_the_answer_is_the_reason(scene):
    for script in scene.scripts.values():
        script.status = status_of("broken")
        script.answers = lambda submit, script=script: script.failed(submit.request, "WeightsBroken", retriable=False)
    await settle(2.0)
    for prefill, decoders in [("", ()), (scene.p0.address, ()), ("", (scene.d0.address,))]:
        began = asyncio.get_running_loop().time()
        with pytest.raises(WeightsBroken, match="0: no"):
            await scene.router.complete(PROMPT, prefill=prefill, decoders=decoders)
        assert asyncio.get_running_loop().time() - began < 1.0
