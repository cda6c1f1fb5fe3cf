"""What one bad decode instance costs the others: 1 prefill instance, 4 decode instances, three ways to lease room.

    ours        a future for each lease request, bounded for each decode instance
    serial      one thread in order (FastDeploy before #7724)
    threads5    five threads, each in order (FastDeploy #7724)

All with the same scheduler, deadlines and cost of steps; only `PrefillSide._ask` differs (`pd_process.py`).
Requests arrive at random (open loop) at 70 % of what the prefill instance can do; request i must go to decode instance
i mod 4. One of them answers lease requests after 2 s (slow), never (silent), or is killed (killed).

Goodput: of the requests for the other three instances, the share whose time to first token was within 3 times the 99th
percentile of the same arm with four healthy instances. A run in which the machine was busy for more than 60 % is void;
the comparison is valid only if `threads5_goodput_silent` is under 0.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router

from benchmarks.fleet.pd_process import Spec
from benchmarks.lib.arguments import above_zero, parser_of
from benchmarks.lib.child import Child
from benchmarks.lib.report import Report
from fdasync.errors import FdasyncError
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ARMS = {"ours": 0, "serial": 1, "threads5": 5}
# seconds after which the bad instance answers, below 0 never
FAULTS = {"slow": 2.0, "silent": -1.0, "killed": 0.0}
GOODPUT_AIM = 0.95
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 24
STEP_S = 0.02
TOKEN_S = 30e-6
DECODERS = 4
WARM_S = 5.0
MAX_BUSY = 0.6
# one prompt fills a step
CAPACITY = 1 / (STEP_S + PROMPT_TOKENS * TOKEN_S)
RULES = {"silent_s": 5.0, "find_s": 30.0, "queue_s": 5.0}


def config_of(role: str) -> dict[str, Any]:
    """The configuration of an instance's engine, as plain values."""
    return {
        "runner": "synthetic",
        "runner_config": {"num_blocks": 8192, "step_s": STEP_S, "token_s": TOKEN_S, "max_context_tokens": 4096},
        "process": "inline",
        "role": role,
        "host_blocks": 2048,
        "max_running": 256,
        "max_step_tokens": PROMPT_TOKENS,
        "leases": RULES,
    }


@contextlib.contextmanager
def instances(workers: int, answers_s: float) -> Iterator[dict[str, Child]]:
    """The instances by their addresses, the prefill instance first; the decode instance behind it is the bad one."""
    with tempfile.TemporaryDirectory(prefix="fdasync-bench-") as folder, contextlib.ExitStack() as stack:
        specs = [Spec(f"ipc://{folder}/p0", config_of("prefill"), workers=workers)]
        for number in range(DECODERS):
            late_s = 0.0 if number else answers_s
            specs.append(Spec(f"ipc://{folder}/d{number}", config_of("decode"), answers_s=late_s))
        running = {
            spec.address: stack.enter_context(Child("benchmarks.fleet.pd_process", msgspec.json.encode(spec).decode()))
            for spec in specs
        }
        for child in running.values():
            child.line()
        yield running


def busy_s() -> tuple[float, float]:
    """CPU seconds that all processes of this machine spent, and CPU seconds that it had, since its start."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - fields[3] - fields[4]) / tick, sum(fields) / tick


async def load(
    router: Router, addresses: Sequence[str], seconds: float, limit_s: float, seed: int
) -> tuple[list[tuple[int, float, float | None]], float]:
    """Send requests for so many seconds, in an open loop, and wait for their ends for `limit_s`.

    Returns of each request its decode instance, its arrival, its time to first token or None; and the share of its CPU
    that the machine spent meanwhile.
    """
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    prefill, *decoders = addresses
    seen: list[tuple[int, float, float | None]] = []

    async def one(to: int, due: float) -> None:
        prompt = [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
        places: Mapping[str, Any] = {"prefill": prefill, "decoders": [decoders[to]]}
        begin = time.perf_counter()
        ttft_s = None
        try:
            async with router.generate(prompt, params, deadline_s=60.0, routing=False, **places) as stream:
                async for _ in stream:
                    ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - begin
        except FdasyncError:
            # a request for the bad instance
            ttft_s = None
        finally:
            seen.append((to, due, ttft_s))

    tasks: list[asyncio.Task[None]] = []
    begin, due = loop.time(), 0.0
    before, total = busy_s()
    while due < seconds:
        await asyncio.sleep(begin + due - loop.time())
        tasks.append(loop.create_task(one(len(tasks) % DECODERS, due)))
        due += rng.expovariate(0.7 * CAPACITY)
    after, whole = busy_s()
    _, late = await asyncio.wait(tasks, timeout=limit_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=10.0)
    return seen, (after - before) / (whole - total)


async def play(arm: str, fault: str, seconds: float, seed: int) -> tuple[list[float | None], float]:
    """Times to first token of requests for healthy instances after the warm-up; the machine's busy share."""
    with instances(ARMS[arm], FAULTS.get(fault, 0.0)) as running:
        addresses = list(running)
        async with Router(addresses, RouterConfig(retries=0, require="all")) as router:
            if fault == "killed":
                asyncio.get_running_loop().call_later(WARM_S, running[addresses[1]].kill)
            limit_s = 10.0 if arm == "ours" else 5.0
            seen, busy = await load(router, addresses, WARM_S + seconds, limit_s, seed)
    bad = {0} if fault else set()
    return [ttft_s for to, due, ttft_s in seen if to not in bad and due >= WARM_S], busy


def measure(arm: str, seconds: float, report: Report) -> None:
    name = "" if arm == "ours" else f"{arm}_"
    healthy, busy = uvloop.run(play(arm, "", seconds, seed=1))
    came = sorted(ttft for ttft in healthy if ttft is not None)
    p99_s = came[len(came) * 99 // 100]
    report.conditions[f"{name}healthy"] = {
        "requests": len(healthy), "lost": len(healthy) - len(came), "ttft_p99_ms": round(p99_s * 1e3), "busy": busy,
    }  # fmt: skip
    shares = [busy]
    for fault in FAULTS:
        ttfts, busy = uvloop.run(play(arm, fault, seconds, seed=2))
        good = sum(1 for ttft in ttfts if ttft is not None and ttft <= 3 * p99_s)
        report.add(f"{name}goodput_{fault}", [good / len(ttfts)], aim=GOODPUT_AIM if arm == "ours" else None)
        report.conditions[f"{name}{fault}"] = {"requests": len(ttfts), "busy": busy}
        shares.append(busy)
    if max(shares) > MAX_BUSY:
        report.conditions["void"] = f"the machine was busy for {max(shares):.0%} in {arm}, above {MAX_BUSY:.0%}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="of each run, after its warm-up")
    args = parser.parse_args()
    report = Report("What one bad decode instance costs the others")
    report.conditions |= {"seconds": args.seconds, "prompt_tokens": PROMPT_TOKENS, "arrivals_per_s": 0.7 * CAPACITY}
    for arm in ARMS:
        measure(arm, args.seconds, report)
    silent = report.figures["threads5_goodput_silent"]
    if silent >= 0.8:
        report.conditions["void"] = f"threads5_goodput_silent is {silent:g}: this load does not tell the arms apart"
    return report.finish(args.json_path)
