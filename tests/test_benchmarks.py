"""The benchmarks run, and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_engine_step_writes_figures_and_conditions(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.engine_step", "--steps", "20", "--runs", "1", "--only", "_32"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report) == {"figures", "conditions"}
    assert set(report["figures"]) == {"step_us_final_32", "step_us_stream_32", "calibration_us"}
    # so few steps say nothing of the cost; a stream of 32 readers does cost something
    assert 1 < report["figures"]["step_us_stream_32"] < 100_000
    assert report["conditions"]["steps"] == 20
    assert "step_us_final_32" in done.stdout
