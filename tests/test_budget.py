"""What `make test` cost, against `tests/budget.toml`: its own record of its last run here."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest

ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".costs.json"
_PROCESSES = 3
WAY_OUT = "make it cheaper, mark what is dear `ci` or `nightly`, or change tests/budget.toml and say there why"


class Record(msgspec.Struct):
    """What `tests/support/costs.py` writes."""

    tests: dict[str, float]
    real: dict[str, float]
    heavy: list[str]
    began: float
    collecting: list[float]
    cores: list[float]

    @property
    def all_s(self) -> float:
        """As if three processes had run the tests."""
        return sum(self.tests.values()) + _PROCESSES * fmean(self.collecting)


class Budget(msgspec.Struct, forbid_unknown_fields=True):
    """`tests/budget.toml`, which explains its keys."""

    slack: float
    all_slack: float
    core_s: float
    core_slack: float
    all_s: float
    imports_s: float
    test_s: float
    real_s: float
    first_s: float
    folders: dict[str, float]
    lines: dict[str, int]
    trip: dict[str, int]

    def folder_of(self, test: str) -> str:
        """The longest folder with a budget that the test is in; "": none."""
        return max((one for one in self.folders if test.startswith(f"{one}/")), key=len, default="")


BUDGET = msgspec.convert(tomllib.loads((ROOT / "tests/budget.toml").read_text()), Budget)


@pytest.fixture(scope="module")
def record() -> Record:
    if not RECORD.exists():
        pytest.skip("`make test` has not run here")
    told = msgspec.json.decode(RECORD.read_bytes(), type=Record)
    folders = ("fdasync", "plugins", "tests", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    if max(path.stat().st_mtime for path in (*sources, ROOT / "conftest.py", ROOT / "pyproject.toml")) > told.began:
        pytest.skip("something has changed since `make test` began")
    return told


@pytest.fixture(scope="module")
def core(record: Record) -> float:
    """How many times as long as the budget's core this one took. A core that is busy with something else tells
    nothing: what waits for memory or for other processes is slowed more than what computes."""
    took = median(record.cores) / BUDGET.core_s
    if took > BUDGET.core_slack:
        pytest.skip(f"this core took {took:.2f} times as long as the budget's: it is slow or busy")
    return took


@pytest.fixture(scope="module")
def slower(record: Record, core: float) -> float:
    """How many times as long as budgeted a part may have taken.

    A machine that is slow or busy slows all parts alike, and a change seldom does: what all of it took tells of one.
    """
    return max(core, record.all_s / BUDGET.all_s) * BUDGET.slack


def test_folders_add_up_to_all() -> None:
    assert sum(BUDGET.folders.values()) + _PROCESSES * BUDGET.imports_s <= BUDGET.all_s


@pytest.mark.ci
def test_each_folder_keeps_to_its_budget(record: Record, slower: float) -> None:
    spent: dict[str, float] = defaultdict(float)
    for name, cost in record.tests.items():
        spent[BUDGET.folder_of(name)] += cost
    assert "" not in spent, "a folder of tests has no budget in tests/budget.toml"
    most = {folder: budget * slower for folder, budget in BUDGET.folders.items()}
    over = [f"{one}: {spent[one]:.1f} of {most[one]:.1f} CPU-s" for one in most if spent[one] > most[one]]
    assert over == [], WAY_OUT


@pytest.mark.ci
def test_all_of_it_keeps_to_its_budget(record: Record, core: float) -> None:
    assert record.all_s <= BUDGET.all_s * core * BUDGET.all_slack, WAY_OUT


@pytest.mark.ci
def test_imports_keep_to_their_budget(record: Record, slower: float) -> None:
    assert fmean(record.collecting) <= BUDGET.imports_s * slower, WAY_OUT


@pytest.mark.ci
def test_a_test_over_its_limit_says_why(record: Record, slower: float) -> None:
    most = (BUDGET.test_s + BUDGET.first_s) * slower
    dear = {name: cost for name, cost in record.tests.items() if cost > most and name not in record.heavy}
    assert dear == {}, WAY_OUT


@pytest.mark.ci
def test_no_test_waits_in_real_time(record: Record, core: float) -> None:
    # on busy cores all tests take longer, those that compute and those that wait for processes
    stretch = max(1.0, core) * max(1.0, sum(record.real.values()) / sum(record.tests.values()))
    slow = {name: real for name, real in record.real.items() if real > BUDGET.real_s * stretch}
    assert slow == {}, "let it wait in virtual time, or mark it `ci` or `nightly`"
