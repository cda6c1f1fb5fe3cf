"""What a link costs: typed messages between two processes over a Unix socket, each encoded, numbered, acknowledged,
decoded and given to its callback.

    link_msgs_per_s           small messages one way (`BlocksTaken`), from the first `send` to the last acknowledgement
    link_lease_asks_per_s     the same for a `LeaseRequest` with a prompt of 1,280 tokens and its 80 block keys
    link_round_trip_us_p50/99 a small message there and its echo back, one at a time, while nothing else is sent
    curve_ratio               with --curve: messages/s over loopback tcp with keys (CURVE), as a part of those without
    lease_p50/p99_ms_N        from a lease request to its grant by a real decode instance, N of them in flight

The other process is `benchmarks/fleet/link_peer.py`, for leases `benchmarks/fleet/leases.py`; both run on uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import os
import pstats
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import uvloop
from fdasync_fleet.link.keys import FleetKeys, load_keys, new_keys, save_keys
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import BlocksTaken, LeaseRequest, Message, Wanted

from benchmarks.fleet import leases as _leases
from benchmarks.fleet.link_peer import CONFIG, ECHO, Side
from benchmarks.lib.report import Report, calibrate_us
from fdasync.errors import PeerBusy
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_fleet.link.peer import Peer

AIMS = {"link_msgs_per_s": 100_000.0, "curve_msgs_per_s": 100_000.0, "curve_ratio": 0.6, "lease_p99_ms_512": 100.0}
# requests in flight, and how many are measured
LEASES = {1: 500, 64: 4000, 512: 8000}
PROMPT_TOKENS = 1280
SMALL = BlocksTaken("01890af2-7d1f-7cc3-98c4-dc0c0c07398f", 0, 17)
# messages that are sent before the loop has its turn
_BATCH = 256


def lease_ask() -> LeaseRequest:
    wanted = Wanted(
        caller=os.urandom(16),
        tokens=os.urandom(4 * PROMPT_TOKENS),
        block_keys=tuple(os.urandom(16) for _ in range(PROMPT_TOKENS // 16)),
        namespace=os.urandom(16),
        salt="",
        params=SamplingParams(max_tokens=256, seed=7),
        streams=True,
        priority=0,
        deadline_s=60.0,
        rows=("routing",),
        start=0,
    )
    return LeaseRequest(SMALL.request, 0, wanted, 10.0, 60.0)


async def one_way(peer: Peer, message: Message, count: int) -> float:
    """Messages per second."""
    begin = time.perf_counter()
    sent = 0
    while sent < count:
        try:
            for _ in range(min(_BATCH, count - sent)):
                peer.send(message)
                sent += 1
            await asyncio.sleep(0)
        except PeerBusy:
            await peer.room(30.0)
    await peer.acknowledged(60.0)
    return count / (time.perf_counter() - begin)


async def round_trips(peer: Peer, side: Side, count: int) -> list[float]:
    """Microseconds of each round trip."""
    echo = BlocksTaken(ECHO, 0, 0)
    spent = []
    for _ in range(count):
        begin = time.perf_counter()
        peer.send(echo)
        await side.came
        spent.append((time.perf_counter() - begin) * 1e6)
        side.came = asyncio.get_running_loop().create_future()
    return spent


def measure_leases(in_flight: int, count: int) -> list[float]:
    """Milliseconds of each lease, in order."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/decode"
        with other_process(address, "leases"):
            return uvloop.run(_leases.measure(address, in_flight, count))


@contextlib.contextmanager
def other_process(address: str, module: str = "link_peer", *more: str) -> Iterator[None]:
    command = [sys.executable, "-m", f"benchmarks.fleet.{module}", address, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "listening\n":
            raise RuntimeError("the other process did not start")
        yield
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class Run:
    """The figures of one run."""

    def __init__(self) -> None:
        self.small = self.asks = self.p50 = self.p99 = 0.0


async def measure_curve(address: str, messages: int, keys: FleetKeys | None) -> float:
    """Small messages per second over tcp; with keys, authenticated and encrypted."""
    links = Links(ZmqWire(keys=keys), Side("one", echoes=False), CONFIG)
    try:
        peer = links.dial(address)
        await peer.ready(10.0)
        await one_way(peer, SMALL, messages // 10)
        return await one_way(peer, SMALL, messages)
    finally:
        await links.aclose()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def curve(runs: int, messages: int) -> Report:
    """Links over loopback tcp with keys and without, in turn."""
    plain, with_keys, calibration = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/keys"
        save_keys(file, new_keys(), replace=False)
        keys = load_keys(file)
        for _ in range(runs):
            calibration.append(calibrate_us())
            address = free_address()
            with other_process(address):
                plain.append(uvloop.run(measure_curve(address, messages, None)))
            address = free_address()
            with other_process(address, "link_peer", file):
                with_keys.append(uvloop.run(measure_curve(address, messages, keys)))
    report = Report("Links between two processes over loopback tcp, with keys and without")
    report.conditions |= {"messages": messages}
    report.add("tcp_msgs_per_s", plain)
    report.add("curve_msgs_per_s", with_keys, aim=AIMS["curve_msgs_per_s"])
    ratios = [ours / bare for ours, bare in zip(with_keys, plain, strict=True)]
    report.add("curve_ratio", ratios, aim=AIMS["curve_ratio"])
    report.add("calibration_us", calibration)
    return report


async def measure(address: str, messages: int, trips: int, profile: cProfile.Profile | None) -> Run:
    side = Side("one", echoes=False)
    links = Links(ZmqWire(), side, CONFIG)
    run = Run()
    try:
        peer = links.dial(address)
        await peer.ready(10.0)
        await one_way(peer, SMALL, messages // 10)
        if profile is not None:
            profile.enable()
        run.small = await one_way(peer, SMALL, messages)
        if profile is not None:
            profile.disable()
        run.asks = await one_way(peer, lease_ask(), messages // 10)
        await round_trips(peer, side, trips // 10)
        spent = sorted(await round_trips(peer, side, trips))
        run.p50, run.p99 = spent[len(spent) // 2], spent[len(spent) * 99 // 100]
        if peer.counters.resent:
            print(f"  {peer.counters.resent} messages were sent again", file=sys.stderr)
    finally:
        await links.aclose()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--messages", type=int, default=300_000, help="small messages in each run (default 300000)")
    parser.add_argument("--trips", type=int, default=5000, help="round trips in each run (default 5000)")
    parser.add_argument("--runs", type=int, default=5, help="runs; medians are reported (default 5)")
    parser.add_argument("--profile", action="store_true", help="profile the sender of small messages; no figures")
    parser.add_argument("--curve", action="store_true", help="what keys cost over tcp, and nothing else")
    args = parser.parse_args()
    if args.curve:
        curve(args.runs, args.messages).finish(args.json)
        return
    profile = cProfile.Profile() if args.profile else None
    runs, calibration = [], []
    for _ in range(1 if args.profile else args.runs):
        calibration.append(calibrate_us())
        with tempfile.TemporaryDirectory() as folder:
            address = f"ipc://{folder}/link"
            with other_process(address):
                runs.append(uvloop.run(measure(address, args.messages, args.trips, profile)))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    report = Report("Links between two processes over a Unix socket")
    report.conditions |= {"messages": args.messages, "trips": args.trips, "prompt_tokens": PROMPT_TOKENS}
    report.add("link_msgs_per_s", [run.small for run in runs], aim=AIMS["link_msgs_per_s"])
    report.add("link_lease_asks_per_s", [run.asks for run in runs])
    report.add("link_round_trip_us_p50", [run.p50 for run in runs])
    report.add("link_round_trip_us_p99", [run.p99 for run in runs])
    for in_flight, count in LEASES.items():
        spent = [measure_leases(in_flight, max(int(count * args.messages / 300_000), 20)) for _ in range(args.runs)]
        report.add(f"lease_p50_ms_{in_flight}", [one[len(one) // 2] for one in spent])
        name = f"lease_p99_ms_{in_flight}"
        report.add(name, [one[len(one) * 99 // 100] for one in spent], aim=AIMS.get(name))
    report.add("calibration_us", calibration)
    report.finish(args.json)
