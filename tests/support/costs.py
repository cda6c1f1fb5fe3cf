"""What each test costs in CPU time, and what a run of them costs: a plugin of pytest.

CPU time is that of the process that runs a test and of the children that it waited for, from its first fixture to the
end of its last one. A run leaves a record (`RECORD`), which `tests/test_budget.py` compares with `tests/budget.toml`,
and ends with a line: tests, seconds, the dearest. With xdist the workers measure and the controller records. Loaded by
the root's `conftest.py`; knows no test.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

#: in the cache of pytest
RECORD = "fdasync/costs.json"
_COST = "cpu_s"
_BEGAN = pytest.StashKey[float]()
_DEAREST = 5


def cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class Costs:
    """Collects what tests of a run cost. One per process of a run; that of the controller writes the record."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._began_s = time.monotonic()
        self._tests: dict[str, float] = {}
        # in real time: what waits costs no CPU
        self._lasted_s: dict[str, float] = defaultdict(float)
        # before the first test: imports and collecting, in each process
        self._collecting_s = [0.0]

    def pytest_collection_finish(self) -> None:
        self._collecting_s[0] = cpu_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGAN] = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_COST, cpu_s() - item.stash[_BEGAN]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._lasted_s[report.nodeid] += report.duration
        for name, value in report.user_properties:
            if name == _COST and isinstance(value, float):
                self._tests[report.nodeid] = value

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._collecting_s.append(getattr(node, "workeroutput", {}).get("collecting_s", 0.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            session.config.workeroutput["collecting_s"] = self._collecting_s[0]  # type: ignore[attr-defined]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tests:
            return
        tests_s, collecting_s = sum(self._tests.values()), sum(self._collecting_s)
        dearest = sorted(self._tests.items(), key=lambda one: -one[1])[:_DEAREST]
        terminalreporter.write_sep("=", "cost")
        for name, cost in dearest:
            terminalreporter.write_line(f"{cost:6.1f} CPU-s  {name}")
        terminalreporter.write_line(
            f"{len(self._tests)} tests in {time.monotonic() - self._began_s:.0f} s: {tests_s + collecting_s:.0f} CPU-s, "
            f"{collecting_s:.0f} of them to import and collect in {len(self._collecting_s)} processes"
        )
        if (folder := self._folder()) is not None:
            (folder / "costs.json").write_text(
                json.dumps(
                    {
                        "markexpr": self._config.option.markexpr,
                        "collecting_s": collecting_s,
                        "tests": self._tests,
                        "lasted_s": self._lasted_s,
                    }
                )
            )

    def _folder(self) -> Path | None:
        cache = getattr(self._config, "cache", None)
        return None if cache is None else cache.mkdir("fdasync")


def by_folder(tests: dict[str, float], folders: list[str]) -> dict[str, float]:
    """CPU seconds by the longest folder of `folders` that a test is in; "": in none."""
    found: dict[str, float] = defaultdict(float)
    for name, cost in tests.items():
        found[max((one for one in folders if name.startswith(f"{one}/")), key=len, default="")] += cost
    return found
