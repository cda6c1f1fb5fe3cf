"""A router's pauses: they go to all instances, in a mode, and are taken back."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from fdasync import Doing
from fdasync.errors import BadInput, DeadlineExceeded, UpdateUnderWay
from tests.support.router_scene import done, in_scene, settle, standing

PROMPT = tuple(range(12))


def ask(scene, **fields):
    return asyncio.ensure_future(scene.router.complete(PROMPT, **fields))


@in_scene("m0", "m1")
async def test_pause_and_resume_go_to_all(scene):
    await scene.router.pause()
    await scene.router.resume()
    for script in (scene.m0, scene.m1):
        assert [command.verb for command in script.commands] == ["pause", "resume"]


@in_scene("m0", "m1")
async def test_sleep_and_wake_go_to_all_with_their_words(scene):
    await scene.router.sleep(2, "wait", tags=["weights"])
    await scene.router.wake(["weights", "kv_cache"])
    await scene.router.wake()
    # none named: all are meant
    await scene.router.wake([])
    with pytest.raises(BadInput, match="level"):
        await scene.router.sleep(5)
    with pytest.raises(BadInput, match="tags"):
        await scene.router.wake(["all"])
    for script in (scene.m0, scene.m1):
        told = [(command.verb, *command.values.values()) for command in script.commands]
        assert told == [
            ("sleep", 2, "wait", ("weights",)),
            ("wake", ("weights", "kv_cache")),
            ("wake", ()),
            ("wake", ()),
        ]


@in_scene("m0", "m1")
async def test_a_wake_tells_what_the_farthest_instance_does(scene):
    obeys = scene.m0.obeys
    for first, second, farthest in [
        ("running", "running", "running"),
        ("running", "waits_for_weights", "waits_for_weights"),
        ("asleep", "paused", "asleep"),
        ("broken", "waits_for_weights", "broken"),
    ]:
        scene.m0.obeys = lambda command, said=first: standing(obeys(command), state=said)
        scene.m1.obeys = lambda command, said=second: standing(obeys(command), state=said)
        assert await scene.router.wake() == farthest
        said = [one.doing for one in scene.router.load().instances]
        assert said == [first, second]
        assert scene.router.load().doing == min(said, key=get_args(Doing).index)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
def test_a_pause_goes_to_all_with_its_mode(mode):
    @in_scene("m0", "m1")
    async def play(scene):
        running = ask(scene)
        held = asyncio.ensure_future(scene.router.complete(PROMPT, prefill=scene.m1.address))
        await settle()
        scene.router.dispatch.hold()
        outside = ask(scene)
        await settle()
        pausing = asyncio.ensure_future(scene.router.pause(mode))
        await settle()
        for script in (scene.m0, scene.m1):
            assert [(command.verb, command.mode) for command in script.commands] == [("pause", mode)]
            aborts = [submit.request for submit in script.submits] if mode == "abort" else []
            assert script.aborts == aborts
        await pausing
        # one that no instance has ends at once
        assert outside.done() == (mode == "abort")
        scene.router.dispatch.release()
        await scene.router.resume()
        await settle()
        for script in (scene.m0, scene.m1):
            for submit in script.submits:
                script.end(submit.request, (7,), reason="abort" if mode == "abort" else "length")
        for task in (running, held, outside):
            assert (await task).finish_reason == ("abort" if mode == "abort" else "length")

    play()


@pytest.mark.parametrize("refused", [True, False])
def test_a_sleep_that_ends_requests_ends_none_where_it_is_refused(refused):
    @in_scene("m0")
    async def play(scene):
        obeys = scene.m0.obeys
        if refused:
            scene.m0.obeys = lambda command: done(command.number, "UpdateUnderWay", "of this engine")
        running = ask(scene)
        await settle()
        scene.router.dispatch.hold()
        outside = ask(scene)
        await settle()
        if refused:
            with pytest.raises(UpdateUnderWay):
                await scene.router.sleep(1, "abort")
        else:
            await scene.router.sleep(1, "abort")
        await settle()
        assert outside.done() is not refused
        assert len(scene.m0.aborts) == (0 if refused else 1)
        scene.m0.obeys = obeys
        scene.router.dispatch.release()
        await settle()
        for submit in scene.m0.submits:
            scene.m0.end(submit.request, (7,), reason="length" if refused else "abort")
        for task in (running, outside):
            assert (await task).finish_reason == ("length" if refused else "abort")

    play()


@in_scene("m0", "m1", command_s=5.0, request_deadline_s=100.0)
async def test_one_that_waits_for_requests_has_their_time(scene):
    scene.m0.obeys = None
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await scene.router.pause()
    assert asyncio.get_running_loop().time() - began == pytest.approx(5.0, abs=0.2)
    with pytest.raises(DeadlineExceeded):
        await scene.router.pause("wait")
    assert asyncio.get_running_loop().time() - began == pytest.approx(110.0, abs=0.4)


@in_scene("m0", "m1")
async def test_a_cancelled_pause_is_taken_back_unless_another_one_is_there(scene):
    async def cancelled():
        pausing = asyncio.ensure_future(scene.router.pause("wait"))
        await settle()
        pausing.cancel()
        await asyncio.wait([pausing])
        await settle()
        verbs = [command.verb for command in scene.m1.commands]
        assert verbs == [command.verb for command in scene.m0.commands]
        scene.m0.commands.clear()
        scene.m1.commands.clear()
        return verbs

    done = scene.m0.obeys
    scene.m0.obeys = None
    assert await cancelled() == ["pause", "resume"]
    other = asyncio.ensure_future(scene.router.pause())
    await settle()
    assert await cancelled() == ["pause", "pause"]
    other.cancel()
    await asyncio.wait([other])
    await settle()
    assert [command.verb for command in scene.m0.commands] == ["resume"]
    scene.m0.commands.clear()
    scene.m1.commands.clear()
    scene.m0.obeys = done
    await scene.router.pause()
    scene.m0.commands.clear()
    scene.m1.commands.clear()
    scene.m0.obeys = None
    assert await cancelled() == ["pause"]
