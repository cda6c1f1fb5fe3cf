"""Which tests run which lines, children of theirs included: made by a run of the tests under coverage."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from coverage import CoverageData

from tests.mutants.mutant import function_lines, statement_lines
from tests.mutants.trial import file_of
from tests.support.outer import outer_environment

if TYPE_CHECKING:
    from collections.abc import Iterable

_CONFIG = Path(__file__).with_name("coverage.ini")
_PHASED = re.compile(r"(?P<test>.+) \((?P<when>setup|call|teardown)\)", re.DOTALL)


def make_map(out: Path, arguments: list[str]) -> int:
    """Run pytest with `arguments` and write the data of coverage to `out`. Returns pytest's exit status: the map of a
    run with failures is as good, but for what they did not reach."""
    parts = out.absolute().with_name(f"{out.name}.parts")
    shutil.rmtree(parts, ignore_errors=True)  # of a run that was stopped
    parts.mkdir(parents=True)
    costs_of(out).unlink(missing_ok=True)
    # `combine` looks for files that are named as what it makes
    environment = {
        **outer_environment(),
        "COVERAGE_PROCESS_START": str(_CONFIG),
        "FDASYNC_MAP": str(parts / out.name),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.contexts", "--costs", str(costs_of(out.absolute()))]
    status = subprocess.run([*command, *arguments], env=environment, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={_CONFIG}"]
    subprocess.run([*combine, f"--data-file={out.absolute()}", str(parts)], check=True)
    # a process that was killed leaves its part half written
    shutil.rmtree(parts)
    return status


def costs_of(data: Path) -> Path:
    """Where the costs of a map's tests are kept."""
    return data.with_name(f"{data.name}.costs.json")


def read_costs(path: Path) -> dict[str, float]:
    """CPU seconds by id of a test; empty: there is no record."""
    found: dict[str, float] = json.loads(path.read_text())["tests"] if path.exists() else {}
    return found


class Reached(msgspec.Struct, frozen=True):
    """The tests that run a line.

    Attributes:
        direct: ids of the tests that run it themselves, or whose child does; of a line that runs when its module is
            imported all that run anything of the file.
        beside: those that run other lines of its function. Behind an `await` that a cancellation or a deadline ended
            Python 3.11 tells tracers nothing of the function's other lines.
        shared: files of which a fixture runs it: of a fixture of a whole module only the first test is known.
    """

    direct: set[str]
    beside: set[str]
    shared: set[str]


def _phased(contexts: Iterable[str]) -> list[tuple[str, str]]:
    """The tests of contexts, and in which phase of theirs."""
    return [(found["test"], found["when"]) for one in contexts if (found := _PHASED.fullmatch(one))]


class Map:
    """The data of a run with contexts. Reads one file's part at a time."""

    def __init__(self, data: Path) -> None:
        self._data = CoverageData(str(data))
        self._data.read()
        self._files = sorted(self._data.measured_files())
        self._read: dict[str, dict[int, list[str]]] = {}

    def test_files(self) -> set[str]:
        """Files of all tests of the run."""
        return {file_of(test) for test, _ in _phased(self._data.measured_contexts())}

    def reached(self, path: str, source: str, line: int) -> Reached:
        """Of the statement around a line of a file, whose path is relative to the repository's root."""
        contexts = self._contexts(path, statement_lines(source, line))
        of_import = self._contexts(path, self._lines(path)) if "" in contexts else set()
        direct = {test for test, _ in _phased(contexts | of_import)}
        beside = {test for test, _ in _phased(self._contexts(path, function_lines(source, line)))}
        shared = {file_of(test) for test, when in _phased(contexts) if when == "setup"}
        return Reached(direct, beside - direct, shared)

    def _contexts(self, path: str, lines: Iterable[int]) -> set[str]:
        known = self._lines(path)
        return {one for line in lines for one in known.get(line, ())}

    def _lines(self, path: str) -> dict[int, list[str]]:
        if path not in self._read:
            found = [name for name in self._files if name == path or name.endswith(f"/{path}")]
            self._read = {path: self._data.contexts_by_lineno(found[0]) if found else {}}
        return self._read[path]
