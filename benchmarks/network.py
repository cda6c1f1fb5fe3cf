"""Hand-overs between two hosts: blocks over the tcp transport against a plain socket, on wires that delay and lose.

Two network namespaces are the hosts, and a process between two TUN devices is the wire (`tests/system/network`); it
takes root. On each wire both arms bring the same blocks in turn, over connections that stay: `ours` is
`TcpTransport.receive`, asked for and checked block by block; `raw` is a plain socket whose other end sends the same
bytes at once. A figure of `goodput` is the ratio of the medians; `slowest` the ratio of the slowest of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks._report import Report, calibrate_us
from tests.system.network.hosts import Host, Wire, why_not

A, B = "10.9.0.1", "10.9.0.2"
#: name, delay each way in ms, loss, Mbit/s
WIRES = (("lan", 0.0, 0.0, 0), ("near", 0.2, 0.01, 100), ("region", 2.0, 0.01, 100), ("far", 20.0, 0.01, 100))
AIM = 0.9


def play(delay_ms: float, loss: float, rate_mbit: float, blocks: int, nbytes: int, pairs: int) -> dict[str, Any]:
    """Seconds of both arms over one wire."""
    side = [sys.executable, "-m", "benchmarks._network_side"]
    with (
        Host() as a,
        Host() as b,
        Wire(a, b, A, B, delay_s=delay_ms / 1e3, loss=loss, rate_mbit=rate_mbit, seed=1),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="blocks of a hand-over (default 16)")
    parser.add_argument("--block-nbytes", type=int, default=1 << 18, help="KV of a block (default 256 KiB)")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of each figure (default 9)")
    parser.add_argument("--json", metavar="FILE", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    report = Report("Hand-overs between two hosts")
    report.conditions["calibration_us"] = round(calibrate_us(), 1)
    for name, delay_ms, loss, rate_mbit in WIRES:
        found = play(delay_ms, loss, rate_mbit, options.blocks, options.block_nbytes, options.pairs)
        ours, raw = found["times"]["ours"], found["times"]["raw"]
        report.conditions[name] = {
            "delay_ms": delay_ms, "loss": loss, "rate_mbit": rate_mbit,
            "ours_s": round(statistics.median(ours), 4), "raw_s": round(statistics.median(raw), 4),
            "mb_per_s": round(found["nbytes"] / 1e6 / statistics.median(ours), 1),
        }  # fmt: skip
        middle = statistics.median(raw)
        report.add(f"{name}_goodput", [middle / each for each in ours], aim=AIM)
        report.add(f"{name}_slowest", [max(ours) / max(raw)])
    report.finish(options.json_path)


if __name__ == "__main__":
    main()
