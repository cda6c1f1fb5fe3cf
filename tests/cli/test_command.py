"""The first lines of the `fdasync` command: Ctrl-C while it imports, descriptors that are closed, few open files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import COMMAND, DEADLINE_S, command, config_file, interruptible

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

# Ctrl-C comes while this module is looked for
INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from fdasync_command import main

main()
"""


def test_it_is_what_the_console_script_starts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"fdasync": "fdasync_command:main"}
    assert project["tool"]["setuptools"]["py-modules"] == ["fdasync_command"]


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("module", ["fdasync", "msgspec", "numpy", "fdasync.cli.store"])
def test_ctrl_c_while_it_imports_is_a_short_end(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, preexec_fn=interruptible,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.ci
def test_one_more_ctrl_c_at_its_end_changes_nothing() -> None:
    script = """
        import atexit, os, signal
        from fdasync_command import main

        atexit.register(os.kill, os.getpid(), signal.SIGINT)
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), "plugins", "--no-such-option"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "Interrupt" not in done.stderr


def test_its_own_import_is_light() -> None:
    script = "import sys; before = set(sys.modules); import fdasync_command; print(sorted(set(sys.modules) - before))"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert not [name for name in eval(said.stdout) if name.split(".")[0] == "fdasync"]


@pytest.mark.ci
@pytest.mark.parametrize("safe_path", [False, True])
def test_python_m_fdasync_is_the_same_command(safe_path: bool, tmp_path: Path) -> None:
    def say(*arguments: str) -> subprocess.CompletedProcess[str]:
        options = ["-P"] if safe_path else []
        return subprocess.run(
            [sys.executable, *options, "-m", "fdasync", *arguments],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
        )  # fmt: skip

    asked = say("--help")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith("Usage: python -m fdasync")
    missing = say("store", "ls", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.ci
def test_ctrl_c_under_python_m_fdasync_is_a_short_end() -> None:
    # as its first line is reached: before that Python imports the package, and no line of ours has run
    script = INTERRUPTED.replace("from fdasync_command import main\n\nmain()", "")
    script += "import runpy; runpy.run_module('fdasync', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", script, "fdasync.cli.store"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, preexec_fn=interruptible,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def closing(*fds: int) -> Callable[[], None]:
    def close() -> None:
        for fd in fds:
            os.close(fd)

    return close


@pytest.mark.ci
@pytest.mark.parametrize("fds", [(0,), (0, 1), (0, 1, 2), (1, 2)])
def test_closed_descriptors_are_no_others(fds: tuple[int, ...], tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    arguments = ["serve", "--config", str(config_file(tmp_path)), "--listen", f"ipc://{tmp_path}/m0"]
    options: dict[str, Any] = {"preexec_fn": closing(*fds), "pass_fds": [theirs]}
    with command(tmp_path, *arguments, "--ready-fd", str(theirs), **options) as running:
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            assert f"ipc://{tmp_path}/m0" in pipe.read()
        opened = [os.readlink(f"/proc/{running.process.pid}/fd/{fd}") for fd in fds]
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert opened == ["/dev/null"] * len(fds)
    assert "Traceback" not in running.text


@pytest.mark.ci
def test_what_ends_at_once_ends_well_with_closed_descriptors() -> None:
    done = subprocess.run(
        [*COMMAND, "plugins", "--no-load"], preexec_fn=closing(0, 1, 2), timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0


def files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.ci
def test_too_few_open_files_are_told_with_the_limit_and_the_way_out(tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(tmp_path)), "--listen", f"ipc://{tmp_path}/m0"]
    with command(tmp_path, "serve", *arguments, preexec_fn=files(20, 20)) as running:
        assert running.wait() == 2, running.text
    assert "open files: this process may open 20" in running.text
    assert "ulimit -n" in running.text
    assert len(running.text.splitlines()) == 1, running.text


@pytest.mark.ci
def test_it_takes_all_the_open_files_that_it_may(tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(tmp_path)), "--listen", f"ipc://{tmp_path}/m0"]
    with command(tmp_path, "serve", *arguments, preexec_fn=files(32, 600)) as running:
        running.until("ready at")
        assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (600, 600)
