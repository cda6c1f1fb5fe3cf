"""Links with keys, over real sockets: who has the keys is let in, everybody else is refused, counted and named, and
harms nobody."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import msgspec
import pytest
import zmq
from fdasync_fleet.link import zap, zmq_wire
from fdasync_fleet.link.keys import add_key, drop_key, new_keys, rotate_keys
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.testing.patience import LINKS
from link_world import Owner, note

from fdasync.errors import ConfigError, DeadlineExceeded
from fdasync.testing import until

pytestmark = pytest.mark.both_loops
ANY = "tcp://127.0.0.1:*"


class Side:
    """Links with keys, their owner, and the refusals that they told of."""

    def __init__(self, name, keys):
        self.owner = Owner(name)
        self.told = []
        self.wire = ZmqWire(keys=keys, on_refused=lambda *words: self.told.append(words))
        self.links = Links(self.wire, self.owner, LINKS)


@pytest.fixture
async def side():
    made = []

    def make(name, keys):
        made.append(Side(name, keys))
        return made[-1]

    threads = threading.active_count()
    yield make
    for each in made:
        await each.links.aclose()
        assert not each.owner.failures
    assert threading.active_count() == threads


async def pair(side, keys):
    """A listener, its address, and a client that is up."""
    listener, client = side("b", keys), side("a", keys)
    address = listener.links.listen(ANY)
    peer = client.links.dial(address)
    await peer.ready(300.0)
    return listener, address, peer


async def still_works(peer, listener):
    peer.send(note(7))
    await peer.acknowledged(300.0)
    assert listener.owner.got[-1] == 7
    assert [line for line in listener.owner.log if line.startswith("up")] == ["up a"]


async def test_who_has_the_keys_is_let_in_and_nobody_without(side):
    keys = new_keys()
    listener, address, peer = await pair(side, keys)
    await still_works(peer, listener)
    assert listener.wire.door.refused == {"key": 0, "mechanism": 0, "handshake": 0, "stranger": 0}
    stranger = side("c", None)
    with pytest.raises(DeadlineExceeded):
        await stranger.links.dial(address).ready(0.5)
    # which of the two ends notices first that one asks for keys is chance
    await until(lambda: sum(listener.wire.door.refused.values()) > 0)
    assert not listener.wire.door.refused["key"]
    await still_works(peer, listener)


async def test_ipc_asks_for_no_key(side, tmp_path):
    listener, stranger = side("b", new_keys()), side("a", None)
    both = [listener.links.listen(ANY), listener.links.listen(f"ipc://{tmp_path}/b")]
    await stranger.links.dial(both[1]).ready(300.0)
    with pytest.raises(DeadlineExceeded):
        await stranger.links.dial(both[0]).ready(0.3)


async def test_another_fleets_keys(side, monkeypatch):
    monkeypatch.setattr(zap, "REPORT_S", 0.05)
    keys = new_keys()
    listener, address, peer = await pair(side, keys)
    # one that knows our public key, and has a client key of its own: what CURVE lets through, the allow list does not
    ours, theirs = keys.keys[0], new_keys().keys[0]
    thief = side("c", msgspec.structs.replace(keys, keys=(msgspec.structs.replace(theirs, server=ours.server),)))
    with pytest.raises(DeadlineExceeded):
        await thief.links.dial(address).ready(0.5)
    await until(lambda: listener.wire.door.refused["key"] > 0)
    stranger = side("d", new_keys())
    with pytest.raises(DeadlineExceeded):
        await stranger.links.dial(address).ready(0.5)
    await until(lambda: listener.wire.door.refused["handshake"] > 0)
    await until(lambda: sum(count for _, count in listener.told) == sum(listener.wire.door.refused.values()))
    assert {reason for reason, _ in listener.told} == {"key", "handshake"}
    await still_works(peer, listener)


async def test_an_allowed_client_comes_with_its_own_key(side):
    own = new_keys().keys[0]
    keys = msgspec.structs.replace(new_keys(), allow=(own.client.public,))
    listener = side("b", keys)
    address = listener.links.listen(ANY)
    theirs = msgspec.structs.replace(own, server=keys.keys[0].server)
    await side("a", msgspec.structs.replace(keys, keys=(theirs,))).links.dial(address).ready(300.0)


async def test_a_client_with_keys_talks_to_no_listener_without(side):
    """A downgrade: a process without keys has taken the listener's port."""
    listener, client = side("b", None), side("a", new_keys())
    address = listener.links.listen(ANY)
    with pytest.raises(DeadlineExceeded):
        await client.links.dial(address).ready(0.5)
    assert not listener.owner.log


@pytest.mark.parametrize("steps", ["add", "rotate", "drop"])
async def test_keys_are_replaced_while_processes_have_the_old_and_the_new_file(side, monkeypatch, steps):
    monkeypatch.setattr(zmq_wire, "_TRY_KEY_S", 0.2)
    one = new_keys()
    two = add_key(one)
    files = {"add": (one, two), "rotate": (two, rotate_keys(two)), "drop": (rotate_keys(two), drop_key(two))}
    old, new = files[steps]
    if steps == "drop":
        new = drop_key(rotate_keys(two))
    for number, (listens, dials) in enumerate(((old, new), (new, old))):
        listener, client = side(f"b{number}", listens), side(f"a{number}", dials)
        await client.links.dial(listener.links.listen(ANY)).ready(300.0)


def _greeting(mechanism):
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(80), bytes(200), b"\x16\x03\x01" + bytes(200), _greeting(b"NULL"),
        _greeting(b"PLAIN"),
        # a command, then a message, of 4 GB each
        _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 32) + b"\x05HELLO",
        _greeting(b"CURVE") + b"\x02" + struct.pack(">Q", 1 << 32) + bytes(1000),
    ],
    ids=["scan", "http", "zeros", "tls", "null", "plain", "command", "message"],
)  # fmt: skip
async def test_strangers_bytes_harm_nobody(side, monkeypatch, data):
    """They are closed, each is counted once, and one that says nothing is no exception."""
    monkeypatch.setattr(zmq_wire, "_HANDSHAKE_S", 2.0)
    listener, address, peer = await pair(side, new_keys())
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    socks = []
    try:
        for _ in range(20):
            socks.append(socket.socket())
            socks[-1].setblocking(False)
            await asyncio.get_running_loop().sock_connect(socks[-1], (host, int(port)))
            socks[-1].send(data)
        await until(lambda: sum(listener.wire.door.refused.values()) >= 20)
        await still_works(peer, listener)
    finally:
        for sock in socks:
            sock.close()
    await still_works(peer, listener)
    assert sum(listener.wire.door.refused.values()) == 20


@pytest.mark.ci
async def test_a_listener_without_its_doorkeeper_lets_nobody_in(side, monkeypatch):
    """Closed, if the question is not answered."""
    monkeypatch.setattr(zap.Doorkeeper, "answer", lambda _self, _sock: True)
    keys = new_keys()
    listener, client = side("b", keys), side("a", keys)
    with pytest.raises(DeadlineExceeded):
        await client.links.dial(listener.links.listen(ANY)).ready(0.5)
    assert not listener.owner.log


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://[::]:5000", "tcp://224.0.0.1:5000", "tcp://::1:5000", "tcp://:5000",
        "tcp://10.0.0.1", "tcp://[10.0.0.1]:5", "tcp://300.1.1.1:5", "tcp://a b:5", "tcp://10.0.0.1:5;tcp://10.0.0.2:5",
        "tcp://10.0.0.1:65536", "udp://10.0.0.1:5", "10.0.0.1:5", "inproc://a",
    ],
)  # fmt: skip
async def test_with_keys_an_address_names_a_machine(side, bad):
    wire = side("a", new_keys()).wire
    # who listens at all interfaces tells others another address: `Instance(host=...)`
    calls = (wire.dial,) if "0.0.0.0" in bad or "[::]" in bad else (wire.listen, wire.dial)
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call(bad)
        assert repr(bad) in caught.value.problem


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]", "lo"])
async def test_with_keys_hosts_are_numbers_of_both_families_and_interfaces(side, host):
    keys = new_keys()
    listener, client = side("b", keys), side("a", keys)
    try:
        address = listener.links.listen(f"tcp://{host}:*")
    except ConfigError as error:
        pytest.skip(str(error))
    await client.links.dial(address).ready(300.0)


async def test_a_flood_of_refusals_is_told_in_few_words(side, monkeypatch):
    monkeypatch.setattr(zap, "REPORT_S", 0.2)
    monkeypatch.setattr(zmq_wire, "_HANDSHAKE_S", 2.0)
    listener, address, peer = await pair(side, new_keys())
    loop = asyncio.get_running_loop()
    begun = loop.time()
    context = zmq.Context()
    socks = []
    try:
        for _ in range(200):
            socks.append(context.socket(zmq.DEALER))
            socks[-1].connect(address)
        await until(lambda: sum(listener.wire.door.refused.values()) >= 200, 300)
        await until(lambda: sum(count for _, count in listener.told) >= 200, 300)
        # of each reason, one in that time
        reasons = {reason for reason, _ in listener.told}
        assert len(listener.told) <= len(reasons) * (2 + (loop.time() - begun) / 0.2)
        await still_works(peer, listener)
    finally:
        for sock in socks:
            sock.close(linger=0)
        context.term()
