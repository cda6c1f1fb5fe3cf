"""Hand-overs between two hosts: blocks over the tcp transport against a plain socket, on networks that delay and lose.

Two network namespaces are the hosts. A pair of veth devices of 1 Gbit/s joins them, or a process between two TUN
devices that delays and loses (`tests/system/network`); it takes root. Both arms bring the same blocks in turn, over
connections that stay: `ours` is `TcpTransport.receive`, asked for and checked block by block; `raw` is a plain socket
whose other end sends the same bytes at once, which is the bound. A figure of `goodput` is the ratio of the medians, of
`p99` that of the 99th percentiles; `bare` is one more network, as fast as the process between the devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.lib.report import Report, calibrate_us
from tests.system.network.hosts import NETWORKS, Host, Wire, join, why_no_cable, why_not

A, B = "10.9.0.1", "10.9.0.2"
AIM = 0.9
_BARE = "bare"


def play(network: str, blocks: int, nbytes: int, pairs: int) -> dict[str, Any]:
    """Seconds of both arms over one network."""
    a, b = Host(), Host()
    joined = Wire(a, b, A, B) if network == _BARE else join(network, a, b, A, B, seed=1)
    side = [sys.executable, "-m", "benchmarks.fleet.network_side"]
    with (
        a,
        b,
        joined,
        subprocess.Popen(
            a.command([*side, "send", A, str(blocks), str(nbytes)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as sender,
    ):
        try:
            assert sender.stdout is not None
            told = sender.stdout.readline().strip()
            receiver = b.command([*side, "receive", B, str(pairs), told])
            done = subprocess.run(receiver, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
        finally:
            sender.kill()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def p99(values: list[float]) -> float:
    """The 99th percentile: of fewer than 100 values the largest."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="blocks of a hand-over (default 16)")
    parser.add_argument("--block-nbytes", type=int, default=1 << 18, help="KV of a block (default 256 KiB)")
    parser.add_argument("--pairs", type=int, default=100, help="interleaved pairs of each figure (default 100)")
    parser.add_argument("--json", metavar="FILE", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if reason := why_not() or why_no_cable():
        parser.error(reason)
    report = Report("Hand-overs between two hosts")
    report.conditions["calibration_us"] = round(calibrate_us(), 1)
    for name in (*NETWORKS, _BARE):
        found = play(name, options.blocks, options.block_nbytes, options.pairs)
        ours, raw = found["times"]["ours"], found["times"]["raw"]
        delay_s, loss, rate_mbit = NETWORKS.get(name, (0.0, 0.0, 0.0))
        report.conditions[name] = {
            "delay_ms": delay_s * 1e3, "loss": loss, "rate_mbit": rate_mbit,
            "ours_s": round(statistics.median(ours), 4), "raw_s": round(statistics.median(raw), 4),
            "ours_p99_s": round(p99(ours), 4), "raw_p99_s": round(p99(raw), 4),
            "mb_per_s": round(found["nbytes"] / 1e6 / statistics.median(ours), 1),
        }  # fmt: skip
        middle = statistics.median(raw)
        report.add(f"{name}_goodput", [middle / each for each in ours], aim=AIM)
        report.add(f"{name}_p99", [p99(ours) / p99(raw)])
    report.finish(options.json_path)
