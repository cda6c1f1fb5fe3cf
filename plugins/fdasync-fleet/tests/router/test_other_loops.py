"""A router and an instance that are used from another loop than their own: refused by name, closing included."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_fleet.testing.patience import LINKS

from fdasync import Instance, SamplingParams, connect
from fdasync.errors import WrongLoop
from fdasync.testing import synthetic_config

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
VERBS = {
    "complete": lambda router: router.complete([1, 2], PARAMS),
    "pause": lambda router: router.pause(),
    "resume": lambda router: router.resume(),
    "sleep": lambda router: router.sleep(),
    "wake": lambda router: router.wake(),
    "reset_cache": lambda router: router.reset_cache(),
    "update_weights": lambda router: router.update_weights(2, "/nowhere"),
    "begin_weight_update": lambda router: router.begin_weight_update(),
    "abandon_weight_update": lambda router: router.abandon_weight_update(),
    "set_weight_version": lambda router: router.set_weight_version(2),
    "weights_fingerprint": lambda router: router.weights_fingerprint(),
    "profile": lambda router: router.profile(1.0),
    "aclose": lambda router: router.aclose(),
}


def test_each_verb_is_refused_at_once():
    home, other = asyncio.new_event_loop(), asyncio.new_event_loop()

    def refused(what, call):
        async def run():
            return await asyncio.wait_for(call(), 60)

        with pytest.raises(WrongLoop) as caught:
            other.run_until_complete(run())
        assert caught.value.what == what

    async def start():
        instance = Instance(synthetic_config(role="mixed"), listen="tcp://127.0.0.1:0", links=LINKS)
        await instance.start()
        router = connect([instance.address], links=LINKS)
        await router.start()
        return instance, router

    instance, router = home.run_until_complete(start())
    try:
        for verb in VERBS.values():
            refused("router", lambda verb=verb: verb(router))
        for call in (instance.aclose, lambda: instance.drain(1.0)):
            refused("instance", call)
        result = home.run_until_complete(router.complete([1, 2], PARAMS))
        assert result.finish_reason == "length"
    finally:
        home.run_until_complete(router.aclose())
        home.run_until_complete(instance.aclose())
        for loop in (home, other):
            loop.close()
