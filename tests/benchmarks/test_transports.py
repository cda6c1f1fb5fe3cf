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
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {
        f"{name}_{figure}"
        for name in ("shm", "tcp")
        for figure in (
            "ratio",
            "mb_per_s",
            "callback_ms_max",
            "receive_loop_ms",
            "receive_process_ms",
            "hash_loop_ms",
            "hash_process_ms",
        )
    } | {"tls_over_tcp", "tls_mb_per_s", "tls_clear_mb_per_s"}
    # so few small blocks say nothing of the cost; that nothing was moved would show
    for name in ("shm", "tcp"):
        assert 0.005 < figures[f"{name}_ratio"] < 20
        assert 1 < figures[f"{name}_mb_per_s"] < 100_000
        assert 0 < figures[f"{name}_callback_ms_max"] < 1000


def test_the_raw_arms_move_the_bytes() -> None:
    bench = Bench(3, 100_000)
    try:
        for arm in (bench.raw_shm, lambda: bench.raw_shm(4096), bench.raw_tcp):
            bench.spoil()
            before = bytes(bench.regions[0].map)
            arm()
            assert bytes(bench.regions[0].map) != before
        bench._raw = [(from_, into, checksum ^ 1) for from_, into, checksum in bench._raw]
        for arm in (bench.raw_shm, bench.raw_tcp):
            with pytest.raises(RuntimeError, match="did not bring"):
                arm()
    finally:
        bench.close()
