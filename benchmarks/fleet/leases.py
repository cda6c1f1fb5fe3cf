"""Lease grants between two processes: one asks, as a prefill instance does, a real decode instance answers.

A closed loop: so many questions are in flight, each grant is given up at once and another question follows. The decode
instance does all that it does for a real one: checks the request, reserves 81 blocks and their slots, and gives them
back. Used by `benchmarks.fleet.link`; run as a module it is the decode instance.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import uvloop
from fdasync_fleet.instance.instance import Instance, shape_of
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    LeaseAnswer,
    LeaseDrop,
    LeaseRequest,
    Message,
    Refused,
    Wanted,
)

from fdasync.cache.identity import block_keys, root_key
from fdasync.engine.config import EngineConfig
from fdasync.ipc.child import settle
from fdasync.request import SamplingParams
from fdasync.scheduler import LeaseRules

PROMPT_TOKENS = 1280
BLOCK_TOKENS = 16
_MOST = 512
_LINKS = LinkConfig(lost_s=20.0)


def decode_config() -> EngineConfig:
    """Room for every question that is in flight."""
    return EngineConfig(
        runner="synthetic",
        runner_config={
            "num_blocks": (_MOST + 64) * (PROMPT_TOKENS // BLOCK_TOKENS + 1),
            "block_tokens": BLOCK_TOKENS,
            "free": True,
        },
        process="inline",
        role="decode",
        host_blocks=64,
        max_running=_MOST,
        max_step_tokens=2048,
        leases=LeaseRules(line=2 * _MOST, beyond_running=_MOST),
    )


class _Asker:
    """An owner of links that plays a prefill instance."""

    def __init__(self, shape: object, namespace: bytes) -> None:
        self.namespace = namespace
        self._shape = shape
        # when an answer came, and what it was: the coroutines that asked have their turn later
        self.granted: dict[str, asyncio.Future[tuple[float, LeaseAnswer]]] = {}

    def hello(self) -> Hello:
        return Hello(PROTOCOL, "asker", "prefill", "", self._shape)  # type: ignore[arg-type]

    def check(self, hello: Hello) -> Refused | None:
        self.namespace = hello.namespace
        return None

    def beat(self, _: object) -> Heartbeat:
        return Heartbeat()

    def on_up(self, _: object) -> None:
        pass

    def on_message(self, _: object, message: Message, __: object) -> None:
        if isinstance(message, LeaseAnswer) and message.verdict != "queued":
            self.granted.pop(message.request).set_result((time.perf_counter(), message))

    def on_heartbeat(self, *_: object) -> None:
        pass

    def on_lost(self, _: object, error: Exception) -> None:
        for future in self.granted.values():
            future.set_exception(error)

    def on_failure(self, error: Exception) -> None:
        raise error


def _wanted(caller: bytes, namespace: bytes, salt: str) -> Wanted:
    """A request that shares no prefix with any other."""
    return Wanted(
        caller=caller,
        tokens=bytes(4 * PROMPT_TOKENS),
        block_keys=tuple(block_keys(root_key(namespace, salt.encode()), [0] * PROMPT_TOKENS, BLOCK_TOKENS)),
        namespace=namespace,
        salt=salt,
        params=SamplingParams(max_tokens=256, seed=7),
        streams=True,
        priority=0,
        deadline_s=600.0,
        rows=("routing",),
        start=0,
    )


async def measure(address: str, in_flight: int, count: int) -> list[float]:
    """Milliseconds from question to grant, of `count` leases after a tenth as many to warm up."""
    runner = Instance(decode_config(), listen="ipc:///unused").engine
    await runner.start()
    shape = shape_of(runner.capacity)
    await runner.aclose()
    asker = _Asker(shape, b"")
    links = Links(ZmqWire(), asker, _LINKS)
    peer = links.dial(address)
    await peer.ready(30.0)
    spent: list[float] = []
    left = count + count // 10
    loop = asyncio.get_running_loop()
    wants = [_wanted(links.incarnation, asker.namespace, str(number)) for number in range(in_flight)]

    async def one(wanted: Wanted) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            name = os.urandom(8).hex()
            future = asker.granted[name] = loop.create_future()
            begin = time.perf_counter()
            peer.send(LeaseRequest(name, 0, wanted, 60.0, 600.0))
            came, answer = await future
            spent.append((came - begin) * 1e3)
            if answer.verdict != "granted":
                raise RuntimeError(f"a lease was {answer.verdict}: {answer.reason}")
            peer.send(LeaseDrop(name, 0, "measured"))

    try:
        await asyncio.gather(*[one(wanted) for wanted in wants])
    finally:
        await links.aclose()
    return sorted(spent[count // 10 :])


async def main(address: str) -> None:
    async with Instance(decode_config(), listen=address):
        # as `fdasync serve` does
        settle()
        print("listening", flush=True)
        async with asyncio.timeout(600.0):
            await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
        try:
            uvloop.run(asyncio.wait_for(main(sys.argv[1]), float(sys.argv[2])))
        except BaseException:
            profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    else:
        uvloop.run(main(sys.argv[1]))
