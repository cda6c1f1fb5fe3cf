"""What a router tells of its instances' model and load."""

from __future__ import annotations

import pytest

from fdasync.errors import PeerUnreachable
from tests.support.router_scene import in_scene, settle, status_of


@in_scene("m0")
async def test_facts_and_load_are_of_those_that_are_there(scene):
    # one that never answered
    scene.router._dial("ipc:///run/m1")
    assert (scene.router.facts().max_context_tokens, scene.router.facts().num_instances) == (1000, 1)
    scene.m0.status = status_of("paused", 2, 500, 3, 40)
    await settle(1.0)
    load = scene.router.load()
    assert (load.running, load.waiting, load.used_tokens, load.capacity_tokens, load.paused) == (3, 2, 240, 400, True)
    assert [(one.name, one.is_up, one.running) for one in load.instances] == [("m0", True, 3), ("", False, 0)]
    larger = scene.begin("m1")
    larger.max_context_tokens = 2000
    await settle(2.0)
    assert (scene.router.facts().max_context_tokens, scene.router.facts().num_instances) == (2000, 2)
    assert not scene.router.load().paused, "one of two goes on"
    scene.m0.die()
    await settle(4.0)
    load = scene.router.load()
    assert (load.running, load.capacity_tokens) == (0, 400)
    assert [(one.name, one.is_up, one.running) for one in load.instances] == [("m0", False, 3), ("m1", True, 0)]
    scene.router.remove(scene.m0.address)
    scene.router.remove(larger.address)
    with pytest.raises(PeerUnreachable):
        scene.router.facts()
