"""All instances of a router have one weights id: who comes with another, updates that are cancelled, two routers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import pytest

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import BadInput, EngineClosed, PeerRefused, PeerUnreachable, UpdateUnderWay, WeightsRejected
from fdasync.pd.messages import BlockNews, Command, Done
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import synthetic_config, until
from tests.router_helpers import NAMESPACE, in_scene, settle

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = tuple(range(12))
NEW, OTHER = b"w" * 16, b"o" * 16


def serve(*scripts):
    for script in scripts:
        script.answers = lambda submit, script=script: script.end(submit.request, (7,))


def problems(scene):
    return {one.name: one.problem for one in scene.router.stats().instances}


def dropped(scene):
    return {one.address: one.problem for one in scene.router.stats().dropped}


async def come_back(scene, name, namespace=NAMESPACE):
    """Another process takes its place, and does at first nothing that it is told."""
    scene.scripts[name].die()
    await settle(4.0)
    script = scene.begin(name, namespace)
    script.obeys = None
    await settle(2.0)
    return script


# -- who comes with others


@in_scene("m0", "m1")
async def test_one_that_comes_back_with_old_weights_is_brought_up_to_date_before_it_serves(scene):
    await scene.router.update_weights(1, "/w", "keep")
    again = await come_back(scene, "m1")
    (command,) = again.commands
    assert (command.verb, command.version, command.path, command.mode) == ("update_weights", 1, "/w", "keep")
    assert "other weights" in problems(scene)["m1"]
    serve(scene.m0, again)
    # it would be chosen, by load
    scene.m0.status = again.status.__class__("running", 5, 500, 1, 0, 50, 100)
    await settle(1.0)
    for _ in range(3):
        await scene.router.complete(PROMPT)
    assert (len(scene.m0.submits), len(again.submits)) == (3, 0)
    again.router.send(Done(command.number, "", "", NEW, 1))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}
    await scene.router.complete(PROMPT)
    assert len(again.submits) == 1
    assert scene.router.stats().instances[1].weight_version == 1
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
    assert [command.version for command in scene.m1.commands] == [1]
    assert problems(scene) == {"m0": "", "m1": ""}
    assert dropped(scene) == {}


@in_scene("m0", "m1")
async def test_one_that_took_the_version_already_is_up_to_date(scene):
    """Its answer was lost; it says that the version was used before."""
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    again.router.send(Done(again.commands[0].number, "BadInput", "1 was used before", NEW, 1))
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
        again.router.send(Done(again.commands[0].number, error, "no such folder", namespace, 1))
        await settle()
        ((address, problem),) = dropped(scene).items()
        assert address == again.address
        assert "did not come to version 1" in problem
        assert len(scene.router.fleet.members) == 1

    play()


@in_scene("m0", "m1", command_s=20.0)
async def test_one_that_never_answers_is_dropped_and_one_whose_weights_change_is_asked_again(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    again.router.send(Done(again.commands[0].number, "UpdateUnderWay", "wait", NAMESPACE, 0))
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
    again.router.send(Done(again.commands[0].number, "", "", NEW, 1))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}


@in_scene("m0", "m1")
async def test_one_that_goes_and_comes_between_two_questions_is_told_again(scene):
    await scene.router.update_weights(1, "/w")
    first = await come_back(scene, "m1")
    first.router.send(Done(first.commands[0].number, "UpdateUnderWay", "wait", NAMESPACE, 0))
    await settle(0.1)
    await first.links.aclose(0.0)
    scene.begin("m1").obeys = lambda command: Done(command.number, "", "", NEW, 1)
    await settle(3.0)
    assert problems(scene) == {"m0": "", "m1": ""}


@in_scene("m0", "m1")
async def test_one_that_somebody_else_updates_meanwhile_is_not_dropped(scene):
    refusal = lambda command: Done(command.number, "UpdateUnderWay", "wait", NAMESPACE, 0)  # noqa: E731
    scene.m1.obeys = refusal
    await scene.router.update_weights(1, "/w")
    await settle(1.0)
    assert "other weights" in problems(scene)["m1"]
    scene.m1.obeys = lambda command: Done(command.number, "", "", NEW, 1)
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
async def test_one_that_has_nobody_to_differ_from_may_have_any(scene):
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
    joined.router.send(Done(joined.commands[0].number, "", "", NEW, 1))
    await asyncio.wait_for(task, 1.0)
    other = scene.begin("m2")
    other.obeys = lambda command: Done(command.number, "WeightsRejected", "no such folder", NAMESPACE)
    with pytest.raises(PeerRefused, match="no such folder"):
        await scene.router.add(other.address)


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
    scene.m0.router.send(Done(scene.m0.commands[0].number, "", "", NEW, 1))
    await update
    await asyncio.wait_for(task, 1.0)
    assert [command.version for command in joined.commands] == [1]


@in_scene("m0", "m1")
async def test_an_update_waits_for_one_that_is_being_brought_up_to_date(scene):
    await scene.router.update_weights(1, "/w")
    again = await come_back(scene, "m1")
    update = asyncio.ensure_future(scene.router.update_weights(2, "/v"))
    await settle(1.0)
    assert len(scene.m0.commands) == 1
    again.router.send(Done(again.commands[0].number, "", "", NEW, 1))
    await settle()
    scene.m0.obeys = again.obeys = None
    assert [command.version for command in again.commands] == [1, 2]
    again.router.send(Done(again.commands[1].number, "", "", NEW, 2))
    await update


# -- somebody else updates them


@in_scene("p0", "d0", "d1")
async def test_instances_that_somebody_else_updates_are_followed_when_most_have_changed(scene):
    await settle()
    serve(scene.p0, scene.d0, scene.d1)

    def changes(script):
        script.router.send(BlockNews(OTHER, 1, True, (), ()))

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
        script.router.send(BlockNews(OTHER, 1, True, (), ()))
        await settle()
    again = await come_back(scene, "m0")
    assert again.commands == []
    for script in (scene.m1, scene.m2):
        scene.network.partition(scene.router._wire, script.wire)
    await settle(5.0)
    again.obeys = lambda command: Done(command.number, "", "", NEW, 2)
    await scene.router.update_weights(2, "/v")
    for script in (scene.m1, scene.m2):
        script.namespace = OTHER
        scene.network.heal(scene.router._wire, script.wire)
    await settle(5.0)
    assert [[command.version for command in script.commands] for script in (scene.m1, scene.m2)] == [[1, 2], [1, 2]]
    assert not any(problems(scene).values())


# -- earlier weights


@pytest.mark.parametrize("knows", ["it served them", "it followed", "its own update, which another's replaced"])
def test_nobody_is_followed_to_an_earlier_version_than_the_fleet_had(knows):
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
                script.router.send(BlockNews(OTHER, 1, True, (), ()))
                script.router.send(BlockNews(OTHER, 5, False, (), ()))
            await settle()
        serve(scene.m0, scene.m1)
        assert {one.weight_version for one in scene.router.stats().instances} == {5}
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
        first.router.send(BlockNews(NEW, 4, True, (), ()))
        await settle()
        assert "of version 4, which is earlier than version 5" in problems(scene)["m0"]
        first.router.send(BlockNews(b"l" * 16, 6, True, (), ()))
        await settle()
        assert [name for name, problem in problems(scene).items() if problem] == ["m1"]
        await scene.router.complete(PROMPT)
        assert len(first.submits) == 1

    play()


@in_scene("m0", "m1", "m2")
async def test_one_that_came_with_what_the_others_get_later_waits_for_nobody(scene):
    await settle()
    for script in scene.scripts.values():
        script.router.send(BlockNews(OTHER, 5, True, (), ()))
    await settle()
    scene.m2.die()
    await settle(4.0)
    early = scene.begin("m2", NEW)
    early.version = 6
    await settle(2.0)
    assert "other weights" in problems(scene)["m2"]
    for script in (scene.m0, scene.m1):
        script.router.send(BlockNews(NEW, 6, True, (), ()))
    await settle()
    assert not any(problems(scene).values())
    assert scene.router.fleet.may_serve(early.address, ())
    serve(early)
    await scene.router.complete(PROMPT, prefill=early.address)


@in_scene("m0", "m1")
async def test_a_router_s_own_update_may_go_back(scene):
    """A version is its caller's label."""
    for version, namespace in ((5, NEW), (3, OTHER)):
        for script in (scene.m0, scene.m1):
            script.obeys = lambda command, version=version, namespace=namespace: Done(
                command.number, "", "", namespace, version
            )  # fmt: skip
        await scene.router.update_weights(version, "/w")
    again = await come_back(scene, "m0", b"l" * 16)
    assert [command.version for command in again.commands] == [3]
    again.router.send(Done(again.commands[0].number, "", "", OTHER, 3))
    await settle()
    assert problems(scene) == {"m0": "", "m1": ""}
    serve(scene.m1, again)
    await scene.router.complete(PROMPT)


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
    scene.m1.router.send(Done(scene.m1.commands[0].number, "", "", NEW, 1))
    await again
    await task
    assert [len(script.commands) for script in (scene.m0, scene.m1)] == [1, 1]
    assert {one.weight_version for one in scene.router.stats().instances} == {1}
    with pytest.raises(BadInput, match="was used before"):
        await scene.router.update_weights(1, "/w")


@in_scene("m0")
async def test_its_end_is_told_to_whoever_gives_the_same_again(scene):
    for obeys in (
        lambda command: Done(command.number, "WeightsRejected", "bad", NAMESPACE),
        lambda command: Done(command.number, "", "", NEW, 1),
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
    assert len(scene.m0.commands) == 2


@in_scene("m0", "m1", command_s=5.0)
async def test_a_version_that_nobody_answered_for_in_time_can_be_given_again(scene):
    late = []
    scene.m0.obeys = scene.m1.obeys = late.append
    with pytest.raises(TimeoutError):
        await scene.router.update_weights(1, "/w")
    # both took it after all
    for script in (scene.m0, scene.m1):
        script.router.send(BlockNews(NEW, 1, True, (), ()))
        script.obeys = lambda command: Done(command.number, "BadInput", "1 was used before", NEW, 1)
    await settle()
    serve(scene.m0, scene.m1)
    await scene.router.complete(PROMPT)
    await scene.router.update_weights(1, "/w")
    assert {one.weight_version for one in scene.router.stats().instances} == {1}
    assert not any(problems(scene).values())


@in_scene("m0")
async def test_closing_ends_an_update_and_whoever_waits_for_it(scene):
    scene.m0.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    await scene.router.aclose()
    with pytest.raises(EngineClosed):
        await update


# -- two routers


@in_scene("m0", "m1", "m2")
async def test_who_finds_another_routers_update_changes_nothing(scene):
    scene.m1.claims = lambda command: Done(command.number, "UpdateUnderWay", "of another router")
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


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder with other weights."""
    (tmp_path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 77}))
    return str(tmp_path)


def instance(tmp_path: Path, role: str, name: str) -> Instance:
    return Instance(
        synthetic_config({"load_s": 0.1}, role=role, host_blocks=64),
        listen=f"ipc://{tmp_path}/{name}", name=name, transport="shm",
    )  # fmt: skip


async def test_of_two_routers_that_update_at_once_one_does(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0", "d1")]
    p0, d0, d1 = (
        instance(tmp_path, role, name) for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1"))
    )
    async with p0, d0, d1, fdasync.connect(addresses) as one, fdasync.connect(addresses) as two:
        outcomes = await asyncio.gather(
            one.update_weights(10, weights), two.update_weights(11, weights), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "UpdateUnderWay"]
        version = 10 if outcomes[0] is None else 11
        assert {each.engine.stats().scheduler.weight_version for each in (p0, d0, d1)} == {version}
        assert p0._site is not None
        wanted = {p0._site.namespace()}
        # it has served nothing: no block tells the other of it
        await until(
            lambda: all({each.namespace for each in router.fleet.up()} == wanted for router in (one, two)), every_s=0.01
        )
        for router in (one, two):
            result = await router.complete(list(range(40)), SamplingParams(max_tokens=3), deadline_s=10)
            assert [span.version for span in result.samples[0].weight_version] == [version]
            assert router.stats().dropped == ()
            assert not any(each.problem for each in router.stats().instances)


async def test_an_instance_is_claimed_until_the_update_or_the_link_is_over(tmp_path: Path, weights: str) -> None:
    address = f"ipc://{tmp_path}/m0"
    async with instance(tmp_path, "mixed", "m0"), fdasync.connect([address]) as two:
        (member,) = two.fleet.up()
        words = Command(0, "update_weights", version=5, path=weights)
        async with fdasync.connect([address]) as one:
            await one.commands._claim_all()
            with pytest.raises(UpdateUnderWay, match="m0"):
                await two.update_weights(1, weights)
            with pytest.raises(UpdateUnderWay):
                await two.commands.one(member, words, 5.0)
            await one.update_weights(1, weights)
            await two.update_weights(2, weights)
            await one.commands._claim_all()
        async with asyncio.timeout(5):
            while True:
                # it knows in a moment that the other said goodbye
                with contextlib.suppress(UpdateUnderWay):
                    await two.update_weights(3, weights)
                    break
        assert two.stats().instances[0].weight_version == 3


async def test_a_decode_instance_that_is_started_anew_serves_the_new_weights(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0")]
    async with instance(tmp_path, "prefill", "p0"), fdasync.Router(addresses[:1]) as router:
        async with instance(tmp_path, "decode", "d0"):
            await router.add(addresses[1])
            await router.update_weights(7, weights)
        await until(lambda: not router.stats().instances[1].is_up, every_s=0.01)
        async with instance(tmp_path, "decode", "d0") as again:
            await router.add(addresses[1])
            results = [
                await router.complete([*range(20), number], SamplingParams(max_tokens=3), deadline_s=10)
                for number in range(4)
            ]
            assert again.engine.stats().scheduler.weight_version == 7
        versions = {span.version for result in results for span in result.samples[0].weight_version}
        assert versions == {7}
        assert router.stats().dropped == ()


@in_scene("m0", "m1", "m2")
async def test_an_update_that_another_routers_came_after_is_not_told_any_more(scene):
    await scene.router.update_weights(1, "/w", "keep")
    again = await come_back(scene, "m2")
    (command,) = again.commands
    # another router holds it, and brings all to weights of its own
    again.router.send(Done(command.number, "UpdateUnderWay", "of another", NAMESPACE, 0))
    for script in (scene.m0, scene.m1, again):
        script.router.send(BlockNews(OTHER, 1, True, (), ()))
    await settle(3.0)
    assert [told.version for told in again.commands] == [1]
    assert dropped(scene) == {}
    assert problems(scene) == {"m0": "", "m1": "", "m2": ""}
