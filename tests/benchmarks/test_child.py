"""Child processes of benchmarks are heard, asked, and gone when they are no longer needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.child import Child

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
ECHO = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(line.strip() * 2, flush=True)\nsys.exit(3)"
STAY = "import asyncio\nfrom benchmarks.lib.child import stay\nasyncio.run(stay(str(__import__('os').getpid())))"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "stays.py").write_text(STAY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


@pytest.mark.usefixtures("modules")
def test_a_child_answers_and_is_killed() -> None:
    with Child("echo") as child:
        assert child.line() == "ready"
        assert child.ask("ab") == "abab"
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    child.close()


@pytest.mark.usefixtures("modules")
def test_a_child_that_ends_by_itself_is_named() -> None:
    with Child("no_such_module") as child, pytest.raises(RuntimeError, match="no_such_module ended with status 1"):
        child.line()


@pytest.mark.usefixtures("modules")
def test_a_child_that_stays_ends_with_its_parent() -> None:
    parent = "import os\nfrom benchmarks.lib.child import Child\nprint(Child('stays').line(), flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, check=True)
    # the child has the parent's stderr: `run` returns when both have ended
    assert done.stdout.strip().isdigit()
