"""A small world of links in virtual time, and an owner that writes down what it is told."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.messages import PROTOCOL, BlocksTaken, Heartbeat, Hello
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork, SimWire

from fdasync.errors import PeerBusy

if TYPE_CHECKING:
    from fdasync_fleet.link.peer import Peer


ADDRESS = "ipc:///run/b"


def note(number: int) -> BlocksTaken:
    return BlocksTaken("r", 0, number)


class Owner:
    """Writes down everything. `got` is what the latest peer sent; `past` what those before it did."""

    def __init__(self, name: str, address: str = "") -> None:
        self.said = Hello(PROTOCOL, name, "mixed", address)
        self.refuses = None
        self.beats: list[Heartbeat] = []
        self.log: list[str] = []
        self.up: list[Peer] = []
        self.got: list[int] = []
        self.past: list[list[int]] = []
        self.payloads: list[bytes | None] = []
        self.failures: list[Exception] = []
        self.errors: list[Exception] = []
        self.then = None

    def hello(self):
        return self.said

    def check(self, hello):
        return self.refuses

    def beat(self, peer):
        return Heartbeat(leases=((self.said.name, 7),))

    def on_up(self, peer):
        self.log.append(f"up {peer.name}")
        self.up.append(peer)
        if self.got:
            self.past.append(self.got)
        self.got = []

    def on_message(self, peer, message, payload):
        self.got.append(message.offer)
        self.payloads.append(None if payload is None else bytes(payload))
        if self.then is not None:
            self.then(peer, message)

    def on_heartbeat(self, peer, heartbeat):
        self.beats.append(heartbeat)

    def on_lost(self, peer, error):
        assert not peer.is_up
        self.log.append(f"lost {peer.name}")
        self.errors.append(error)

    def on_failure(self, error):
        self.failures.append(error)


class World:
    """Two processes on a network: `a` dials, `b` listens at ADDRESS."""

    def __init__(self, conditions: NetworkConditions | None = None, seed: int = 1, **config: float) -> None:
        self.config = LinkConfig(**config)
        self.network = SimNetwork(random.Random(seed), conditions)
        self.a = Owner("a")
        self.b = Owner("b", ADDRESS)
        self.wire_a, self.links_a = self.process(self.a, 1)
        self.wire_b, self.links_b = self.process(self.b, 2)

    def process(self, owner: Owner, number: int) -> tuple[SimWire, Links]:
        wire = self.network.wire(owner.said.name)
        return wire, Links(wire, owner, self.config, incarnation=bytes([number]) * 12)

    async def connect(self) -> Peer:
        self.links_b.listen(ADDRESS)
        peer = self.links_a.dial(ADDRESS)
        await peer.ready(60.0)
        await settle()
        return peer

    async def aclose(self) -> None:
        await self.links_a.aclose(0.0)
        await self.links_b.aclose(0.0)
        assert not self.a.failures
        assert not self.b.failures


async def settle(seconds: float = 0.1) -> None:
    await asyncio.sleep(seconds)


async def send_all(peer: Peer, numbers: range) -> None:
    for number in numbers:
        while True:
            try:
                peer.send(note(number))
                break
            except PeerBusy:
                await peer.room(600.0)


def ignore(*_):
    pass
