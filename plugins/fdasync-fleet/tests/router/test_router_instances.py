"""Instances that join, drain, leave and get new weights under a router (docs/design.md, rule 22)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fdasync_fleet.link.address import absolute
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router, connect

from fdasync.cache.identity import block_keys, root_key
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, PeerRefused, PeerUnreachable, WeightsRejected
from fdasync.testing.sim.loop import run_sim
from tests.support.router_scene import NAMESPACE, Scene, done, in_scene, kv_batch, settle, status_of

PROMPT = tuple(range(12))


def ask(scene, **fields):
    return asyncio.ensure_future(scene.router.complete(PROMPT, **fields))


# -- addresses


def test_a_router_needs_an_address():
    for addresses in ([], (), "ipc:///run/m0", [7]):
        with pytest.raises(BadInput, match="addresses"):
            connect(addresses)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7", "ipc://", "ipc://@x", "ipc://*", "ipc:///run/d0"])
def test_what_has_no_other_spelling_stays_as_it_is(address):
    assert absolute(address) == address


def test_relative_addresses_are_made_absolute_where_they_are_given(tmp_path, monkeypatch):
    """Whoever is told of them may have another working directory."""
    monkeypatch.chdir(tmp_path)
    spellings = ["ipc://run/p0", f"ipc:///{tmp_path}/run/../run//p0", "ipc://run/./p0"]
    where = {name: f"ipc://{tmp_path}/run/{name}" for name in ("p0", "d0")}
    assert [absolute(spelling) for spelling in spellings] == [where["p0"]] * 3

    async def main():
        made = Scene(("p0", "d0"), {})
        for name, script in made.scripts.items():
            assert script.links.listen(f"ipc://run/{name}") == where[name]
        made.router = Router([*spellings, "ipc://run/d0"], wire=made.network.wire("other"), seed=1)
        async with made.router as router:
            assert [member.address for member in router.table.instances.values()] == [where["p0"], where["d0"]]
            await router.add(spellings[1])
            assert len(router.table.instances) == 2
            made.p0.answers = lambda submit: made.p0.end(submit.request, (7,))
            await router.complete(PROMPT, prefill="ipc://run/p0", decoders=["ipc://run/d0", "ipc://./run/d0"])
            assert made.p0.submits[0].decoders == (where["d0"],)
            with pytest.raises(BadInput, match="decoders"):
                router.generate(PROMPT, decoders="ipc://run/d0")
            with pytest.raises(BadInput, match="is no instance of this router"):
                router.generate(PROMPT, prefill=7)
            router.remove("ipc://run/p0")
        for script in made.scripts.values():
            await script.links.aclose(0.0)

    run_sim(main())


# -- who gets it


@in_scene("p0", "p1", "d0", "d1")
async def test_a_prefix_draws_requests(scene):
    keys = block_keys(root_key(NAMESPACE, b""), PROMPT, 4)
    await settle()
    scene.p1.has(*keys[:2])
    scene.d1.has(*keys)
    await settle()
    task = ask(scene)
    await settle()
    assert scene.p0.submits == []
    (submit,) = scene.p1.submits
    assert submit.decoders[0] == scene.d1.address
    scene.d1.end(submit.request, (7,))
    await task


@in_scene("m0", "m1")
async def test_load_repels_them(scene):
    scene.m0.status = status_of("running", 5, 500, 1, 50)
    await settle(1.0)
    task = ask(scene)
    await settle()
    assert (len(scene.m0.submits), len(scene.m1.submits)) == (0, 1)
    scene.m1.end(scene.m1.submits[0].request, (7,))
    await task


@in_scene("p0", "p1", "d0", "d1")
async def test_the_caller_may_name_the_instances_that_serve_it(scene):
    task = ask(scene, prefill=scene.p1.address, decoders=[scene.d1.address])
    await settle()
    (submit,) = scene.p1.submits
    assert submit.decoders == (scene.d1.address,)
    scene.d1.end(submit.request, (7,))
    await task
    with pytest.raises(BadInput):
        await scene.router.complete(PROMPT, prefill="ipc:///run/unheard-of")


# -- joining and leaving


@in_scene("m0")
async def test_an_instance_may_join(scene):
    joined = scene.begin("m1")
    await scene.router.add(joined.address)
    scene.m0.status = status_of("running", 5, 500, 1, 50)
    await settle(1.0)
    joined.answers = lambda submit: joined.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)
    assert len(joined.submits) == 1


@in_scene("m0")
async def test_one_of_another_shape_may_not(scene):
    other = scene.begin("m1")
    other.facts = msgspec.structs.replace(other.facts, block_tokens=8)
    with pytest.raises(PeerRefused):
        await scene.router.add(other.address)


@in_scene("m0", "m1")
async def test_one_that_drains_gets_no_more_and_is_waited_for(scene):
    scene.m0.obeys = None
    task = asyncio.ensure_future(scene.router.drain(scene.m0.address, 10.0))
    await settle()
    (command,) = scene.m0.commands
    assert (command.verb, command.limit_s) == ("drain", 10.0)
    request = ask(scene)
    await settle()
    assert (len(scene.m0.submits), len(scene.m1.submits)) == (0, 1)
    assert not task.done()
    scene.m0.router.send(done(command.number))
    await task
    scene.m1.end(scene.m1.submits[0].request, (7,))
    await request


@in_scene("m0")
async def test_a_drain_has_its_limit_and_ends_with_its_instance(scene):
    scene.m0.obeys = None
    with pytest.raises(DeadlineExceeded):
        await scene.router.drain(scene.m0.address, 2.0)
    task = asyncio.ensure_future(scene.router.drain(scene.m0.address, 1000.0))
    await settle()
    scene.router.remove(scene.m0.address)
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(task, 1.0)
    with pytest.raises(BadInput):
        await scene.router.drain(scene.m0.address)


@in_scene("m0", "m1")
async def test_what_a_removed_instance_served_goes_to_another(scene):
    task = ask(scene)
    await settle()
    scene.router.remove(scene.m0.address)
    await settle()
    scene.m1.end(scene.m1.submits[0].request, (7,))
    assert (await task).token_ids == (7,)


# -- starting without all of them


def without_all(*names, dead=(), odd=(), **config):
    """A test that starts the router itself, in virtual time."""

    def wrap(test):
        def run():
            async def main():
                made = Scene(names, config)
                for name in dead:
                    made.scripts[name].die()
                for number, name in enumerate(odd):
                    script = made.scripts[name]
                    script.facts = msgspec.structs.replace(script.facts, block_tokens=8 << number)
                try:
                    await test(made)
                finally:
                    await made.router.aclose()
                    for script in made.scripts.values():
                        await script.links.aclose(0.0)

            run_sim(main())

        run.__name__ = test.__name__
        return run

    return wrap


def missing(scene):
    return {one.address: (one.state, one.problem) for one in scene.router.stats().missing}


@without_all("m0", "m1", dead=["m1"])
async def test_one_that_is_down_stops_no_router_and_is_named(scene):
    loop = asyncio.get_running_loop()
    began = loop.time()
    await scene.router.start()
    # it has had its time to answer
    assert loop.time() - began == pytest.approx(1.0, abs=0.2)
    assert missing(scene) == {scene.m1.address: ("away", "has not answered yet")}
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)


@without_all("m0", "m1")
async def test_an_instance_that_is_there_is_not_left_out_and_none_is_waited_for_longer(scene):
    loop = asyncio.get_running_loop()
    began = loop.time()
    await scene.router.start()
    assert loop.time() - began < 0.1
    assert missing(scene) == {}


@without_all("m0", "m1", dead=["m1"])
async def test_one_that_was_missing_joins_when_it_comes(scene):
    await scene.router.start()
    await settle(100.0)
    came = scene.begin("m1")
    await settle(2.0)
    assert missing(scene) == {}
    scene.m0.status = status_of("running", 5, 500, 1, 50)
    await settle(1.0)
    came.answers = lambda submit: came.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)
    assert len(came.submits) == 1


@without_all("m0", "m1", dead=["m1"])
async def test_one_that_was_missing_is_brought_to_the_routers_weights_first(scene):
    await scene.router.start()
    await scene.router.update_weights(5, "/w")
    came = scene.begin("m1")
    await settle(2.0)
    (command,) = came.commands
    assert (command.verb, command.version, command.path) == ("update_weights", "5", "/w")
    assert [member.behind for member in scene.router.table.instances.values()] == [False, False]


@without_all("p0", "d0", "d1", dead=["d1"])
async def test_both_halves_are_enough(scene):
    await scene.router.start()
    assert list(missing(scene)) == [scene.d1.address]


@pytest.mark.parametrize("names", [("p0", "d0"), ("d0", "p0"), ("p0", "p1", "d0"), ("d0", "d1")])
def test_one_half_is_not_kept_waiting_for_the_other_or_for_its_like(names):
    """It serves requests whole until the other half comes."""

    @without_all(*names, dead=names[-1:])
    async def test(scene):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await scene.router.start()
        assert loop.time() - began == pytest.approx(1.0, abs=0.2)
        first = scene.scripts[names[0]]
        first.answers = lambda submit: first.end(submit.request, (7,))
        assert (await scene.router.complete(PROMPT, prefill=first.address)).token_ids == (7,)
        assert first.submits[0].decoders == ()
        came = scene.begin(names[-1])
        await settle(2.0)
        assert missing(scene) == {}
        assert came.failures == []

    test()


@pytest.mark.parametrize(("config", "dead", "named"), [
    ({}, ["m0", "m1"], "m0, ipc:///run/m1"),
    ({"require": "all"}, ["m1"], "connecting to ipc:///run/m1 "),
])  # fmt: skip
def test_a_router_names_the_instances_that_do_not_answer(config, dead, named):
    @without_all("m0", "m1", dead=dead, connect_s=2.0, **config)
    async def test(scene):
        with pytest.raises(DeadlineExceeded, match=named):
            await scene.router.start()

    test()


@without_all("m0", "m1", "m2", odd=["m0"])
async def test_one_that_does_not_fit_stops_no_router_and_is_named(scene):
    await scene.router.start()
    ((address, (state, problem)),) = missing(scene).items()
    assert (address, state) == (scene.m0.address, "refused")
    assert "block_tokens: m1 has 4, m0 has 8" in problem
    await settle(5.0)
    assert len(missing(scene)) == 1
    scene.m0.facts = scene.m1.facts
    await scene.router.add(scene.m0.address)
    assert missing(scene) == {}


@pytest.mark.parametrize(("config", "odd", "dead"), [
    ({"require": "all"}, ["m1"], []),
    # nobody can tell who is wrong
    ({}, ["m1"], ["m2"]),
    ({}, ["m0", "m1"], []),
])  # fmt: skip
def test_where_not_most_fit_together_it_is_an_error(config, odd, dead):
    @without_all("m0", "m1", "m2", odd=odd, dead=dead, connect_s=2.0, **config)
    async def test(scene):
        with pytest.raises(PeerRefused, match=r"block_tokens"):
            await scene.router.start()

    test()


async def test_an_address_that_is_none_is_an_error_whoever_is_there(tmp_path):
    with pytest.raises(ConfigError, match="nonsense"):
        await Router([f"ipc://{tmp_path}/m0", "nonsense"]).start()
    with pytest.raises(BadInput, match="require"):
        Router(["ipc:///run/m0"], RouterConfig(require="some"))
    with pytest.raises(BadInput, match=r"config\.connect_s"):
        Router(["ipc:///run/m0"], RouterConfig(connect_s=float("nan")))


@without_all("m0", "m1", "m2")
async def test_of_those_that_are_there_at_the_start_the_latest_version_counts(scene):
    """Those that were started again with weights of before are no measure, and wait for an update."""
    scene.m2.namespace, scene.m2.version = b"v" * 16, 5
    for script in scene.scripts.values():
        script.answers = lambda submit, script=script: script.end(submit.request, (7,))
    await scene.router.start()
    for _ in range(4):
        await scene.router.complete(PROMPT)
    assert [len(script.submits) for script in scene.scripts.values()] == [0, 0, 4]
    assert ["other weights" in one.problem for one in scene.router.stats().instances] == [True, True, False]
    await scene.router.update_weights(6, "/w")
    assert [one.problem for one in scene.router.stats().instances] == ["", "", ""]
    assert scene.router.stats().dropped == ()


@without_all("m0", "m1", dead=["m1"])
async def test_one_that_comes_with_older_weights_waits_for_whoever_updates_it(scene):
    scene.m0.namespace, scene.m0.version = b"v" * 16, 5
    await scene.router.start()
    came = scene.begin("m1")
    await settle(2.0)
    assert "other weights" in scene.router.stats().instances[1].problem
    came.router.send(kv_batch(b"v" * 16, 5, True, (), ()))
    await settle()
    assert scene.router.stats().instances[1].problem == ""


# -- weights


@in_scene("p0", "d0")
async def test_a_weight_update_goes_to_all_and_intake_waits_for_it(scene):
    for script in (scene.p0, scene.d0):
        script.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(5, "/models/new"))
    await settle()
    task = ask(scene)
    await settle()
    assert scene.p0.submits == []
    for script in (scene.p0, scene.d0):
        (command,) = script.commands
        assert (command.verb, command.version, command.path, command.mode) == (
            "update_weights",
            "5",
            "/models/new",
            "abort",
        )
        script.router.send(done(command.number, "", "", b"w" * 16, 5))
    await update
    await settle()
    (submit,) = scene.p0.submits
    members = list(scene.router.table.instances.values())
    assert {(member.namespace, member.weight_version) for member in members} == {(b"w" * 16, "5")}
    scene.d0.end(submit.request, (7,))
    await task
    # instances compare a version in use with what they have
    for script in (scene.p0, scene.d0):
        script.obeys = lambda command: done(
            command.number, "BadInput", "'5' is in use, and /other holds other weights", b"w" * 16, 5, field="version"
        )
    with pytest.raises(BadInput, match="version: p0: '5' is in use") as caught:
        await scene.router.update_weights(5, "/other")
    assert caught.value.field == "version"
    assert scene.router.stats().dropped == ()


@in_scene("p0", "d0", handoff_s=2.0)
async def test_hand_overs_may_finish_before_an_update(scene):
    task = ask(scene)
    await settle()
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    assert scene.p0.commands == []
    scene.p0.moved(scene.p0.submits[0].request, scene.d0)
    await update
    assert len(scene.p0.commands) == 1
    scene.d0.end(scene.p0.submits[0].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("p0", "d0", handoff_s=2.0)
async def test_those_that_do_not_finish_begin_again_after_it(scene):
    task = ask(scene)
    await settle()
    old = scene.p0.submits[0].request
    loop = asyncio.get_running_loop()
    began = loop.time()
    await scene.router.update_weights(1, "/w")
    assert loop.time() - began == pytest.approx(2.0, abs=0.2)
    assert scene.p0.aborts == scene.d0.aborts == [old]
    await settle()
    assert len(scene.p0.submits) == 2
    scene.d0.end(scene.p0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("p0", "d0", handoff_s=2.0)
async def test_those_that_a_pause_holds_up_are_not_waited_for(scene):
    """Trainers pause before each update."""
    task = ask(scene)
    await settle()
    old = scene.p0.submits[0].request
    loop = asyncio.get_running_loop()
    began = loop.time()
    await scene.router.pause()
    await scene.router.update_weights(1, "/w")
    assert loop.time() - began < 0.2
    assert scene.p0.aborts == scene.d0.aborts == [old]
    await scene.router.resume()
    await settle()
    scene.d0.end(scene.p0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("m0", "m1", "m2")
async def test_an_instance_that_fails_an_update_is_dropped_by_name(scene):
    scene.m1.obeys = lambda command: done(command.number, "WeightsRejected", "no such folder")
    await scene.router.update_weights(1, "/w")
    (dropped,) = scene.router.commands.dropped
    assert dropped.address == scene.m1.address
    assert "no such folder" in dropped.problem
    assert len(scene.router.table.instances) == 2


@in_scene("m0", "m1", "m2")
async def test_an_instance_that_disagrees_with_most_is_dropped(scene):
    scene.m2.obeys = lambda command: done(command.number, "", "", b"x" * 16, 1)
    await scene.router.update_weights(1, "/w")
    assert [dropped.address for dropped in scene.router.commands.dropped] == [scene.m2.address]


@in_scene("m0", "m1")
async def test_weights_that_all_refuse_change_nothing(scene):
    for script in (scene.m0, scene.m1):
        script.obeys = lambda command: done(command.number, "WeightsRejected", "bad")
    with pytest.raises(WeightsRejected):
        await scene.router.update_weights(1, "/w")
    assert scene.router.commands.dropped == []
    assert len(scene.router.table.instances) == 2
    # the version was not used, and requests are admitted
    scene.m0.obeys = scene.m1.obeys = lambda command: done(command.number, "", "", b"w" * 16, 1)
    await scene.router.update_weights(1, "/w")
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)


@in_scene("m0", "m1")
async def test_one_that_dies_during_an_update_is_dropped(scene):
    scene.m1.obeys = lambda _: scene.m1.die()
    await scene.router.update_weights(1, "/w")
    assert [dropped.address for dropped in scene.router.commands.dropped] == [scene.m1.address]


@in_scene("m0")
async def test_one_update_at_a_time_and_of_the_right_kind(scene):
    scene.m0.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "/w"))
    await settle()
    with pytest.raises(BadInput):
        await scene.router.update_weights(2, "/w")
    scene.m0.router.send(done(scene.m0.commands[0].number, "", "", b"w" * 16, 1))
    await update
    for version, source, mode in ((-1, "/w", "abort"), (True, "/w", "abort"), (2, 3, "abort"), (2, "/w", "gently")):
        with pytest.raises(BadInput):
            await scene.router.update_weights(version, source, mode)
