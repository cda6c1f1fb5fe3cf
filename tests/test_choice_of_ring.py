"""What the root's `conftest.py` makes of the marks `ci`, `ci(after=N)` and `heavy`, in a run of pytest on a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.outer import outer_environment

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.ci


def collected(folder: Path, text: str) -> tuple[int, list[str], str]:
    """The status of pytest, names of the first ring's tests of a file with the text, and all that pytest said."""
    file = folder / "test_theirs.py"
    file.write_text(f"import pytest\n\n{dedent(text)}")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(ROOT / "pyproject.toml"), "--collect-only"]
    asked = subprocess.run(
        [*command, "-q", "-m", "not ci and not nightly", str(file)],
        cwd=ROOT,
        env=outer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line.rpartition("::")[2] for line in asked.stdout.splitlines() if "::" in line]
    return asked.returncode, names, asked.stdout + asked.stderr


def test_cases_that_differ_stay_and_marks_choose_the_rest(tmp_path: Path) -> None:
    status, names, said = collected(
        tmp_path,
        """
        @pytest.mark.ci(after=2)
        @pytest.mark.parametrize("left", ["a", "b"])
        @pytest.mark.parametrize("right", ["c", "d"])
        def test_some(left, right): ...

        @pytest.mark.ci
        def test_none(): ...

        @pytest.mark.nightly
        @pytest.mark.ci(after=1)
        @pytest.mark.parametrize("one", [1, 2])
        def test_of_the_night(one): ...

        @pytest.mark.heavy("it says why")
        def test_dear(): ...
    """,
    )
    assert (status, names) == (0, ["test_some[c-a]", "test_some[d-b]", "test_dear"]), said


@pytest.mark.parametrize(
    ("marks", "problem"),
    [
        ("@pytest.mark.ci(2)", "ci() takes after=N"),
        ("@pytest.mark.ci(before=2)", "ci() takes after=N"),
        ("@pytest.mark.ci(after=2)", "on a test of several cases"),
        ("@pytest.mark.heavy", "heavy() takes the reason"),
        ("@pytest.mark.heavy(1)", "heavy() takes the reason"),
    ],
)
def test_a_mark_that_means_nothing_is_refused(tmp_path: Path, marks: str, problem: str) -> None:
    status, _, said = collected(tmp_path, f"{marks}\ndef test_one(): ...\n")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert problem in said
