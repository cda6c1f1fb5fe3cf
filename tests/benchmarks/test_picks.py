"""The benchmark of counting picks runs, and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_picks_writes_figures_and_shares(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.picks", "--steps", "20", "--runs", "1", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {
        "counting_us_a_step", "engine_us_a_step", "counting_share", "counting_core_share", "whole_us_a_step",
        "whole_share", "calibration_us",
    }  # fmt: skip
    # looking at every row costs what looking at few saves, on any machine
    assert figures["whole_us_a_step"] > 10 * figures["counting_us_a_step"]
