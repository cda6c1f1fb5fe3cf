"""Attacks on the HTTP front, and what they cost: memory of the front, and the time per token of well-behaved streams.

One synthetic instance with steps of 20 ms and `fdasync http` are processes of their own; so is the attacker
(`attacker.py`), at a bounded rate and the lowest priority. Eight readers of a router and eight streams over HTTP
run all the time. For each attack, windows without and with it alternate; figures are medians of the pairs. "nothing" is
an attack that does nothing: its ratios are the machine's noise.

    engine_tpot_p99_ATTACK   time per output token of the router's readers, p99 of requests: with over without it
    http_tpot_p99_ATTACK     the same of the streams over HTTP, which share the front with the attack
    front_mib_ATTACK         resident memory of the front, most during the attack over before it
    answer_s_ATTACK          slowest answer to the attacker
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for

from benchmarks.lib.report import Report, calibrate_us
from fdasync import SamplingParams, connect
from fdasync.testing import synthetic_config
from tests.nightly.http.attacker import ATTACKS
from tests.nightly.http.process import Front, front, memory_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync import Router

STREAMS = 8
STEP_S = 0.02
TOKENS = 40
WARM_S = 1.0
AIM = 1.10
_MIB = 1 << 20
_LIMIT_S = 120.0


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
            async with self._router.generate([number] * 8, params) as stream:
                times = [time.monotonic() async for _ in stream]
            self.engine.append((times[0], (times[-1] - times[0]) / (TOKENS - 1)))

    async def _fetch(self, number: int) -> None:
        body = {"token_ids": [number] * 8, "stream": True,
                "sampling_params": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}  # fmt: skip
        encoded = json.dumps(body).encode()
        head = b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(encoded)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while True:
            writer.write(head + encoded)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a well-behaved stream was refused: {answer!r}")
            begin = last = 0.0
            while b"[DONE]" not in await reader.readuntil(b"\n\n"):
                last = time.monotonic()
                begin = begin or last
            await reader.readuntil(b"0\r\n\r\n")
            # the last event but one ends the sample, and has no token
            self.http.append((begin, (last - begin) / (TOKENS - 1)))


def within(requests: list[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Time per token of the requests that lie between."""
    return [tpot for at, tpot in requests if begin <= at and at + tpot * TOKENS <= end]


def p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]


@contextlib.asynccontextmanager
async def attacker(name: str, port: int) -> AsyncIterator[dict[str, Any]]:
    """An attack under way; what it saw is in the dict behind the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.nightly.http.attacker", name, str(port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(_LIMIT_S):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the attack {name} did not begin")
            yield told
            process.stdin.close()
            out, _ = await process.communicate()
        told |= json.loads(out)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def watch(pid: int, most: list[int]) -> None:
    """Keep the most resident memory of a process."""
    while True:
        most[0] = max(most[0], memory_of([pid]).rss)
        await asyncio.sleep(0.05)


async def window(seconds: float) -> tuple[float, float]:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return begin, time.monotonic()


async def one_attack(name: str, server: Front, streams: Streams, pairs: int, seconds: float) -> dict[str, list[Any]]:
    """Windows without and with one attack, in turn; a value of each pair."""
    told: dict[str, list[Any]] = {}
    # of the first window: later ones begin with what allocators kept
    before = memory_of([server.pid]).rss
    for _ in range(pairs):
        span = await window(seconds)
        most = [before]
        watching = asyncio.ensure_future(watch(server.pid, most))
        async with attacker(name, server.port) as seen:
            await asyncio.sleep(WARM_S)
            loud_span = await window(seconds)
        watching.cancel()
        await asyncio.wait([watching])
        values: dict[str, Any] = {"front_mib": (most[0] - before) / _MIB, "answer_s": seen["slowest_s"]}
        for kind in ("engine", "http"):
            quiet, loud = (within(getattr(streams, kind), *one) for one in (span, loud_span))
            values[f"{kind}_tpot_p99"] = p99(loud) / p99(quiet)
            values[f"{kind}_requests"] = [len(quiet), len(loud)]
        for key, value in {**values, "statuses": seen["statuses"], "held": seen["held"]}.items():
            told.setdefault(key, []).append(value)
        # connections of the attack end
        await asyncio.sleep(WARM_S)
    return told


async def play(report: Report, names: list[str], pairs: int, seconds: float) -> None:
    values = {"block_tokens": 16, "max_context_tokens": 256, "num_blocks": 1024, "step_s": STEP_S, "eos_id": -1}
    config = synthetic_config(values, max_running=64, max_requests=64, max_step_tokens=2048, host_blocks=64)
    with tempfile.TemporaryDirectory() as folder:
        async with LocalFleet(plans_for(config, {"mixed": 1}), Path(folder) / "s") as fleet:
            (address,) = fleet.addresses
            async with connect([address]) as router:
                for name in names:
                    # memory that an allocator keeps would hide what the next attack takes
                    with front("--connect", address, "--rows", "none") as server:
                        told = await beside(name, server, router, pairs, seconds)
                    for figure, aim in (("engine_tpot_p99", AIM), ("http_tpot_p99", None), ("front_mib", None),
                                        ("answer_s", None)):  # fmt: skip
                        report.add(f"{figure}_{name}", told.pop(figure), aim=aim)
                    report.conditions[name] = told
                    print(f"    {told}", file=sys.stderr, flush=True)


async def beside(name: str, server: Front, router: Router, pairs: int, seconds: float) -> dict[str, list[Any]]:
    """One attack beside streams that run all the time."""
    streams = Streams(router, server.port)
    running = asyncio.ensure_future(streams.run())
    try:
        await asyncio.sleep(2 * WARM_S)
        told = await one_attack(name, server, streams, pairs, seconds)
        if running.done():
            running.result()  # of a task that is done: it failed
        return told
    finally:
        running.cancel()
        await asyncio.wait([running])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--pairs", type=int, default=3, help="windows without and with each attack (default 3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window (default 6)")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="this attack; may be repeated")
    args = parser.parse_args()
    report = Report("Attacks on the HTTP front")
    report.conditions |= {"calibration_us": calibrate_us(), "streams": 2 * STREAMS, "step_s": STEP_S}
    uvloop.run(play(report, args.only or list(ATTACKS), args.pairs, args.seconds))
    report.finish(args.json)
