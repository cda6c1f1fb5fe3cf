"""What a transport costs beyond the raw path: blocks copied from another process, each way against plain calls.

**shm.** `ShmTransport.receive` against a memcpy of each part of the same memory, mapped read-only and touched before,
and an XXH3 pass over the copy. **tcp.** `TcpTransport.receive` against blocking `recv_into` on a plain socket over
127.0.0.1, whose other end is a process that does nothing but `sendall` from the same memory, and an XXH3 pass.

Both arms of each have the same source memory and the same destination, touched before; blocks are 1 MiB of KV with
their rows, and the sender's checksums are taken before. Arms take turns to begin; the figure of a ratio is the ratio of
the medians of MB/s. The longest callback is measured in rounds of its own, on a `TimedLoop`.

**tls.** The same blocks by TLS over those in clear. Both ends encrypt on the cores that this machine has.

**loop.** The CPU that the loop of an instance spends to receive these blocks where transports have a process of their
own, as an instance's have; `--blocks 206` is a hand-over of 216 MB.

**mooncake.** (`--only mooncake` alone, as root) The same blocks by Mooncake's engine over those by tcp, in a network
that has only loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvloop
from fdasync_fleet.transfer.plugins import TransportSpec
from fdasync_fleet.transfer.process.proxy import TransferProcess

from benchmarks.fleet.transport_bench import WARM_ROUNDS, Bench
from benchmarks.fleet.transport_sender import ROWS_NBYTES, transport_of
from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.rates import add_ratio
from benchmarks.lib.report import Report
from benchmarks.lib.timed_loop import TimedLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.transfer.base import Transport

RATIO_AIM = 0.8
CALLBACK_AIM_MS = 0.5
# of a hand-over
PROCESS_AIM_MS = 30.0
OURS = ("shm", "tcp")


async def over_raw(bench: Bench, name: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of a transport and of its raw path."""
    transport = transport_of(name)
    async with bench.opened(transport):
        raw = bench.raw_shm if name == "shm" else bench.raw_tcp
        return await bench.in_turn({"ours": partial(bench.ours, transport, name), "raw": raw}, pairs)


async def over_tcp(bench: Bench, name: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of a transport and of tcp."""
    both = {each: transport_of(each) for each in (name, "tcp")}
    async with bench.opened(*both.values()):
        return await bench.in_turn({each: partial(bench.ours, both[each], each) for each in both}, pairs)


async def on_loop(bench: Bench, transport: Transport, rounds: int) -> list[tuple[float, str, float]]:
    """Of each round: milliseconds of CPU of the longest callback, its name, and milliseconds of all callbacks."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    found = []
    async with bench.opened(transport):
        # garbage of the start is collected now; collections that receiving causes stay in the figure
        gc.collect()
        for round_ in range(WARM_ROUNDS + rounds):
            bench.spoil()
            # a callback that began before the reset is counted whole when it ends
            await asyncio.sleep(0)
            loop.reset()
            await bench.ours(transport, transport.name)
            await asyncio.sleep(0)
            if round_ >= WARM_ROUNDS:
                found.append((loop.longest_s * 1e3, loop.longest, loop.spent_s * 1e3))
    return found


def measure_raw(report: Report, bench: Bench, pairs: int) -> None:
    for name in OURS:
        times = uvloop.run(over_raw(bench, name, pairs))
        add_ratio(report, f"{name}_ratio", bench.moved_nbytes, times["ours"], times["raw"], RATIO_AIM)
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            longest_ms, longest, _ = max(runner.run(on_loop(bench, transport_of(name), pairs)))
        report.add(f"{name}_callback_ms_max", [longest_ms], aim=CALLBACK_AIM_MS)
        report.conditions[f"{name}_callback_longest"] = longest


def measure_loop(report: Report, bench: Bench, pairs: int) -> None:
    for name in OURS:
        (transport,) = TransferProcess([TransportSpec(name)]).transports
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            spent = [spent_ms for _, _, spent_ms in runner.run(on_loop(bench, transport, pairs))]
        report.add(f"{name}_receive_process_ms", spent, aim=PROCESS_AIM_MS)


def measure_over_tcp(report: Report, bench: Bench, pairs: int, name: str) -> None:
    times = uvloop.run(over_tcp(bench, name, pairs))
    add_ratio(report, f"{name}_over_tcp", bench.moved_nbytes, times[name], times["tcp"])


PARTS: dict[str, Callable[[Report, Bench, int], None]] = {
    "raw": measure_raw,
    "tls": partial(measure_over_tcp, name="tls"),
    "loop": measure_loop,
    "mooncake": partial(measure_over_tcp, name="mooncake"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=at_least_one, default=256, help="blocks that move")
    parser.add_argument("--block-nbytes", type=at_least_one, default=1 << 20, help="KV of a block")
    parser.add_argument("--pairs", type=at_least_one, default=15, help="interleaved pairs of each figure")
    parser.add_argument("--only", choices=list(PARTS), help="this part only; default: all but mooncake")
    options = parser.parse_args()
    if options.only == "mooncake" and find_spec("fdasync_mooncake") is None:
        parser.error("--only: 'mooncake' needs fdasync-mooncake; install it")
    report = Report("Transports against the raw path")
    report.conditions["blocks"] = f"{options.blocks} of {options.block_nbytes} bytes, rows of {ROWS_NBYTES}"
    names = ["tcp", "tls"]
    with contextlib.ExitStack() as stack:
        if options.only == "mooncake":
            # of a plugin, which need not be installed
            from fdasync_mooncake.testing import in_loopback_namespace

            stack.enter_context(in_loopback_namespace())
            names.append("mooncake")
        bench = stack.enter_context(Bench(options.blocks, options.block_nbytes, names))
        for part in [options.only] if options.only else ("raw", "tls", "loop"):
            PARTS[part](report, bench, options.pairs)
    report.finish(options.json_path)
