"""Instances as a router sees them, without links."""

from __future__ import annotations

import msgspec
from fdasync_fleet.router.choice import choose
from fdasync_fleet.router.instances import InstanceTable

from tests.support.router_scene import FACTS, hello_of, kv_batch, status_of

KEYS = tuple(bytes([number]) * 16 for number in range(8))


class FakePeer:
    def __init__(self, address, role):
        self.address, self.is_up, self.role, self.incarnation = address, True, role, address.encode()
        # those that end in a digit below 5 know grammars and score prompts
        able = int(address[-1]) < 5
        facts = msgspec.structs.replace(
            FACTS, max_context_tokens=100, max_requests=64, grammars=able, scores_prompts=able
        )
        self.hello = hello_of(address, address, role, facts)


class Stage:
    """A fleet of instances with these names: p0 prefills, d0 decodes, m0 does both."""

    def __init__(self, *names, direct=0):
        self.fleet = InstanceTable()
        self.direct = direct
        roles = {"p": "prefill", "d": "decode", "m": "mixed"}
        for name in names:
            self.fleet.add(FakePeer(name, roles[name[0]])).came_up()

    def __getitem__(self, name):
        return self.fleet.find(name)

    def status(self, name, state="running", queued=0, running=0, free=100):
        self[name].status = status_of(state, 0, queued, running, free)

    def has(self, name, *numbers):
        self[name].learn(kv_batch(b"n" * 16, 0, False, tuple([KEYS[number] for number in numbers]), ()))

    def choose(self, num_tokens=32, without=(), prefill="", decoders=(), keys=KEYS, **fields):
        for instance in self.fleet.instances.values():
            # a fake peer tells nobody of its changes
            instance.refresh()
        self.fleet.links_changed()
        fields["direct_below_tokens"] = self.direct
        route = choose(self.fleet, keys, num_tokens, without, prefill, decoders, **fields)
        return None if route is None else (route.first.address, [member.address for member in route.decoders])


def with_limits(stage, name, *, blocks=100, context=100, requests=64):
    """Blocks are of 4 tokens."""
    peer = stage[name].peer
    facts = msgspec.structs.replace(
        peer.hello.facts, num_blocks=blocks, max_context_tokens=context, max_requests=requests
    )
    peer.hello = msgspec.structs.replace(peer.hello, facts=facts)
    status = stage[name].status
    stage[name].came_up()
    stage[name].status = status
