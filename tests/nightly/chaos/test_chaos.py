"""Chaos with real processes, for a short while: `tests/nightly/chaos/chaos.py` finds nothing wrong.

A busy machine takes longer to play as many faults, and no figure here says how long: each play goes on until it has
played enough. What is held against time is what the fleet does, with limits that a slow machine keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.network.hosts import why_not

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[3]
# only a hang takes so long: three minutes on a quiet machine, and twice as many where others have the cores
HANG_S = 900.0
# from any fault to the next right answer: 3 to 8 s as a rule
RECOVER_S = 60.0


def play(folder: Path, minutes: float, seed: int, *options: str) -> dict[str, float]:
    """The figures. Everything that it starts has this process's group, and none of it outlives this."""
    out = folder / "figures.json"
    command = [sys.executable, "-m", "tests.nightly", "chaos", "--minutes", f"{minutes}", "--seed", f"{seed}"]
    process = subprocess.Popen(
        [*command, "--json", str(out), *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"seed {seed} with {options} did not end")
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
    assert figures["fault_to_success_s_max"] < RECOVER_S
    assert figures.get("requests_lost", 0) < (1 - right) * figures["requests"]


def test_a_play_that_hangs_is_given_up_before_pytest_gives_up(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) > HANG_S


@pytest.mark.nightly
def test_nothing_goes_wrong_while_processes_and_links_do(tmp_path: Path) -> None:
    figures = play(tmp_path, 0.75, 20, "--faults", "6")
    assert figures["late_words_refused"] > 0
    assert figures["faults"] >= 6
    assert figures["requests_right"] > 50
    assert_served(figures, right=0.9)


@pytest.mark.nightly
def test_trainers_that_die_sleeps_and_wakes_that_fail_strike_and_are_recovered_from(tmp_path: Path) -> None:
    kinds = ("trainer dies", "trainer stops", "sleep", "wake fails", "wake without folder")
    figures = play(tmp_path, 0.4, 23, "--instances", "1", "1", "--only", *kinds)
    assert {kind for kind in kinds if figures.get(f"struck: {kind}", 0) < 1} == set()
    assert figures["broken_s"] < 4
    assert figures["requests_right"] > 50
    # refused while weights were broken; nothing else goes wrong in between
    assert figures.get("requests_lost", 0) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("seed", [21, 22])
def test_nothing_goes_wrong_for_longer(tmp_path: Path, seed: int, transport: str) -> None:
    figures = play(tmp_path, 3.0, seed, "--transport", transport, "--faults", "41")
    assert figures["faults"] > 40
    assert_served(figures, right=0.95)


@pytest.mark.nightly
def test_nothing_goes_wrong_between_hosts_whose_wires_are_cut(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    figures = play(tmp_path, 1.5, 21, "--hosts", "--faults", "15")
    assert figures["faults"] >= 15
    assert_served(figures, right=0.9)
