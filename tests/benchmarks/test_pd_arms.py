"""Prefill and decode instances beside other ways to lease room: the arms differ, and in the way that they should."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ci, pytest.mark.nightly]


def figures(out: Path, *command: str) -> dict[str, float]:
    """Of a short run; on a busy machine it may call itself void, and ends with another code."""
    subprocess.run([sys.executable, "-m", "benchmarks", *command, "--json", str(out)], check=False, timeout=600)
    found: dict[str, float] = json.loads(out.read_text())["figures"]
    return found


def test_requests_that_are_prepared_one_by_one_take_longer(tmp_path: Path) -> None:
    found = figures(tmp_path / "out.json", "pd_headline", "--requests", "40")
    # of virtual time alone: ours is told what this machine's links and CPU take, which depends on other work here
    assert found["serial_over_bound"] > found["threads5_over_bound"] > 1


def test_a_silent_instance_costs_the_others_nothing_but_where_threads_wait_for_it(tmp_path: Path) -> None:
    found = figures(tmp_path / "out.json", "pd_isolation", "--seconds", "3")
    assert found["goodput_silent"] > 0.5 > found["serial_goodput_silent"]
