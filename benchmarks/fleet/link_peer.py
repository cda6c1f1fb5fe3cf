"""The other process of `benchmarks.fleet.link`: takes every message, and returns the messages named `ECHO`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import uvloop
from fdasync_fleet.link.keys import load_keys
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import PROTOCOL, BlocksTaken, Heartbeat, Hello, Message, Refused

if TYPE_CHECKING:
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.wire import Frame

ECHO = "echo"
# a benchmark may keep its loop busy for longer than a peer may be silent
CONFIG = LinkConfig(lost_s=20.0)


class Side:
    """Callbacks of one end of a link.

    Attributes:
        name: in the handshake.
        echoes: it returns messages named `ECHO`.
        came: done when an echo has come.
        ended: done when the peer is lost.
    """

    def __init__(self, name: str, *, echoes: bool) -> None:
        self.name = name
        self.echoes = echoes
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hello(self) -> Hello:
        return Hello(PROTOCOL, self.name, "mixed", "")

    def check(self, _: Hello) -> Refused | None:
        return None

    def beat(self, _: Peer) -> Heartbeat:
        return Heartbeat()

    def on_up(self, _: Peer) -> None:
        pass

    def on_message(self, peer: Peer, message: Message, _: Frame | None) -> None:
        if isinstance(message, BlocksTaken) and message.request == ECHO:
            if self.echoes:
                peer.send(message)
            elif not self.came.done():
                self.came.set_result(None)

    def on_heartbeat(self, *_: object) -> None:
        pass

    def on_lost(self, *_: object) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def on_failure(self, error: Exception) -> None:
        raise error


async def main(address: str, keys: str = "") -> None:
    side = Side("other", echoes=True)
    links = Links(ZmqWire(keys=load_keys(keys) if keys else None), side, CONFIG)
    links.listen(address)
    print("listening", flush=True)
    try:
        async with asyncio.timeout(600.0):
            await side.ended
    finally:
        await links.aclose()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:3]))
