"""What the HTTP front costs: 256 streams through it against 256 readers of a router, over the same instance.

One synthetic instance with steps of 20 ms serves both arms, which alternate (`arms.py`). The direct arm is a router in
a process of its own, with a reader for each stream. The other is `fdasync http` in a process of its own, with
raw-socket clients in a third, which count events and parse no JSON.

    http_over_direct_256   tokens per second through the front, over those of the readers
    gap_p99_ms_256         between two events of one stream; `gap_p99_ms_direct` is the readers'
    front_us_per_chunk     CPU of the front's process for one event
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_http.config import HttpConfig

from benchmarks.http.arms import COUNTING, PROMPT_TOKENS, TOKENS, VOCAB_SIZE, Counted, Load
from benchmarks.lib.arguments import above_zero, at_least_one, parser_of, up_to
from benchmarks.lib.child import Child
from benchmarks.lib.report import Report
from fdasync.testing import synthetic_config

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig

STEP_S = 0.02
AIMS = {"http_over_direct_256": 0.97, "gap_p99_ms_256": 30.0, "front_us_per_chunk": 40.0}
# of the end of the count, in which the front's CPU is not looked at
_EDGE_S = 0.5


def engine_config(streams: int) -> EngineConfig:
    values = {
        "num_moe_layers": 48, "top_k": 8, "num_experts": 128, "vocab_size": VOCAB_SIZE, "eos_id": -1,
        "block_tokens": 16, "max_context_tokens": TOKENS + 2 * PROMPT_TOKENS, "num_blocks": streams * 140,
        "step_s": STEP_S, "free": True, "values_spec": False, "pass_stamp": False,
    }  # fmt: skip
    return synthetic_config(values, max_running=streams, max_requests=streams + 8, host_blocks=64, max_step_tokens=8192)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has spent, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_arm(name: str, at: str, load: Load, pid: int) -> tuple[Counted, float]:
    """Run one arm; what it counted, and the share of a core that this process took meanwhile."""
    loop = asyncio.get_running_loop()
    with Child("benchmarks.http.arms", name, at, msgspec.json.encode(load).decode()) as arm:
        if await asyncio.to_thread(arm.line) != COUNTING:
            raise RuntimeError(f"{name} counted nothing")
        began, before = loop.time(), cpu_s(pid)
        await asyncio.sleep(load.count_s - _EDGE_S)
        share = (cpu_s(pid) - before) / (loop.time() - began)
        return msgspec.json.decode(await asyncio.to_thread(arm.line), type=Counted), share


async def measure(load: Load, runs: int) -> dict[str, list[float]]:
    """Figures of each run."""
    found: dict[str, list[float]] = {}
    async with LocalFleet(plans_for(engine_config(load.streams), {"mixed": 1})) as instances:
        (address,) = instances.addresses
        words = ("http", "--connect", address, "--port", "0", "--rows", "none", "--drain-s", "1")
        with Child("fdasync", *words) as front:
            ready = re.search(r"http://127\.0\.0\.1:(\d+)", await instances.while_alive(asyncio.to_thread(front.line)))
            assert ready is not None
            ways = {"front": ready[1], "router": address}
            for run in range(runs):
                counted = {}
                for name in ways if run % 2 else reversed(ways):
                    arm = run_arm(name, ways[name], load, front.pid)
                    counted[name] = await instances.while_alive(arm)
                (clients, share), (readers, _) = counted["front"], counted["router"]
                for name, value in {
                    f"direct_tokens_s_{load.streams}": readers.tokens / load.count_s,
                    f"http_over_direct_{load.streams}": clients.tokens / readers.tokens,
                    f"gap_p99_ms_{load.streams}": clients.gap_p99_s * 1e3,
                    "gap_p99_ms_direct": readers.gap_p99_s * 1e3,
                    "front_us_per_chunk": share / (clients.events / load.count_s) * 1e6,
                }.items():
                    found.setdefault(name, []).append(value)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=at_least_one, default=3, help="runs of each arm; medians are reported")
    parser.add_argument("--streams", type=up_to(HttpConfig().max_live), default=256, help="of each arm")
    parser.add_argument("--seconds", type=above_zero, default=8.0, help="that are counted in each run")
    args = parser.parse_args()
    report = Report("The HTTP front")
    report.conditions |= {"streams": args.streams, "step_s": STEP_S}
    load = Load(streams=args.streams, warm_s=3.0, count_s=args.seconds)
    for name, values in uvloop.run(measure(load, args.runs)).items():
        report.add(name, values, aim=AIMS.get(name))
    report.finish(args.json_path)
