"""Instances under a router that say which weights they have."""

from __future__ import annotations

from tests.support.router_scene import NAMESPACE, settle


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
