"""The benchmark of transports runs, and its arms notice what would make them lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fleet.transport_bench import Bench

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def test_figures(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ("--blocks", "8", "--block-nbytes", "65536", "--pairs", "2")
    command = [sys.executable, "-m", "benchmarks", "transports", *sizes, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    figures = report["figures"]
    assert set(figures) == {
        f"{name}_{figure}" for name in ("shm", "tcp") for figure in ("ratio", "callback_ms_max", "receive_process_ms")
    } | {"tls_over_tcp"}
    # so few small blocks say nothing of the cost; that nothing was moved would show
    for name in ("shm", "tcp"):
        assert 0.005 < figures[f"{name}_ratio"] < 20
        assert 1 < report["conditions"][f"{name}_ratio_mb_s"]["ours"][0] < 100_000
        assert 0 < figures[f"{name}_callback_ms_max"] < 1000


def test_the_raw_arms_move_the_bytes() -> None:
    with Bench(3, 100_000, []) as bench:
        for arm in (bench.raw_shm, bench.raw_tcp):
            bench.spoil()
            before = bytes(bench._regions[0].map)
            arm()
            assert bytes(bench._regions[0].map) != before
        bench._raw = [(from_, into, checksum ^ 1) for from_, into, checksum in bench._raw]
        for arm in (bench.raw_shm, bench.raw_tcp):
            with pytest.raises(RuntimeError, match="did not bring"):
                arm()
