"""What the HTTP front costs: 256 streams through it against 256 readers of a router, over the same instance.

One synthetic instance with steps of 20 ms serves both arms, which alternate. The direct arm is a router in a process of
its own, with a reader for each stream. The other is `fdasync http` in a process of its own, with raw-socket clients in
a third, which count events and parse no JSON.

    http_over_direct_256   tokens per second through the front, over those of the readers
    tokens_per_event_256   tokens that an event carries
    gap_p99_ms_256         between two events of one stream; `gap_p99_ms_direct` is the readers'
    front_us_per_chunk     CPU of the front's process for one event
    engine_step_moved      the engine's CPU for a step, through the front over directly
    ttft_added_ms_p50      median time to the first token through the front less a router's, in pairs sent at the same
                           moment; the connection is open, and 32 streams run through the front meanwhile
    rollout_mb_s           rows of one long sample at `/v1/rollout`, MB of body per second
    base64_mb_s            the same rows at `/generate`, in MB of the same rows per second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for

from benchmarks.http import front as _http_front
from benchmarks.http.front import Meter, front
from benchmarks.http.load import Load
from benchmarks.lib.report import Report, calibrate_us
from fdasync import RouterConfig, connect
from fdasync.ipc.deadlines import Within
from fdasync.testing import synthetic_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.http.front import Cpu, Front

PROBED_STREAMS = 32
STEP_S = 0.02
VOCAB_SIZE = 150_000
TOKENS = 2000
PROBES_S = 60.0
ROW_TOKENS = 16_000
AIMS = {"http_over_direct_256": 0.97, "tokens_per_event_256": 1.2, "gap_p99_ms_256": 30.0, "front_us_per_chunk": 40.0,
        "engine_step_moved": 1.05, "ttft_added_ms_p50": 3.0, "rollout_mb_s": 500.0}  # fmt: skip


def runner_values(context: int, num_blocks: int) -> dict[str, Any]:
    return {
        "num_moe_layers": 48, "top_k": 8, "num_experts": 128, "vocab_size": VOCAB_SIZE, "eos_id": -1,
        "block_tokens": 16, "max_context_tokens": context, "num_blocks": num_blocks, "step_s": STEP_S, "free": True,
        "values_spec": False, "pass_stamp": False,
    }  # fmt: skip


class Figures:
    """Values by name, in the order in which they came."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def report(self, report: Report) -> None:
        for name, values in self.values.items():
            report.add(name, values, aim=AIMS.get(name))


def load_of(streams: int, count_s: float) -> Load:
    """Streams that do not end while they are counted."""
    return Load(
        streams=streams, prompt_tokens=32, vocab_size=VOCAB_SIZE, least_tokens=TOKENS, most_tokens=TOKENS, rows=False,
        warm_s=3.0, count_s=count_s,
    )  # fmt: skip


async def pair(address: str, served: Front, meter: Meter, load: Load, found: Figures, *, turned: bool) -> None:
    """Both arms, one after the other; `turned`: the front's first."""
    if turned:
        clients, cpu = await _http_front.through_front(served, load, meter)
    readers, readers_cpu = await _http_front.direct(address, load, meter)
    if not turned:
        clients, cpu = await _http_front.through_front(served, load, meter)
    found.add(f"direct_tokens_s_{load.streams}", readers.tokens / load.count_s)
    found.add(f"http_over_direct_{load.streams}", clients.tokens / readers.tokens)
    found.add(f"tokens_per_event_{load.streams}", clients.tokens / clients.events)
    found.add(f"gap_p99_ms_{load.streams}", clients.gap_p99_s * 1e3)
    found.add("gap_p99_ms_direct", readers.gap_p99_s * 1e3)
    found.add("front_us_per_chunk", cpu.front_s / cpu.wall_s / (clients.events / load.count_s) * 1e6)
    found.add("engine_us_a_step_direct", _step_us(readers_cpu))
    found.add("engine_step_moved", _step_us(cpu) / _step_us(readers_cpu))


def _step_us(cpu: Cpu) -> float:
    return cpu.engine_s / cpu.steps * 1e6


async def first_tokens(address: str, served: Front, meter: Meter, probes: int, found: Figures) -> None:
    """How much later first tokens come, while other streams run."""
    words = [address, str(served.port), str(probes), str(VOCAB_SIZE)]
    # as long as the probes take
    beside = load_of(PROBED_STREAMS, PROBES_S)
    others = asyncio.ensure_future(_http_front.through_front(served, beside, meter))
    process = None
    try:
        await asyncio.sleep(beside.warm_s)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.http.probes", *words, stdout=asyncio.subprocess.PIPE
        )
        async with Within(PROBES_S):
            out, _ = await process.communicate()
        if others.done():
            raise RuntimeError("the streams beside the probes ended first")
    finally:
        others.cancel()
        await asyncio.wait([others])
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
    took = json.loads(out)
    direct, through = statistics.median(took["direct"]), statistics.median(took["front"])
    found.add("ttft_ms_p50_direct", direct * 1e3)
    found.add("ttft_added_ms_p50", (through - direct) * 1e3)


async def streams(report: Report, load: Load, probes: int, runs: int) -> None:
    most = max(load.streams, PROBED_STREAMS + 2)
    config = synthetic_config(
        runner_values(TOKENS + 64, most * 140),
        max_running=most,
        max_requests=most + 8,
        host_blocks=64,
        max_step_tokens=8192,
    )
    found = Figures()
    async with (
        LocalFleet(plans_for(config, {"mixed": 1})) as instances,
        connect(instances.addresses, RouterConfig(require="all")) as router,
    ):
        (address,) = instances.addresses
        meter = Meter(router, instances.children[0].pid)
        async with front(address) as served:
            for run in range(runs):
                await instances.while_alive(pair(address, served, meter, load, found, turned=run % 2 == 1))
                await instances.while_alive(first_tokens(address, served, meter, probes, found))
    found.report(report)


@contextlib.asynccontextmanager
async def rows_server() -> AsyncIterator[int]:
    from fdasync_http import app
    from fdasync_http.server import Listen, serving

    from fdasync.testing import synthetic_engine

    values = {**runner_values(ROW_TOKENS + 16, 1100), "step_s": 0.0}
    config = synthetic_config(values, max_step_tokens=8192)
    async with synthetic_engine(config) as engine, serving(app(engine), Listen(port=0, drain_s=1.0)) as served:
        yield served.port


def post(port: int, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds from the first byte of the answer to the last, and how many bytes there were."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        nbytes = len(answer.read(1))
        begin = time.monotonic()
        while part := answer.read(1 << 20):
            nbytes += len(part)
        return time.monotonic() - begin, nbytes


async def rows(report: Report, runs: int) -> None:
    prompt = [number % 1000 for number in range(ROW_TOKENS)]
    row_nbytes = ROW_TOKENS * 48 * 8
    async with rows_server() as port:
        for name, path, body, aim in (
            ("rollout_mb_s", "/v1/rollout", {"token_ids": prompt, "sampling": {"max_tokens": 1}}, AIMS["rollout_mb_s"]),
            ("base64_mb_s", "/generate", {"input_ids": prompt, "return_routed_experts": True,
                                          "sampling_params": {"max_new_tokens": 1}}, None),
        ):  # fmt: skip
            rates = []
            for _ in range(runs + 1):
                seconds, nbytes = await asyncio.to_thread(post, port, path, body)
                assert nbytes >= row_nbytes
                rates.append(row_nbytes / seconds / 1e6)
            report.add(name, rates[1:], aim=aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm; medians are reported (default 3)")
    parser.add_argument("--streams", type=int, default=256, help="of each arm (default 256)")
    parser.add_argument("--seconds", type=float, default=8.0, help="that are counted in each run (default 8)")
    parser.add_argument("--probes", type=int, default=120, help="pairs of first tokens in each run (default 120)")
    parser.add_argument("--rows-only", action="store_true", help="only how fast rows are sent")
    args = parser.parse_args()
    report = Report("The HTTP front")
    report.conditions |= {"calibration_us": calibrate_us(), "streams": args.streams, "step_s": STEP_S}
    uvloop.run(rows(report, args.runs))
    if not args.rows_only:
        uvloop.run(streams(report, load_of(args.streams, args.seconds), args.probes, args.runs))
    report.finish(args.json)
