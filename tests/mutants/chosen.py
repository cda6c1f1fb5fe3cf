"""A plugin of pytest: runs chosen tests of the files that it is given, and writes down what comes of each as it comes.

Loaded by `trial.py`, in the copy of the tree that has a mutant. What a run that hangs or crashes was about is the last
line that it wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--chosen", type=Path, default=None, metavar="FILE", help="ids of the tests to run, a list in JSON")
    group.addoption("--progress", type=Path, default=None, metavar="FILE", help="where to write what comes of them")
    group.addoption(
        "--collected", type=Path, default=None, metavar="FILE", help="where to write the ids that are found"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Chosen(config), "mutants-chosen")


class _Chosen:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._progress: Path | None = config.getoption("--progress")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        # behind `conftest.py`, and before tests are imported: that a property fails is all that is asked; the smallest
        # example of it would take minutes
        settings.register_profile(
            "mutants", settings.default, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen: Path | None = self._config.getoption("--chosen")
        if chosen is not None:
            wanted = set(json.loads(chosen.read_text()))
            items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        collected: Path | None = self._config.getoption("--collected")
        if collected is not None:
            collected.write_text(json.dumps([item.nodeid for item in session.items]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("ended", nodeid)

    def _write(self, what: str, nodeid: str) -> None:
        if self._progress is not None:
            with self._progress.open("a") as file:
                file.write(json.dumps([what, nodeid]) + "\n")
