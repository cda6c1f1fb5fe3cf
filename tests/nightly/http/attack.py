"""Attacks on the HTTP front, and what they cost: the time per token of well-behaved streams.

One synthetic instance with steps of 20 ms and `fdasync http` are processes of their own; so is the attacker
(`attacker.py`), at a bounded rate and the lowest priority. Eight readers of a router and eight streams over HTTP
run all the time. For each attack, windows without and with it alternate; figures are medians of the pairs. "nothing" is
an attack that does nothing: its ratios are the machine's noise.

    engine_tpot_p99_ATTACK   time per output token of the router's readers, p99 of requests: with over without it
    http_tpot_p99_ATTACK     the same of the streams over HTTP, which share the front with the attack

What memory an attack may take, and how it may be answered, is in `plugins/fdasync-http/tests/proof/test_attacks.py`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for

from benchmarks.lib.arguments import above_zero, at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync import SamplingParams, connect
from fdasync.testing import synthetic_config
from tests.nightly.http.attacker import ATTACKS
from tests.nightly.http.process import Front, attack, front, stream

if TYPE_CHECKING:
    from fdasync import Router

STREAMS = 8
STEP_S = 0.02
TOKENS = 40
WARM_S = 1.0
AIM = 1.10


class Streams:
    """Streams that run until they are cancelled.

    Attributes:
        engine, http: (begin, seconds per output token) of each request that ended.
    """

    def __init__(self, router: Router, port: int) -> None:
        self.engine: list[tuple[float, float]] = []
        self.http: list[tuple[float, float]] = []
        self._router = router
        self._port = port

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(self._read(number + 1))
                group.create_task(self._fetch(number + 1 + STREAMS))

    async def _read(self, number: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        while True:
            async with self._router.generate([number] * 8, params) as answer:
                times = [time.monotonic() async for _ in answer]
            self.engine.append((times[0], (times[-1] - times[0]) / (TOKENS - 1)))

    async def _fetch(self, number: int) -> None:
        times: list[float] = []
        async for at in stream(self._port, number, TOKENS):
            if at is not None:
                times.append(at)
                continue
            self.http.append((times[0], (times[-1] - times[0]) / (TOKENS - 1)))
            times = []


def within(requests: list[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Time per token of the requests that lie between."""
    return [tpot for at, tpot in requests if begin <= at and at + tpot * TOKENS <= end]


def p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]


async def window(seconds: float) -> tuple[float, float]:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return begin, time.monotonic()


async def play(report: Report, names: list[str], pairs: int, seconds: float) -> None:
    values = {"block_tokens": 16, "max_context_tokens": 256, "num_blocks": 1024, "step_s": STEP_S, "eos_id": -1}
    config = synthetic_config(values, max_running=64, max_requests=64, max_step_tokens=2048, host_blocks=64)
    with tempfile.TemporaryDirectory() as folder:
        async with LocalFleet(plans_for(config, {"mixed": 1}), Path(folder) / "s") as fleet:
            (address,) = fleet.addresses
            async with connect([address]) as router:
                for name in names:
                    with front("--connect", address, "--rows", "none") as server:
                        told = await beside(name, server, router, pairs, seconds)
                    for figure, aim in (("engine_tpot_p99", AIM), ("http_tpot_p99", None)):
                        report.add(f"{figure}_{name}", told.pop(figure), aim=aim)
                    report.conditions[name] = told
                    print(f"    {told}", file=sys.stderr, flush=True)


async def beside(name: str, server: Front, router: Router, pairs: int, seconds: float) -> dict[str, list[Any]]:
    """Windows without and with one attack, in turn, beside streams that run all the time; a value of each pair."""
    streams = Streams(router, server.port)
    running = asyncio.ensure_future(streams.run())
    told: dict[str, list[Any]] = defaultdict(list)
    try:
        for _ in range(pairs):
            # streams begin, or connections of the attack end
            await asyncio.sleep(2 * WARM_S)
            span = await window(seconds)
            async with attack(name, server.port) as seen:
                await asyncio.sleep(WARM_S)
                loud_span = await window(seconds)
            for kind in ("engine", "http"):
                quiet, loud = (within(getattr(streams, kind), *one) for one in (span, loud_span))
                told[f"{kind}_tpot_p99"].append(p99(loud) / p99(quiet))
                told[f"{kind}_requests"].append([len(quiet), len(loud)])
            told["statuses"].append(seen["statuses"])
        if running.done():
            running.result()  # of a task that is done: it failed
        return told
    finally:
        running.cancel()
        await asyncio.wait([running])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=at_least_one, default=3, help="windows without and with each attack")
    parser.add_argument("--seconds", type=above_zero, default=6.0, help="of a window")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="this attack; may be repeated")
    args = parser.parse_args()
    report = Report("Attacks on the HTTP front")
    report.conditions |= {"streams": 2 * STREAMS, "step_s": STEP_S}
    uvloop.run(play(report, args.only or list(ATTACKS), args.pairs, args.seconds))
    report.finish(args.json_path)
