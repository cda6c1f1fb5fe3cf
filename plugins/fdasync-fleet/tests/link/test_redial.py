"""A connection that died without a sign: the link comes up again over a new one."""

from __future__ import annotations

import zmq
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.link.zmq_listener import descriptors
from fdasync_fleet.link.zmq_wire import ZmqWire
from link_world import Owner, note

from fdasync.testing import until
from tests.nightly.chaos.proxy import Proxy

CONFIG = LinkConfig(beat_s=0.2, lost_s=1.5)


async def test_a_peer_that_was_silent_is_dialed_anew():
    one, other, between = Owner("one"), Owner("other"), Proxy()
    dialing, listening = Links(ZmqWire(), one, CONFIG), Links(ZmqWire(), other, CONFIG)
    await between.open()
    try:
        between.target = int(listening.listen("tcp://127.0.0.1:0").rpartition(":")[2])
        peer = dialing.dial(f"tcp://127.0.0.1:{between.port}")
        await peer.ready(300.0)
        peer.send(note(0))
        await until(lambda: other.got == [0])
        before = descriptors()[0]
        between.stall(inward=True, outward=True)
        # new connections flow
        between.stalls_in = between.stalls_out = False
        await until(lambda: one.log == ["up other", "lost other", "up other"])
        peer.send(note(1))
        await until(lambda: other.got == [1])
        await until(lambda: other.log == ["up one", "lost one", "up one"])
        # what lay in the dead connection comes at last, and its end
        between.stall(inward=False, outward=False)
        await until(lambda: descriptors()[0] == before)
        assert len(listening.peers) == 1
        peer.send(note(2))
        await until(lambda: other.got == [1, 2])
        assert one.log == ["up other", "lost other", "up other"]
    finally:
        await dialing.aclose()
        await listening.aclose()
        await between.aclose()


async def test_a_peer_that_accepts_and_says_nothing_is_dialed_anew():
    """As where the way was cut before its first message."""
    one, other, between = Owner("one"), Owner("other"), Proxy()
    dialing, listening = Links(ZmqWire(), one, CONFIG), Links(ZmqWire(), other, CONFIG)
    await between.open()
    context = zmq.Context()
    deaf = context.socket(zmq.ROUTER)
    try:
        between.target = deaf.bind_to_random_port("tcp://127.0.0.1")
        peer = dialing.dial(f"tcp://127.0.0.1:{between.port}")
        # what it says arrives, and has no answer
        await until(lambda: deaf.poll(0))
        between.target = int(listening.listen("tcp://127.0.0.1:0").rpartition(":")[2])
        await peer.ready(300.0)
        assert one.log == ["up other"]
    finally:
        await dialing.aclose()
        await listening.aclose()
        await between.aclose()
        context.destroy(linger=0)
