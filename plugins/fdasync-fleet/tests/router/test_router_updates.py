"""Updates of a router's instances that are cancelled, given again, or meet another router's."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import Mock

import pytest
from fdasync_fleet.router.instances import InstanceHandle
from weights_scene import Sleeper, come_back, dropped, problems, serve

from fdasync.errors import (
    BadInput,
    EngineClosed,
    InstanceLost,
    PeerBusy,
    UpdateUnderWay,
    WeightsRejected,
)
from fdasync.testing import run_sim
from tests.support.broadcast_runner import LOW as META
from tests.support.broadcast_runner import part
from tests.support.router_scene import NAMESPACE, Command, done, in_scene, kv_batch, replied, scene, settle

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPT = tuple(range(12))


NEW, OTHER = b"w" * 16, b"o" * 16


# -- updates that are cancelled


@in_scene("m0", "m1")
async def test_an_update_whose_caller_is_cancelled_goes_on_and_can_be_waited_for(scene):
    scene.m1.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    update.cancel()
    await settle()
    task = asyncio.ensure_future(scene.router.complete(PROMPT))
    await settle()
    assert scene.m0.submits == []
    with pytest.raises(UpdateUnderWay):
        await scene.router.update_weights(2, "/w")
    again = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    assert not again.done()
    serve(scene.m0, scene.m1)
    scene.m1.router.send(done(scene.m1.commands[0].number, "", "", NEW, 1))
    await again
    await task
    assert [len(script.commands) for script in (scene.m0, scene.m1)] == [1, 1]
    assert {one.weight_version for one in scene.router.stats().instances} == {"1"}
    await scene.router.update_weights(2, "/v")
    # a label may return
    await scene.router.update_weights(1, "/w")
    assert [(command.version, command.order) for command in scene.m0.commands] == [("1", 1), ("2", 2), ("1", 3)]


@in_scene("m0")
async def test_one_that_has_ended_is_made_again_by_whoever_gives_the_same_again(scene):
    for obeys in (
        lambda command: done(command.number, "WeightsRejected", "bad", NAMESPACE),
        lambda command: done(command.number, "", "", NEW, 1),
    ):
        scene.m0.obeys = obeys
        update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
        await asyncio.sleep(0)
        update.cancel()
        await settle()
        if obeys(scene.m0.commands[0]).error:
            with pytest.raises(WeightsRejected):
                await scene.router.update_weights(1, "/w")
        else:
            await scene.router.update_weights(1, "/w")
    # a trainer may have begun anew, and send tensors again; a folder of the weights in use changes nothing
    assert len(scene.m0.commands) == 4


# -- one that begins as another one ends


async def at_once(call, told: asyncio.Event):
    """Repeat a call that is refused, in each turn after an instance has answered."""
    while True:
        await told.wait()
        told.clear()
        for _ in range(60):
            try:
                await call()
                return
            except UpdateUnderWay:
                await asyncio.sleep(0)


async def in_parts(router):
    await router.begin_weight_update()
    await router.end_weight_update()


CHANGES = {
    "folder": lambda router, label: router.update_weights(label, "/w"),
    "label": lambda router, label: router.set_weight_version(label),
    "group": lambda router, label: router.update_weights(label, part(META)),
    "parts": lambda router, _label: in_parts(router),
    "refused": lambda router, _label: refused(router),
}


def said(command):
    if command.path == "/bad":
        return done(command.number, "WeightsRejected", "bad", NAMESPACE)
    return replied(command.number, "", "", NEW, command.version, command.order)


async def refused(router):
    with pytest.raises(WeightsRejected):
        await router.update_weights("bad", "/bad")


@pytest.mark.parametrize("second", CHANGES)
@pytest.mark.parametrize("first", CHANGES)
def test_an_update_that_begins_as_another_one_ends_is_a_barrier_too(first: str, second: str, monkeypatch) -> None:
    async def play() -> None:
        async with scene("m0") as made:
            router, script = made.router, made.m0
            loop, logged = asyncio.get_running_loop(), []
            loop.set_exception_handler(lambda _, context: logged.append(context))
            serve(script)
            asked: list[Command] = []
            script.obeys = asked.append
            told, on_reply = asyncio.Event(), router.commands.on_reply
            monkeypatch.setattr(router.commands, "on_reply", lambda *words: (on_reply(*words), told.set()))
            began = loop.time()
            calls = [asyncio.ensure_future(CHANGES[first](router, "one"))]
            await asyncio.sleep(0)
            calls.append(asyncio.ensure_future(at_once(lambda: CHANGES[second](router, "two"), told)))
            requests = []
            answered = 0
            while not all(call.done() for call in calls):
                requests.append(asyncio.ensure_future(router.complete(PROMPT)))
                await settle()
                # whichever is under way, nobody is served
                assert router.load().doing == "updating"
                assert script.submits == []
                assert len(asked) == answered + 1, "one waits for the other"
                command = asked[answered]
                script.router.send(said(command))
                answered += 1
                await settle(0.05)
            await asyncio.gather(*calls, *requests)
            assert loop.time() - began < 10, "requests wait for the updates alone"
            assert router.load().doing == "running"
            assert logged == []

    run_sim(play())


def test_a_router_that_closes_as_an_update_in_parts_begins_ends_that_too() -> None:
    async def play() -> None:
        async with scene("m0") as made:
            begin = asyncio.ensure_future(made.router.begin_weight_update())
            await asyncio.sleep(0)
            await made.router.aclose()
            with pytest.raises(EngineClosed):
                await begin

    run_sim(play())


@in_scene("m0", "m1", command_s=5.0)
async def test_a_version_that_nobody_answered_for_in_time_can_be_given_again(scene):
    late = []
    scene.m0.obeys = scene.m1.obeys = late.append
    with pytest.raises(TimeoutError):
        await scene.router.update_weights(1, "/w")
    # both took it after all
    for script in (scene.m0, scene.m1):
        script.router.send(kv_batch(NEW, 1, True, (), ()))
        # they compare the folder with what they have
        script.obeys = lambda command: done(command.number, "", "", NEW, 1)
    await settle()
    serve(scene.m0, scene.m1)
    await scene.router.complete(PROMPT)
    await scene.router.update_weights(1, "/w")
    assert {one.weight_version for one in scene.router.stats().instances} == {"1"}
    assert not any(problems(scene).values())


@in_scene("m0")
async def test_closing_ends_an_update_and_whoever_waits_for_it(scene):
    scene.m0.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    await scene.router.aclose()
    with pytest.raises(EngineClosed):
        await update


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.5])
def test_a_caller_that_is_cancelled_leaves_the_closing_to_go_on(after_s: float) -> None:
    async def play() -> None:
        async with scene("m0") as made:
            made.m0.answers = lambda submit: made.m0.tokens(submit.request, 7)
            made.m0.obeys = None
            request = asyncio.ensure_future(made.router.complete(PROMPT))
            await settle()
            update = asyncio.ensure_future(made.router.update_weights(1, "/w"))
            await settle()
            closing = asyncio.ensure_future(made.router.aclose())
            await asyncio.sleep(after_s)
            closing.cancel()
            await asyncio.sleep(0)
            # whoever closes it once more waits until it is closed
            await made.router.aclose()
            with pytest.raises(EngineClosed):
                await update
            with pytest.raises(InstanceLost):
                await request

    run_sim(play())


@pytest.mark.parametrize("first", ["abandon", "end", "part"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_one_that_ends_meanwhile_needs_no_abandoning(first, cancelled):
    async def play() -> None:
        logged = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        async with scene("m0") as made:
            router = made.router
            await router.begin_weight_update()
            if first == "part":
                made.m0.obeys = lambda command: done(command.number, "WeightsRejected", "bad", NAMESPACE)
            calls = {
                "abandon": router.abandon_weight_update,
                "end": router.end_weight_update,
                "part": lambda: router.update_weights(None, part()),
            }
            one = asyncio.ensure_future(calls[first]())
            later = [asyncio.ensure_future(router.abandon_weight_update()) for _ in range(2)]
            end = asyncio.ensure_future(router.end_weight_update())
            await asyncio.sleep(0)
            if cancelled:
                end.cancel()
            outcomes = await asyncio.gather(one, *later, end, return_exceptions=True)
            assert isinstance(outcomes[0], WeightsRejected) if first == "part" else outcomes[0] is None
            assert outcomes[1:3] == [None, None]
            assert isinstance(outcomes[3], asyncio.CancelledError if cancelled else (BadInput, WeightsRejected))
            await settle()
            assert not router.commands.is_updating
        gc.collect()
        assert logged == []

    run_sim(play())


# -- two routers


@in_scene("m0")
async def test_a_label_for_weights_that_another_router_has_just_brought_says_so(scene):
    def claimed(command):
        # its word of the new weights comes before its answer
        scene.m0.router.send(kv_batch(OTHER, 7, True, (), ()))
        return done(command.number, "", "", OTHER, 7)

    scene.m0.claims = claimed
    with pytest.raises(UpdateUnderWay, match="of another router, whose weights this one is about to adopt"):
        await scene.router.set_weight_version(9)
    scene.m0.claims = lambda command: replied(command.number)
    await settle()
    # it has adopted them
    scene.m0.obeys = lambda command: replied(command.number, "", "", OTHER, command.version, command.order)
    await scene.router.set_weight_version(9)
    assert {one.weight_version for one in scene.router.stats().instances} == {"9"}


@pytest.mark.parametrize(("kind", "given", "label"), [
    ("update", 1, "1"), ("update", None, "8"), ("label", 1, "1"), ("parts", 1, "1"), ("parts", None, "8"),
])  # fmt: skip
def test_what_another_router_brought_a_moment_ago_counts_as_earlier(kind, given, label):
    async def play() -> None:
        async with scene("m0", "m1") as made:
            # m1 has told of it nowhere but in its answer to the claim
            made.m1.claims = lambda command: done(command.number, "", "", OTHER, 7)
            if kind == "update":
                await made.router.update_weights(given, "/w")
            elif kind == "label":
                await made.router.set_weight_version(given)
            else:
                await made.router.begin_weight_update()
                await made.router.update_weights(None, part())
                await made.router.end_weight_update(given)
            for script in (made.m0, made.m1):
                last = script.commands[-1]
                assert (last.version, last.order) == (label, 8)

    run_sim(play())


@in_scene("m0", "m1")
async def test_an_update_that_names_its_label_is_not_one_with_one_that_does_not(scene):
    # the label that counts one up follows what another router brought
    scene.m1.claims = lambda command: done(command.number, "", "", OTHER, 7)
    unnamed = [asyncio.ensure_future(scene.router.update_weights(None, "/w")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UpdateUnderWay):
        await scene.router.update_weights(1, "/w")
    await asyncio.gather(*unnamed)
    assert [(command.version, command.order) for command in scene.m0.commands] == [("8", 8)]


@in_scene("m0", "m1", command_s=5.0)
async def test_an_update_in_parts_that_is_left_alone_is_abandoned_under_its_claim(scene):
    told, claims, obeys = [], scene.m0.claims, scene.m0.obeys
    scene.m0.claims = lambda command: (told.append(command.verb), claims(command))[1]
    scene.m0.obeys = lambda command: (told.append(command.verb), obeys(command))[1]
    await scene.router.begin_weight_update()
    await settle(30.0)
    # with that the claim ends at the instance, and no sooner
    assert told == ["claim", "begin_update", "abandon_update"]


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_defect_in_an_update_fails_the_router(in_parts, monkeypatch):
    """Its callers are told that the router is closed, or the defect, and it is not lost."""

    async def play() -> None:
        async with scene("m0", "m1") as made:
            wrong = TypeError("a defect")
            monkeypatch.setattr(made.router.commands, "_agree", Mock(side_effect=wrong))
            if in_parts:
                await made.router.begin_weight_update()
                await made.router.update_weights(None, part())
            ended = made.router.end_weight_update() if in_parts else made.router.update_weights(1, "/w")
            with pytest.raises(EngineClosed if in_parts else TypeError):
                await ended
            await settle()
            assert made.router.failure is wrong

    run_sim(play())


@in_scene("m0", "m1")
async def test_an_update_in_parts_that_ends_as_it_begins_counts_one_up(scene):
    await scene.router.update_weights(41, "/w")
    begin = asyncio.ensure_future(scene.router.begin_weight_update())
    await asyncio.sleep(0)
    calls = [scene.router.update_weights(None, part()), scene.router.end_weight_update()]
    await asyncio.gather(begin, *calls)
    assert (scene.m0.commands[-1].verb, scene.m0.commands[-1].version) == ("end_update", "42")


@in_scene("m0", "m1", "m2")
async def test_a_router_that_finds_another_routers_update_changes_nothing(scene):
    scene.m1.claims = lambda command: done(command.number, "UpdateUnderWay", "of another router")
    released = []
    claims = scene.m0.claims
    scene.m0.claims = lambda command: (released.append(command.verb), claims(command))[1]
    with pytest.raises(UpdateUnderWay, match="m1"):
        await scene.router.update_weights(1, "/w")
    await settle()
    # in the order of their addresses, and back what was claimed
    assert released == ["claim", "release"]
    assert not any(script.commands for script in scene.scripts.values())
    assert dropped(scene) == {}
    scene.m1.claims = claims
    await scene.router.update_weights(1, "/w")


@in_scene("m0", "m1", "m2")
async def test_an_update_that_another_routers_came_after_is_not_told_any_more(scene):
    await scene.router.update_weights(1, "/w", "keep")
    again = await come_back(scene, "m2")
    (command,) = again.commands
    # another router holds it, and brings all to weights of its own
    again.router.send(done(command.number, "UpdateUnderWay", "of another", NAMESPACE, 0))
    for script in (scene.m0, scene.m1, again):
        script.router.send(kv_batch(OTHER, 1, True, (), ()))
    await settle(3.0)
    assert [told.version for told in again.commands] == ["1"]
    assert dropped(scene) == {}
    assert problems(scene) == {"m0": "", "m1": "", "m2": ""}


# -- what comes in the turn in which an instance has come up to date, or awake


def handle_of(scene, name):
    return next(one for one in scene.router.table.instances.values() if one.peer.name == name)


@in_scene("m0", "m1")
async def test_one_that_tells_of_other_weights_as_it_has_come_up_to_date_is_judged(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    (command,) = again.commands
    handle, loop = handle_of(scene, "m1"), asyncio.get_running_loop()
    told, has = kv_batch(OTHER, 5, True, (), ()), InstanceHandle.has

    def then(instance, *words):
        has(instance, *words)
        # behind the last step of the task that brought it there, and ahead of who hears of the task's end
        loop.call_soon(scene.router.on_message, handle.peer, told, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InstanceHandle, "has", then)
        again.router.send(done(command.number, "", "", NEW, 1))
        await settle(0.1)
    assert handle.namespace == OTHER
    assert handle.behind, "it gets no requests with other weights"


@in_scene("m0", "m1")
async def test_one_that_owes_a_wake_as_another_wake_of_it_ends_is_woken(scene):
    both = [Sleeper(script) for script in scene.scripts.values()]
    await scene.router.sleep()
    scene.m1.links.hang_up(scene.m1.router)
    await settle(0.1)
    await scene.router.wake()
    handle, wakes, loop = handle_of(scene, "m1"), scene.router.commands.wakes, asyncio.get_running_loop()
    took, late = wakes._took, []

    def then(instance, outcome):
        error = took(instance, outcome)
        if instance is handle and not late:
            late.append(outcome)
            loop.call_soon(took, handle, PeerBusy("m1", 0))
        return error

    wakes._took = then
    await settle(20.0)
    assert late, "it was woken late"
    assert handle.memory == "as_told"
    assert [verb for verb, _ in both[1].told].count("wake") == 2
