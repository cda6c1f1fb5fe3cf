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

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import uvloop
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router

from benchmarks.fleet.pd_fleet import Fleet, busy_s, fleet
from benchmarks.lib.report import Report
from fdasync.errors import FdasyncError
from fdasync.request import SamplingParams

ARMS = {"ours": 0, "serial": 1, "threads5": 5}
FAULTS = {"slow": 2.0, "silent": -1.0, "killed": 0.0}
AIMS = {"goodput_slow": 0.95, "goodput_silent": 0.95, "goodput_killed": 0.95}
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


def spec(role: str, **keys: Any) -> dict[str, Any]:
    runner = {"num_blocks": 8192, "step_s": STEP_S, "token_s": TOKEN_S, "max_context_tokens": 4096}
    config = {
        "runner": "synthetic",
        "runner_config": runner,
        "process": "inline",
        "role": role,
        "host_blocks": 2048,
        "max_running": 256,
        "max_step_tokens": PROMPT_TOKENS,
        "leases": RULES,
    }
    return {"role": role, "config": config, **keys}


class Load:
    """An open loop of requests, and their times to first token."""

    def __init__(self, router: Router, running: Fleet, seed: int) -> None:
        self._router = router
        self._fleet = running
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        # decode instance, arrival, time to first token or None
        self.seen: list[tuple[int, float, float | None]] = []

    async def run(self, seconds: float) -> None:
        """Send requests for so many seconds."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        number, due = 0, 0.0
        while due < seconds:
            await asyncio.sleep(begin + due - loop.time())
            task = loop.create_task(self._one(number, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1
            due += self._rng.expovariate(0.7 * CAPACITY)

    async def _one(self, number: int, due: float) -> None:
        to = number % DECODERS
        prompt = [self._rng.randrange(1000) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
        begin = time.perf_counter()
        ttft_s = None
        try:
            generation = self._router.generate(
                prompt,
                params,
                deadline_s=60.0,
                routing=False,
                prefill=self._fleet.addresses["p0"],
                decoders=[self._fleet.addresses[f"d{to}"]],
            )
            async with generation as stream:
                async for _ in stream:
                    ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - begin
        except FdasyncError:
            # a request for the bad instance
            ttft_s = None
        finally:
            self.seen.append((to, due, ttft_s))

    async def finish(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)


async def play(arm: str, fault: str, seconds: float, seed: int) -> tuple[list[float | None], float]:
    """Times to first token of requests for healthy instances after the warm-up; the machine's busy share."""
    prefill = ("p0", spec("prefill", workers=ARMS[arm]))
    decoders = [
        (f"d{number}", spec("decode", answers_s=FAULTS.get(fault, 0.0) if number == 0 else 0.0))
        for number in range(DECODERS)
    ]
    with fleet([prefill, *decoders]) as running:
        config = RouterConfig(retries=0, require="all")
        async with Router(list(running.addresses.values()), config) as router:
            load = Load(router, running, seed)
            if fault == "killed":
                asyncio.get_running_loop().call_later(WARM_S, running.kill, "d0")
            before, total = busy_s()
            await load.run(WARM_S + seconds)
            after, whole = busy_s()
            await load.finish(10.0 if arm == "ours" else 5.0)
    bad = {0} if fault in FAULTS else set()
    return [ttft for to, due, ttft in load.seen if to not in bad and due >= WARM_S], (after - before) / (whole - total)


def measure(arm: str, seconds: float, seed: int, report: Report, faults: list[str]) -> None:
    name = "" if arm == "ours" else f"{arm}_"
    print(f"{arm}: all healthy", file=sys.stderr, flush=True)
    healthy, busy = uvloop.run(play(arm, "", seconds, seed))
    came = sorted(ttft for ttft in healthy if ttft is not None)
    p99_s = came[len(came) * 99 // 100]
    report.add(f"{name}healthy_ttft_p99_ms", [p99_s * 1e3])
    report.conditions[f"{name}healthy"] = {"requests": len(healthy), "lost": len(healthy) - len(came), "busy": busy}
    shares = [busy]
    for fault in faults:
        print(f"{arm}: one is {fault}", file=sys.stderr, flush=True)
        ttfts, busy = uvloop.run(play(arm, fault, seconds, seed + 1))
        good = sum(1 for ttft in ttfts if ttft is not None and ttft <= 3 * p99_s)
        report.add(f"{name}goodput_{fault}", [good / len(ttfts)], aim=AIMS.get(f"{name}goodput_{fault}"))
        report.conditions[f"{name}{fault}"] = {"requests": len(ttfts), "busy": busy}
        shares.append(busy)
    if max(shares) > MAX_BUSY:
        report.conditions["void"] = f"the machine was busy for {max(shares):.0%} in {arm}, above {MAX_BUSY:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, after its warm-up (default 60)")
    parser.add_argument("--arm", choices=list(ARMS), action="append", help="only these arms")
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help="only these faults")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = Report("What one bad decode instance costs the others")
    report.conditions |= {"seconds": args.seconds, "prompt_tokens": PROMPT_TOKENS, "arrivals_per_s": 0.7 * CAPACITY}
    for arm in args.arm or ARMS:
        measure(arm, args.seconds, args.seed, report, args.fault or list(FAULTS))
    silent = report.figures.get("threads5_goodput_silent")
    if silent is not None and silent >= 0.8:
        report.conditions["void"] = f"threads5_goodput_silent is {silent:g}: this load does not tell the arms apart"
    report.finish(args.json)
    if "void" in report.conditions:
        print(f"void: {report.conditions['void']}", file=sys.stderr)
        sys.exit(1)
