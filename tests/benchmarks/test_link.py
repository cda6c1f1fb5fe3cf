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
    command = [sys.executable, "-m", "benchmarks", "link", "--runs", "1", "--messages", "2000"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    leases = {f"lease_p{part}_ms_{in_flight}" for part in (50, 99) for in_flight in (64, 512)}
    assert set(report["figures"]) == {"link_msgs_per_s"} | leases
    assert all(value > 0 for value in report["figures"].values())
    assert report["conditions"]["messages"] == 2000
    # the other process ended, and nobody complained
    assert "Traceback" not in done.stderr
