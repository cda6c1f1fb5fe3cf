"""Updates of a router's instances that are cancelled, given again, or meet another router's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.router.instances import InstanceHandle
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_fleet.verbs import Verbs, verb

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import (
    BadInput,
    EngineClosed,
    InstanceLost,
    PeerBusy,
    UpdateUnderWay,
    WeightsDiffer,
    WeightsRejected,
)
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import run_sim, synthetic_config, until
from tests.support.broadcast_runner import LOW as META
from tests.support.broadcast_runner import part
from tests.support.router_scene import NAMESPACE, Command, done, in_scene, kv_batch, replied, scene, settle

if TYPE_CHECKING:
    from pathlib import Path
from weights_scene import Sleeper, come_back, dropped, problems, serve

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


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder with other weights."""
    (tmp_path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 77}))
    return str(tmp_path)


def instance(tmp_path: Path, role: str, name: str) -> Instance:
    return Instance(
        synthetic_config({"load_s": 0.1}, role=role, host_blocks=64, leases=LEASES),
        listen=f"ipc://{tmp_path}/{name}", name=name, links=LINKS, transport="shm",
    )  # fmt: skip


connect = partial(fdasync.connect, links=LINKS)


@pytest.mark.ci
async def test_of_two_routers_that_update_at_once_one_does(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0", "d1")]
    p0, d0, d1 = (
        instance(tmp_path, role, name) for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1"))
    )
    async with p0, d0, d1, connect(addresses) as one, connect(addresses) as two:
        outcomes = await asyncio.gather(
            one.update_weights(10, weights), two.update_weights(11, weights), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "UpdateUnderWay"]
        version = "10" if outcomes[0] is None else "11"
        assert {each.engine.stats().scheduler.weight_version for each in (p0, d0, d1)} == {version}
        assert p0._context is not None
        wanted = {p0._context.namespace()}
        # it has served nothing: no block tells the other of it
        await until(
            lambda: all({each.namespace for each in router.table.up()} == wanted for router in (one, two)), every_s=0.01
        )
        for router in (one, two):
            result = await router.complete(list(range(40)), SamplingParams(max_tokens=3), deadline_s=300)
            assert [span.version for span in result.samples[0].weight_version] == [version]
            assert router.stats().dropped == ()
            assert not any(each.problem for each in router.stats().instances)


async def test_an_instance_whose_weights_are_not_the_expected_ones_is_not_used(tmp_path: Path, weights: str) -> None:
    address = f"ipc://{tmp_path}/m0"
    async with instance(tmp_path, "mixed", "m0"), connect([address]) as router:
        with pytest.raises(WeightsDiffer) as caught:
            await router.update_weights(1, weights, expected=f"{78:032x}")
        assert (caught.value.expected, caught.value.held) == (f"{78:032x}", f"{77:032x}")
        assert caught.value.where == "m0"
        with pytest.raises(BadInput, match="expected"):
            await router.update_weights(1, weights, expected="77")
        await router.update_weights(1, weights, expected=f"{77:032x}")
        result = await router.complete(list(range(20)), SamplingParams(max_tokens=3), deadline_s=300)
        assert [span.version for span in result.samples[0].weight_version] == ["1"]


async def test_an_instance_is_claimed_until_the_update_or_the_link_is_over(tmp_path: Path, weights: str) -> None:
    address = f"ipc://{tmp_path}/m0"
    async with instance(tmp_path, "mixed", "m0"), connect([address]) as two:
        (member,) = two.table.up()
        words = verb(Verbs.update_weights, "5", weights, "abort")
        async with connect([address]) as one:
            async with one.commands._claimed():
                with pytest.raises(UpdateUnderWay, match="m0"):
                    await two.update_weights(1, weights)
                with pytest.raises(UpdateUnderWay):
                    await two.commands.one(member, words, 300.0)
                # a change of this router, which does not end the claim: weights that an instance lacks, a late wake
                (own,) = one.table.up()
                await one.commands.one(own, words, 300.0)
                with pytest.raises(UpdateUnderWay, match="m0"):
                    await two.update_weights(1, weights)
            await two.update_weights(6, weights)
            await one.update_weights(7, weights)
            await two.update_weights(8, weights)
            # until the link is over
            await one.commands.one(own, verb(Verbs.claim, 300.0), 300.0)
        async with asyncio.timeout(300):
            while True:
                # it knows in a moment that the other said goodbye
                with contextlib.suppress(UpdateUnderWay):
                    await two.update_weights(9, weights)
                    break
        assert two.stats().instances[0].weight_version == "9"


@pytest.mark.ci
async def test_a_decode_instance_that_is_started_anew_serves_the_new_weights(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0")]
    async with instance(tmp_path, "prefill", "p0"), connect(addresses[:1]) as router:
        async with instance(tmp_path, "decode", "d0"):
            await router.add(addresses[1])
            await router.update_weights(7, weights)
        await until(lambda: not router.stats().instances[1].is_up, every_s=0.01)
        async with instance(tmp_path, "decode", "d0") as again:
            await router.add(addresses[1])
            results = [
                await router.complete([*range(20), number], SamplingParams(max_tokens=3), deadline_s=300)
                for number in range(4)
            ]
            assert again.engine.stats().scheduler.weight_version == "7"
        versions = {span.version for result in results for span in result.samples[0].weight_version}
        assert versions == {"7"}
        assert router.stats().dropped == ()


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
