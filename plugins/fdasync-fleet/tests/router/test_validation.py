"""What a router refuses at once, before anything is sent: what an instance could not read, what an engine refuses."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from fdasync_fleet.messages import Abort, Call
from fdasync_fleet.router.validation import check_whole
from fdasync_fleet.verbs import Verbs, verb

from fdasync.errors import BadInput
from fdasync.request import SamplingParams
from tests.support.router_scene import in_scene, settle

PROMPT = (1, 2, 3)
BAD = [
    ("start", {"start": -1}),
    ("start", {"start": 1.5}),
    ("start", {"start": True}),
    ("start", {"start": 1 << 60}),
    ("start", {"start": 3}),
    ("priority", {"priority": 2**40}),
    ("priority", {"priority": "x"}),
    ("priority", {"priority": 1.5}),
    ("routing", {"routing": "yes"}),
    ("aux", {"aux": "values"}),
    ("aux", {"aux": ("routing",)}),
    ("aux", {"aux": ("\ud800",)}),
    ("aux", {"aux": [1]}),
    ("cache_salt", {"cache_salt": "x" * 5000}),
    ("cache_salt", {"cache_salt": 7}),
    ("cache_salt", {"cache_salt": "\ud800"}),
    ("request_id", {"request_id": "\ud800"}),
    ("deadline_s", {"deadline_s": math.nan}),
    ("stop", {"params": SamplingParams(stop=("\ud800",))}),
    ("max_tokens", {"params": SamplingParams(max_tokens=1 << 70)}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "x" * ((4 << 20) + 1)}),
    ("prompt", {"prompt": "\u20ac" * (3 << 20)}),
    ("prompt", {"prompt": np.zeros((1 << 20) + 1, np.int32)}),
]


@in_scene("m0")
async def test_what_an_instance_could_not_read_is_refused_before_it_is_sent(scene):
    for field, words in BAD:
        fields = {"prompt": PROMPT, **words}
        with pytest.raises(BadInput) as caught:
            await asyncio.wait_for(scene.router.complete(**fields), 0.01)
        assert caught.value.field == field, words
        with pytest.raises(BadInput):
            scene.router.generate(**fields)
    await settle()
    assert scene.m0.submits == []


@in_scene("m0")
async def test_commands_that_could_not_be_read_are_refused_before_they_are_sent(scene):
    for source in ("x" * 5000, "\ud800"):
        with pytest.raises(BadInput, match="source"):
            await asyncio.wait_for(scene.router.update_weights(1, source), 0.01)
    for limit_s in (math.nan, -1, math.inf, "1", True):
        with pytest.raises(BadInput, match="limit_s"):
            await asyncio.wait_for(scene.router.drain(scene.m0.address, limit_s), 0.01)
    await settle()
    assert scene.m0.commands == []
    # and it goes on taking requests
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)


def test_a_message_is_read_back_before_it_is_sent():
    check_whole("x", Abort("r"))
    for message in (Abort(""), Abort("\ud800"), Call(1 << 70, verb(Verbs.resume)), Call(0, object())):
        with pytest.raises(BadInput, match="x: cannot be sent"):
            check_whole("x", message)
