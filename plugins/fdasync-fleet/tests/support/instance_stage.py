"""Instances as a router sees them, without links."""

from __future__ import annotations

import msgspec
from fdasync_fleet.messages import PROTOCOL, Facts, Hello, Shape, Status
from fdasync_fleet.router.choice import choose
from fdasync_fleet.router.instances import InstanceTable

from tests.support.router_scene import kv_batch

KEYS = tuple(bytes([number]) * 16 for number in range(8))


SHAPE = Shape(bytes(16), "l", "d", 4, 64, (), 300, (), False, b"")


class FakePeer:
    def __init__(self, address, role):
        self.address, self.is_up, self.role, self.incarnation = address, True, role, address.encode()
        # those that end in a digit below 5 know grammars and score prompts
        able = int(address[-1]) < 5
        facts = Facts("m", 300, 100, 100, (), 0, None, "", "", 8, "0", 64, grammars=able, scores_prompts=able)
        self.hello = Hello(PROTOCOL, address, role, address, SHAPE, (), b"n" * 16, facts)


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
        self[name].status = Status(state, 0, queued, running, 0, free, 100)

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
