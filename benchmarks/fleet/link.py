"""What a link costs: typed messages between two processes over a Unix socket, each encoded, numbered, acknowledged,
decoded and given to its callback.

    link_msgs_per_s     small messages one way (`BlocksTaken`), from the first `send` to the last acknowledgement
    lease_p50/p99_ms_N  from a lease request with a prompt of 1,280 tokens to its grant by a real decode instance, N of
                        them in flight. Each grant is given up at once, and another request follows.

The other process is `benchmarks/fleet/link_end.py`; both run on uvloop. `pd_headline` reads the leases' figures.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import TYPE_CHECKING

import msgspec
import uvloop
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import BlocksTaken, Hello, LeaseDrop, LeaseRequest, Wanted

from benchmarks.fleet.link_end import BLOCK_TOKENS, LINKS, MOST_LEASES, PROMPT_TOKENS, End
from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.child import Child
from benchmarks.lib.report import Report
from fdasync.cache.identity import block_keys, root_key
from fdasync.errors import PeerBusy
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from fdasync_fleet.link.peer import Peer

AIMS = {"link_msgs_per_s": 100_000.0, "lease_p99_ms_512": 100.0}
# requests in flight, and how many are measured
LEASES = {64: 4000, MOST_LEASES: 8000}
SMALL = BlocksTaken("01890af2-7d1f-7cc3-98c4-dc0c0c07398f", 0, 17)
# messages that are sent before the loop has its turn
_BATCH = 256


async def one_way(peer: Peer, count: int) -> float:
    """Messages per second."""
    begin = time.perf_counter()
    sent = 0
    while sent < count:
        try:
            for _ in range(min(_BATCH, count - sent)):
                peer.send(SMALL)
                sent += 1
            await asyncio.sleep(0)
        except PeerBusy:
            await peer.room(30.0)
    await peer.acknowledged(60.0)
    return count / (time.perf_counter() - begin)


async def measure_messages(address: str, count: int) -> float:
    """Messages per second, after a tenth as many to warm up."""
    links = Links(ZmqWire(), End(), LINKS)
    try:
        peer = links.dial(address)
        await peer.ready(10.0)
        await one_way(peer, count // 10)
        return await one_way(peer, count)
    finally:
        await links.aclose()


def wanted(caller: bytes, namespace: bytes, salt: str) -> Wanted:
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


async def measure_leases(address: str, fits: Hello, in_flight: int, count: int) -> list[float]:
    """Milliseconds from question to grant, in order of size, of `count` leases after a tenth as many to warm up."""
    asker = End(fits)
    links = Links(ZmqWire(), asker, LINKS)
    loop = asyncio.get_running_loop()
    spent: list[float] = []
    left = count + count // 10

    async def one(peer: Peer, wants: Wanted) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            name = os.urandom(8).hex()
            future = asker.granted[name] = loop.create_future()
            begin = time.perf_counter()
            peer.send(LeaseRequest(name, 0, wants, 60.0, 600.0))
            came, answer = await future
            spent.append((came - begin) * 1e3)
            if answer.verdict != "granted":
                raise RuntimeError(f"a lease was {answer.verdict}: {answer.reason}")
            peer.send(LeaseDrop(name, 0, "measured"))

    try:
        peer = links.dial(address)
        await peer.ready(30.0)
        wants = [wanted(links.incarnation, asker.namespace, str(number)) for number in range(in_flight)]
        await asyncio.gather(*[one(peer, each) for each in wants])
    finally:
        await links.aclose()
    return sorted(spent[count // 10 :])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--messages", type=at_least_one, default=300_000, help="small messages in each run")
    parser.add_argument("--runs", type=at_least_one, default=5, help="runs; medians are reported")
    args = parser.parse_args()
    report = Report("Links between two processes over a Unix socket")
    report.conditions |= {"messages": args.messages, "prompt_tokens": PROMPT_TOKENS}
    rates = []
    spent: dict[int, list[list[float]]] = {in_flight: [] for in_flight in LEASES}
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/link"
        for _ in range(args.runs):
            with Child("benchmarks.fleet.link_end", address, "messages") as other:
                other.line()
                rates.append(uvloop.run(measure_messages(address, args.messages)))
            for in_flight, most in LEASES.items():
                count = max(int(most * args.messages / 300_000), 20)
                with Child("benchmarks.fleet.link_end", address, "leases") as other:
                    fits = msgspec.json.decode(other.line(), type=Hello)
                    spent[in_flight].append(uvloop.run(measure_leases(address, fits, in_flight, count)))
    report.add("link_msgs_per_s", rates, aim=AIMS["link_msgs_per_s"])
    for in_flight, runs in spent.items():
        for part in (50, 99):
            name = f"lease_p{part}_ms_{in_flight}"
            report.add(name, [run[len(run) * part // 100] for run in runs], aim=AIMS.get(name))
    report.finish(args.json_path)
