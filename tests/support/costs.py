"""What each test costs in CPU time and in real time, and what a run of them costs: a plugin of pytest.

A test's CPU time is that of the process that runs it and of the children that ended meanwhile, from its first fixture
to the end of its last one. A run ends with a line: tests, seconds, the dearest. `--costs FILE` keeps all of it;
`tests/test_budget.py` compares the record of `make test` with `tests/budget.toml`. With xdist the workers measure and
the controller records. The root's `conftest.py` loads it.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_COST, _REAL, _HEAVY = "cpu_s", "real_s", "heavy"
_BEGAN = pytest.StashKey[tuple[float, float]]()
_DEAREST = 5
# of a run to its end
_WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def core_s() -> float:
    """CPU seconds that this core takes for a fixed piece of work; the median of ten times."""
    times = []
    for _ in range(10):
        began = time.process_time()
        sum(one * one for one in range(400_000))
        times.append(time.process_time() - began)
    return median(times)


class Costs:
    """Collects what tests of a run cost. One per process of a run; that of the controller records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._began_at = time.time()
        self._tests: dict[str, float] = {}
        self._real: dict[str, float] = {}
        self._heavy: list[str] = []
        # of each process that runs tests: CPU until its first test; of a fixed piece of work before it and at the end
        self._collecting: list[float] = []
        self._cores: list[float] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._collecting.append(cpu_s())
            self._cores.append(core_s())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGAN] = cpu_s(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            began_cpu_s, began_s = item.stash[_BEGAN]
            report.user_properties.append((_COST, cpu_s() - began_cpu_s))
            report.user_properties.append((_REAL, time.monotonic() - began_s))
            report.user_properties.append((_HEAVY, item.get_closest_marker("heavy") is not None))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties)
        if isinstance(cost := found.get(_COST), float):
            self._tests[report.nodeid] = cost
            self._real[report.nodeid] = found[_REAL]
            if found[_HEAVY]:
                self._heavy.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._collecting:
            self._cores.append(core_s())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = [self._collecting, self._cores]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        collecting, cores = getattr(node, "workeroutput", {}).get("costs", ([], []))
        self._collecting += collecting
        self._cores += cores

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        if not self._tests:
            return
        collecting_s = sum(self._collecting)
        terminalreporter.write_sep("=", "dearest tests, in CPU seconds")
        for name, cost in sorted(self._tests.items(), key=lambda one: -one[1])[:_DEAREST]:
            terminalreporter.write_line(f"{cost:6.2f}  {name}")
        terminalreporter.write_line(
            f"{len(self._tests)} tests in {time.monotonic() - self._began:.0f} s and "
            f"{sum(self._tests.values()) + collecting_s:.0f} CPU-s, {collecting_s:.0f} of them for imports in "
            f"{len(self._collecting)} processes"
        )
        if (path := self._config.option.costs) is not None and exitstatus in _WHOLE:
            record = {
                "tests": self._tests, "real": self._real, "heavy": self._heavy, "began": self._began_at,
                "collecting": self._collecting, "cores": self._cores,
            }  # fmt: skip
            Path(path).write_text(json.dumps(record, indent=0))
