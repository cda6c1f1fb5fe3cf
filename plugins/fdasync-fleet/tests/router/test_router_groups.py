"""A router's joins of a trainer's group: all instances, or none, and nobody waits for one that does not come."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fdasync import WeightsGroup
from fdasync.errors import DeadlineExceeded, EngineClosed, UpdateUnderWay, WeightsRejected
from tests.support.router_scene import done, in_scene, settle

GROUP = WeightsGroup(name="trainer", address="127.0.0.1", port=29500, world_size=3, timeout_s=100.0)


class Joiner:
    """Has a script join as an instance does.

    Attributes:
        told: verbs of what it was told.
        error: of its join; None: its ranks wait for the others.
    """

    def __init__(self, script, error=None):
        self.script, self.error = script, error
        self.told = []
        self._joining = None
        script.obeys = self._obey

    def _obey(self, command):
        self.told.append(command.verb)
        if command.verb == "join_group" and self.error is None:
            self._joining = command
            return None
        if command.verb == "leave_group" and self._joining is not None:
            left, self._joining = self._joining, None
            self.script.router.send(done(left.number, "WeightsRejected", "it was left meanwhile"))
        return done(command.number, self.error or "" if command.verb == "join_group" else "", "no")


@in_scene("m0", "m1")
async def test_each_worker_of_an_instance_has_a_rank(scene):
    joiners = [Joiner(script, "") for script in scene.scripts.values()]
    await scene.router.join_weights_group(GROUP)
    assert [joiner.told for joiner in joiners] == [["join_group"], ["join_group"]]
    groups = [script.commands[0].group for script in scene.scripts.values()]
    assert groups == [GROUP, msgspec.structs.replace(GROUP, rank=2)]


@pytest.mark.parametrize("name", ["m0", "m1"])
@pytest.mark.parametrize("error", [UpdateUnderWay, WeightsRejected])
def test_where_one_refuses_the_others_wait_no_longer(name, error):
    @in_scene("m0", "m1")
    async def play(scene):
        joiners = {one: Joiner(script) for one, script in scene.scripts.items()}
        joiners[name].error = error.__name__
        began = asyncio.get_running_loop().time()
        with pytest.raises(error, match="no"):
            await scene.router.join_weights_group(GROUP)
        assert asyncio.get_running_loop().time() - began < 1.0
        # one that was busy may be joining for another caller
        assert joiners.pop(name).told == ["join_group"] + ["leave_group"] * (error is WeightsRejected)
        (other,) = joiners.values()
        assert set(other.told) == {"join_group", "leave_group"}

    play()


@in_scene("m0", "m1")
async def test_a_join_whose_caller_goes_away_is_left(scene):
    joiners = [Joiner(script) for script in scene.scripts.values()]
    join = asyncio.ensure_future(scene.router.join_weights_group(GROUP))
    await settle()
    join.cancel()
    await settle()
    assert join.cancelled()
    assert [joiner.told for joiner in joiners] == [["join_group", "leave_group"]] * 2


@in_scene("m0", "m1", command_s=5.0)
async def test_instances_have_the_groups_time_and_the_commands(scene):
    for script in scene.scripts.values():
        script.obeys = None
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await scene.router.join_weights_group(GROUP)
    # the second 5 s are those of leaving it
    assert asyncio.get_running_loop().time() - began == pytest.approx(GROUP.timeout_s + 10.0, abs=0.5)


@in_scene("m0", "m1")
async def test_a_join_ends_with_its_router(scene):
    for script in scene.scripts.values():
        script.obeys = None
    join = asyncio.ensure_future(scene.router.join_weights_group(GROUP))
    await settle()
    began = asyncio.get_running_loop().time()
    await scene.router.aclose()
    with pytest.raises(EngineClosed):
        await join
    assert asyncio.get_running_loop().time() - began < 1.0
