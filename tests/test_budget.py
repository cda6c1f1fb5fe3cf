"""What `make test` cost, against `tests/budget.toml`: its own record of its last run here."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".costs.json"
WAY_OUT = "make it cheaper, mark what is dear `ci` or `nightly`, or change tests/budget.toml and say there why"


class Record(msgspec.Struct):
    """What `tests/support/costs.py` writes."""

    tests: dict[str, float]
    heavy: list[str]
    collecting: list[float]
    cores: list[float]


class Budget(msgspec.Struct, forbid_unknown_fields=True):
    """`tests/budget.toml`, which explains its keys."""

    slack: float
    core_s: float
    all_s: float
    imports_s: float
    test_s: float
    folders: dict[str, float]

    def folder_of(self, test: str) -> str:
        """The longest folder with a budget that the test is in; "": none."""
        return max((one for one in self.folders if test.startswith(f"{one}/")), key=len, default="")


BUDGET = msgspec.convert(tomllib.loads((ROOT / "tests/budget.toml").read_text()), Budget)


@pytest.fixture(scope="module")
def record() -> Record:
    """In CPU seconds of the budget's core, less what other programs may have added to them."""
    if not RECORD.exists():
        pytest.skip("`make test` has not run here")
    told = msgspec.json.decode(RECORD.read_bytes(), type=Record)
    slower = min(told.cores) / BUDGET.core_s * BUDGET.slack
    tests = {name: cost / slower for name, cost in told.tests.items()}
    return msgspec.structs.replace(told, tests=tests, collecting=[cost / slower for cost in told.collecting])


def test_folders_add_up_to_all() -> None:
    assert sum(BUDGET.folders.values()) + BUDGET.imports_s <= BUDGET.all_s


@pytest.mark.ci
def test_each_folder_keeps_to_its_budget(record: Record) -> None:
    spent: dict[str, float] = defaultdict(float)
    for name, cost in record.tests.items():
        spent[BUDGET.folder_of(name)] += cost
    assert "" not in spent, "a folder of tests has no budget in tests/budget.toml"
    over = [f"{one}: {spent[one]:.0f} of {most:g} CPU-s" for one, most in BUDGET.folders.items() if spent[one] > most]
    assert over == [], WAY_OUT


@pytest.mark.ci
def test_all_of_it_keeps_to_its_budget(record: Record) -> None:
    assert sum(record.tests.values()) + sum(record.collecting) <= BUDGET.all_s, WAY_OUT


@pytest.mark.ci
def test_imports_keep_to_their_budget(record: Record) -> None:
    assert sum(record.collecting) <= BUDGET.imports_s


@pytest.mark.ci
def test_a_test_over_its_limit_says_why(record: Record) -> None:
    dear = [f"{name}: {cost:.1f}" for name, cost in record.tests.items() if cost > BUDGET.test_s]
    assert [one for one in dear if one.rpartition(": ")[0] not in record.heavy] == [], WAY_OUT
