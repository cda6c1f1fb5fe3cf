"""The two ends of a link for `benchmarks/fleet/link.py`. As a module it is the other process.

    python -m benchmarks.fleet.link_end ADDRESS messages    # takes every message
    python -m benchmarks.fleet.link_end ADDRESS leases      # a real decode instance, which grants leases

The decode instance does all that it does for a real prefill instance: it checks the request, reserves 81 blocks and
their slots, and gives them back.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec
import uvloop
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import PROTOCOL, Heartbeat, Hello, LeaseAnswer, Message

from benchmarks.lib.child import stay
from fdasync.engine.config import EngineConfig
from fdasync.ipc.child import settle
from fdasync.scheduler import LeaseRules

if TYPE_CHECKING:
    import asyncio

    from fdasync_fleet.link.peer import Peer

PROMPT_TOKENS = 1280
BLOCK_TOKENS = 16
MOST_LEASES = 512
# a benchmark may keep its loop busy for longer than a peer may be silent
LINKS = LinkConfig(lost_s=20.0)


class End:
    """An owner of links that plays a prefill instance, or any process that takes messages.

    Args:
        fits: the handshake of an instance that it fits.

    Attributes:
        namespace: of the peer's weights.
        granted: by request: the time at which the answer came, and the answer. The coroutines that asked have their
            turn later.
    """

    def __init__(self, fits: Hello | None = None) -> None:
        self.namespace = b""
        self.granted: dict[str, asyncio.Future[tuple[float, LeaseAnswer]]] = {}
        self._fits = fits or Hello(PROTOCOL, "end", "prefill", "")

    def hello(self) -> Hello:
        return msgspec.structs.replace(self._fits, name="end", role="prefill", address="", sources=())

    def check(self, hello: Hello) -> None:
        self.namespace = hello.namespace

    def beat(self, _: Peer) -> Heartbeat:
        return Heartbeat()

    def on_up(self, _: Peer) -> None: ...

    def on_heartbeat(self, *_: object) -> None: ...

    def on_message(self, _: Peer, message: Message, __: object) -> None:
        if isinstance(message, LeaseAnswer) and message.verdict != "queued":
            self.granted.pop(message.request).set_result((time.perf_counter(), message))

    def on_lost(self, _: Peer, error: Exception) -> None:
        for future in self.granted.values():
            future.set_exception(error)

    def on_failure(self, error: Exception) -> None:
        raise error


def decode_config() -> EngineConfig:
    """Room for every question that is in flight."""
    return EngineConfig(
        runner="synthetic",
        runner_config={
            "num_blocks": (MOST_LEASES + 64) * (PROMPT_TOKENS // BLOCK_TOKENS + 1),
            "block_tokens": BLOCK_TOKENS,
            "free": True,
        },
        process="inline",
        role="decode",
        host_blocks=64,
        max_running=MOST_LEASES,
        max_step_tokens=2048,
        leases=LeaseRules(line=2 * MOST_LEASES, beyond_running=MOST_LEASES),
    )


async def take_messages(address: str) -> None:
    links = Links(ZmqWire(), End(), LINKS)
    links.listen(address)
    await stay("ready")


async def grant_leases(address: str) -> None:
    """The line that it prints is the instance's handshake, which the asker has to fit."""
    async with Instance(decode_config(), listen=address) as instance:
        # as `fdasync serve` does
        settle()
        await stay(msgspec.json.encode(instance.hello()).decode())


if __name__ == "__main__":
    uvloop.run({"messages": take_messages, "leases": grant_leases}[sys.argv[2]](sys.argv[1]))
