"""Processes that only take CPU beside a command, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fdasync.testing.harness.leaks import children
from tests.support.busy import busy, main
from tests.support.commands import is_running

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def wait(until: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() < begun + 120
        time.sleep(0.01)


def ticks(pid: int) -> int:
    """CPU time that it took, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.ci
def test_they_take_cpu_until_the_block_ends() -> None:
    with busy(2) as processes:
        assert children() == sorted(process.pid for process in processes)
        for process in processes:
            wait(lambda pid=process.pid: ticks(pid) >= 5)
    assert children() == []
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
@pytest.mark.ci
def test_its_status_is_the_command_s(code: str, status: int) -> None:
    assert main(["1", "--", sys.executable, "-c", code]) == status
    assert children() == []


@pytest.mark.ci
def test_bad_arguments_and_commands_have_a_status_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["8", "make"]) == 2
    assert "usage" in capfd.readouterr().err
    assert main(["1", "--", "/nowhere/command"]) == 127
    assert "/nowhere/command" in capfd.readouterr().err


@pytest.mark.ci
def test_they_end_where_it_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os, time, pathlib; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    words = [sys.executable, "-m", "tests.support.busy", "1", "--", sys.executable, "-c", code]
    named = 0
    with subprocess.Popen(words, cwd=ROOT) as process:
        try:
            wait(lambda: told.exists() and bool(told.read_text()))
            named = int(told.read_text())
            ours = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            (spins,) = {int(pid) for pid in ours} - {named}
        finally:
            process.kill()
            if named:
                os.kill(named, signal.SIGKILL)
    wait(lambda: not is_running(spins))
