"""The benchmark of links runs, and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def test_link_writes_figures_and_conditions(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "link", "--runs", "1", "--messages", "2000", "--trips", "50"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert {"link_msgs_per_s", "link_lease_asks_per_s", "link_round_trip_us_p50"} <= set(report["figures"])
    assert all(value > 0 for value in report["figures"].values())
    assert report["conditions"]["messages"] == 2000
    # the other process ended, and nobody complained
    assert "Traceback" not in done.stderr


def test_what_keys_cost(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "link", "--curve", "--runs", "1", "--messages", "2000"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert {"tcp_msgs_per_s", "curve_msgs_per_s", "curve_ratio"} <= set(figures)
    assert all(value > 0 for value in figures.values())
    assert "Traceback" not in done.stderr
