"""The benchmarks run, and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def test_engine_step_writes_figures_and_conditions(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "engine_step", "--steps", "20", "--runs", "1", "--only", "_32"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report) == {"figures", "conditions"}
    assert set(report["figures"]) == {"step_us_final_32", "step_us_stream_32"}
    # so few steps say nothing of the cost; a stream of 32 readers does cost something
    assert 1 < report["figures"]["step_us_stream_32"] < 100_000
    assert report["conditions"]["steps"] == 20
    # said of each run in one way
    assert {"numpy", "torch", "uvloop"} <= set(report["conditions"]["versions"])
    began_us, ended_us = report["conditions"]["calibration_us"]
    assert 0.05 < began_us / ended_us < 20
    assert "step_us_final_32" in done.stdout


def test_trip_counts_what_a_request_crosses(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "trip", "--list", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {"files", "store_files", "label_files"}
    plain, rest = done.stdout.split("with a store\n")
    stored, _ = rest.split("a label\n")
    files = {
        name: [line.strip() for line in part.splitlines() if line.endswith(".py")]
        for name, part in (("files", plain), ("store_files", stored))
    }
    assert {name: len(paths) for name, paths in files.items()}.items() <= figures.items()
    # in order of entry, and all the way
    for paths in files.values():
        assert paths[0].startswith("engine/")
        assert paths.index("scheduler/core.py") < paths.index("runner/synthetic/runner.py")
    assert "cache/store/memory.py" in files["store_files"]
    assert not [path for path in files["files"] if path.startswith(("cache/store", "pd"))]
