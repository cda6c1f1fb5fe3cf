"""Chaos with real processes, for a short while: `tests/nightly/chaos/chaos.py` finds nothing wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[3]
# of what runs for so many minutes: the start, the quiet after each round, the end, on a machine that is busy;
# the short one says so before pytest's own limit ends everything
FACTOR, MORE_S = 2.0, 75.0
# minutes
SHORT = 0.75


def play(folder: Path, minutes: float, seed: int, transport: str, *options: str) -> dict[str, float]:
    """The figures. Everything that it starts has this process's group, and none of it outlives this."""
    out = folder / "figures.json"
    command = [sys.executable, "-m", "tests.nightly", "chaos", "--minutes", f"{minutes}", "--seed", f"{seed}"]
    process = subprocess.Popen(
        [*command, "--transport", transport, "--json", str(out), *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=60 * minutes * FACTOR + MORE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"seed {seed} over {transport} did not end")
    finally:
        # its instances ask the kernel to be killed with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    print(errors)
    assert process.returncode == 0, errors
    figures: dict[str, float] = json.loads(out.read_text())["figures"]
    return figures


def assert_served(figures: dict[str, float], right: float) -> None:
    """0.99 to 0.999 are as a rule; what is lost was lost with an error that says "ask again"."""
    assert figures["served_right"] > right
    assert figures.get("requests_lost", 0) < (1 - right) * figures["requests"]


def test_the_short_play_is_given_up_before_pytest_gives_up(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) > 60 * SHORT * FACTOR + MORE_S


@pytest.mark.nightly
def test_nothing_goes_wrong_while_processes_and_links_do(tmp_path: Path) -> None:
    figures = play(tmp_path, minutes=SHORT, seed=20, transport="shm")
    assert figures["late_words_refused"] > 0
    assert figures["faults"] > 5
    assert figures["requests_right"] > 50
    assert_served(figures, right=0.9)


@pytest.mark.nightly
def test_trainers_that_die_sleeps_and_wakes_that_fail_strike_and_are_recovered_from(tmp_path: Path) -> None:
    kinds = ("trainer dies", "trainer stops", "sleep", "wake fails", "wake without folder")
    figures = play(tmp_path, 0.4, 23, "shm", "--instances", "1", "1", "--only", *kinds)
    assert {kind for kind in kinds if figures.get(f"struck: {kind}", 0) < 1} == set()
    assert figures["broken_s"] < 4
    assert figures["requests_right"] > 50
    # refused while weights were broken; nothing else goes wrong in between
    assert figures.get("requests_lost", 0) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("seed", [21, 22])
def test_nothing_goes_wrong_for_longer(tmp_path: Path, seed: int, transport: str) -> None:
    figures = play(tmp_path, minutes=3.0, seed=seed, transport=transport)
    assert figures["faults"] > 40
    assert_served(figures, right=0.95)
