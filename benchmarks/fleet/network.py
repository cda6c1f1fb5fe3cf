"""Hand-overs between two hosts: blocks over the tcp transport against a plain socket, on networks that delay and lose.

Two network namespaces are the hosts. A process between two TUN devices, which delays and loses, joins them
(`tests/system/network`); it takes root. Both arms bring the same blocks in turn, over connections that stay: ours is
`TcpTransport.receive`, asked for and checked block by block; raw is a plain socket whose other end sends the same bytes
at once, which is the bound. `goodput` is the ratio of the medians.

As a module this is the receiver: `python -m benchmarks.fleet.network JSON`, with the arguments of `receive`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import uvloop

from benchmarks.fleet.transport_bench import Bench
from benchmarks.fleet.transport_sender import transport_of
from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.child import Child
from benchmarks.lib.rates import add_ratio
from benchmarks.lib.report import Report
from tests.system.network.hosts import NETWORKS, Host, join, why_not

A, B = "10.9.0.1", "10.9.0.2"
AIM = 0.9


def play(network: str, blocks: int, nbytes: int, pairs: int) -> dict[str, Any]:
    """Seconds of both arms over one network, and the bytes that each moved."""
    with Host() as a, Host() as b, join(network, a, b, A, B, seed=1):
        words = json.dumps([blocks, nbytes, pairs, a.command([])])
        with Child("benchmarks.fleet.network", words, before=b.command([])) as receiver:
            return dict(json.loads(receiver.line()))


async def receive(blocks: int, nbytes: int, pairs: int, before: list[str]) -> None:
    """On host B: print what `play` returns. `before`: what runs a command on host A."""
    with Bench(blocks, nbytes, ["tcp"], A, before) as bench:
        transport = transport_of("tcp", B)
        async with bench.opened(transport):
            times = await bench.in_turn({"ours": partial(bench.ours, transport, "tcp"), "raw": bench.raw_tcp}, pairs)
        print(json.dumps(times | {"nbytes": bench.moved_nbytes}), flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=at_least_one, default=16, help="blocks of a hand-over")
    parser.add_argument("--block-nbytes", type=at_least_one, default=1 << 18, help="KV of a block")
    parser.add_argument("--pairs", type=at_least_one, default=100, help="interleaved pairs of each figure")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    report = Report("Hand-overs between two hosts")
    for name in ("near", "region", "far"):
        report.conditions[name] = dict(zip(("delay_s", "loss", "rate_mbit"), NETWORKS[name], strict=True))
        found = play(name, options.blocks, options.block_nbytes, options.pairs)
        add_ratio(report, f"{name}_goodput", found["nbytes"], found["ours"], found["raw"], AIM)
    report.finish(options.json_path)


if __name__ == "__main__":
    uvloop.run(receive(*json.loads(sys.argv[1])))
