"""Instances of a scene that sleep, wake and are cut off."""

from __future__ import annotations

import asyncio

from weights_scene import Sleeper, serve

from fdasync import GroupTensors, TensorMeta
from tests.support.router_scene import Command, settle

PROMPT = tuple(range(12))


PART = GroupTensors(group="trainer", tensors=(TensorMeta("a", "float32", (1,)),))


def sleepers(scene, *deltas):
    serve(*scene.scripts.values())
    return [Sleeper(script, deltas) for script in scene.scripts.values()]


async def asleep_and_cut_off(scene):
    """Both sleep, and the second one is out of reach."""
    both = sleepers(scene)
    await scene.router.sleep()
    cut_off(scene, "m1")
    await settle(5.0)
    return both


async def asks(scene, count=4):
    """Requests at once, all of which are served; returns how many each instance got."""
    for script in scene.scripts.values():
        script.submits.clear()
    await asyncio.gather(*[scene.router.complete((number, *PROMPT)) for number in range(count)])
    return {name: len(script.submits) for name, script in scene.scripts.items()}


async def sleep_but_one(scene, level=1):
    """All fall asleep, and the first one is woken by somebody else."""
    await scene.router.sleep(level)
    first = next(iter(scene.scripts.values()))
    first.router.send(first.obeys(Command(0, "wake")))
    await settle(2.0)


def cut_off(scene, name):
    scene.network.partition(scene.router._wire, scene.scripts[name].wire)


def mend(scene, name):
    scene.network.heal(scene.router._wire, scene.scripts[name].wire)
