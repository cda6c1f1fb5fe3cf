"""What the HTTP front costs: 256 streams through it against 256 readers of a router, over the same instance.

One synthetic instance with steps of 20 ms serves both arms, which alternate. The direct arm is a router in a process of
its own, with a reader for each stream. The other is `fdasync http` in a process of its own, with raw-socket clients in
a third, which count events and parse no JSON.

    http_over_direct_256   tokens per second through the front, over those of the readers
    tokens_per_event_256   tokens that an event carries
    gap_p99_ms_256         between two reads of one stream
    front_us_per_chunk     CPU of the front's process for one event
    rollout_mb_s           rows of one long sample at `/v1/rollout`, MB of body per second
    base64_mb_s            the same rows at `/generate`, in MB of the same rows per second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks._report import Report, calibrate_us
from fdasync import SamplingParams, connect
from fdasync.cli.local.fleet import LocalFleet, plans_for
from fdasync.testing import synthetic_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

STREAMS = 256
STEP_S = 0.02
WARM_S, COUNT_S = 3.0, 6.0
TOKENS = 2000
ROW_TOKENS = 16_000
AIMS = {"http_over_direct_256": 0.97, "tokens_per_event_256": 1.2, "gap_p99_ms_256": 30.0, "front_us_per_chunk": 40.0,
        "rollout_mb_s": 500.0}  # fmt: skip


def runner_values(context: int, num_blocks: int) -> dict[str, Any]:
    return {
        "num_moe_layers": 48, "top_k": 8, "num_experts": 128, "vocab_size": 150_000, "eos_id": -1, "block_tokens": 16,
        "max_context_tokens": context, "num_blocks": num_blocks, "step_s": STEP_S, "free": True,
    }  # fmt: skip


async def direct(address: str) -> float:
    """Tokens per second of the readers; run in a process of its own."""
    async with connect([address]) as router:
        begin = time.monotonic() + WARM_S
        counted = 0

        async def read(number: int) -> None:
            nonlocal counted
            params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            async with router.generate([number + 1] * 32, params) as stream:
                async for delta in stream:
                    now = time.monotonic()
                    if now >= begin + COUNT_S:
                        return
                    if now >= begin:
                        counted += len(delta.token_ids)

        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(read(number))
    return counted / COUNT_S


def run_direct(address: str) -> float:
    """The same, in a process."""
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.http", "--direct", address], check=True, capture_output=True, text=True
    )
    return float(out.stdout)


@contextlib.contextmanager
def front(address: str) -> Iterator[tuple[int, int]]:
    """`fdasync http` over an instance; gives its port and process id."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "fdasync", "http", "--connect", address, "--port", "0", "--rows", "none"]
    process = subprocess.Popen(
        [*command, "--ready-fd", str(write)], pass_fds=(write,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            yield json.loads(lines.readline())["port"], process.pid
    finally:
        process.terminate()
        process.terminate()
        process.wait(60)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_http(port: int, pid: int) -> tuple[dict[str, float], float]:
    """What the clients counted, and the front's CPU seconds for each second while they ran."""
    words = [str(port), str(STREAMS), str(TOKENS), str(WARM_S), str(COUNT_S)]
    clients = subprocess.Popen([sys.executable, "-m", "benchmarks._http_client", *words], stdout=subprocess.PIPE)
    time.sleep(WARM_S + 1.0)
    begin, before = time.monotonic(), cpu_s(pid)
    time.sleep(COUNT_S - 2.0)
    used = (cpu_s(pid) - before) / (time.monotonic() - begin)
    out, _ = clients.communicate(timeout=60)
    return json.loads(out), used


async def fleet(report: Report, runs: int) -> None:
    config = synthetic_config(
        runner_values(TOKENS + 64, STREAMS * 140),
        max_running=STREAMS,
        max_requests=STREAMS + 8,
        host_blocks=64,
        max_step_tokens=8192,
    )
    with tempfile.TemporaryDirectory() as folder:
        async with LocalFleet(plans_for(config, {"mixed": 1}), Path(folder) / "s") as instances:
            (address,) = instances.addresses
            readers, ratios, per_event, gaps, costs = [], [], [], [], []
            for _ in range(runs):
                readers.append(await asyncio.to_thread(run_direct, address))
                with front(address) as (port, pid):
                    got, used = await asyncio.to_thread(run_http, port, pid)
                per_second = got["events"] / COUNT_S
                # a step gives each stream one token
                tokens = min(per_second, STREAMS / STEP_S)
                ratios.append(tokens / readers[-1])
                per_event.append(max(readers[-1] / per_second, 1.0))
                gaps.append(got["gap_p99_s"] * 1e3)
                costs.append(used / per_second * 1e6)
            report.add("direct_tokens_s_256", readers)
            for name, values in (
                ("http_over_direct_256", ratios), ("tokens_per_event_256", per_event), ("gap_p99_ms_256", gaps),
                ("front_us_per_chunk", costs),
            ):  # fmt: skip
                report.add(name, values, aim=AIMS[name])


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
    parser.add_argument("--rows-only", action="store_true", help="only how fast rows are sent")
    parser.add_argument("--direct", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.direct:
        print(uvloop.run(direct(args.direct)))
        return
    report = Report("The HTTP front")
    report.conditions |= {"calibration_us": calibrate_us(), "streams": STREAMS, "step_s": STEP_S}
    uvloop.run(rows(report, args.runs))
    if not args.rows_only:
        uvloop.run(fleet(report, args.runs))
    report.finish(args.json)


if __name__ == "__main__":
    main()
