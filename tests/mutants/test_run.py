"""Which tests a mutant is tried with, what comes of a run of them, and the table."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("coverage")

from coverage import CoverageData

from tests.mutants.map import Map, Reached
from tests.mutants.mutant import Mutant
from tests.mutants.run import Result, Ring, batches
from tests.mutants.table import table
from tests.mutants.trial import outcome_of

SOURCE = "SIZE = (\n    3,\n)\n\n\ndef put(\n    item,\n):\n    use(item)\n    return item\n"
PUT = "tests/cache/test_put.py::test_put[1-a (b)]"
LINK = "tests/pd/test_link.py::test_link"


@pytest.fixture
def map_(tmp_path):
    data = CoverageData(str(tmp_path / "map"))
    for context, lines in {
        "": [1, 6],
        f"{PUT} (call)": [9],
        f"{LINK} (setup)": [9],
        "tests/cache/test_none.py::test_none (call)": [],
    }.items():
        data.set_context(context)
        data.add_lines({"/somewhere/fdasync/cache/put.py": lines})
    data.write()
    return Map(tmp_path / "map")


def test_the_tests_that_run_a_line(map_):
    assert map_.test_files() == {"tests/cache/test_put.py", "tests/pd/test_link.py", "tests/cache/test_none.py"}
    reached = map_.reached("fdasync/cache/put.py", SOURCE, 9)
    assert reached == Reached({PUT, LINK}, set(), {"tests/pd/test_link.py"})
    # what no test is known to run, of a function that they do
    assert map_.reached("fdasync/cache/put.py", SOURCE, 10) == Reached(set(), {PUT, LINK}, set())
    # a line of a statement that runs when the module is imported
    assert map_.reached("fdasync/cache/put.py", SOURCE, 2) == Reached({PUT, LINK}, set(), set())
    assert map_.reached("fdasync/cache/other.py", SOURCE, 9) == Reached(set(), set(), set())


def test_cheap_tests_near_the_source_come_first():
    reached = Reached({PUT, LINK}, {"tests/cache/test_beside.py::test_it"}, {"tests/pd/test_link.py"})
    others = {"tests/pd/test_link.py::test_other": 0.1, "tests/cache/test_beside.py::test_it": 0.1}
    ring = {PUT: 2.0, LINK: 1.0, "tests/pd/test_up.py::test_up": 0.1, **others}
    assert batches("fdasync/cache/put.py", reached, ring) == [[PUT], [LINK], *[[one] for one in others]]
    assert batches("fdasync_fleet/put.py", reached, {PUT: 2.0}) == [[PUT]]
    many = Reached({f"tests/cache/test_put.py::test_{number}" for number in range(100)}, set(), set())
    costs_s = {test: float(test.rpartition("_")[2]) for test in many.direct}
    first, second = batches("fdasync/cache/put.py", many, costs_s)
    assert [costs_s[test] for test in first] == list(range(30))
    assert [costs_s[test] for test in second] == list(range(30, 100))


@pytest.mark.parametrize(
    ("told", "status", "hung", "found", "test"),
    [
        ([("began", "a"), ("ended", "a")], 0, False, "passed", ""),
        ([], 5, False, "passed", ""),
        ([("began", "a"), ("failed", "a"), ("ended", "a")], 1, False, "failed", "a"),
        ([("failed", "tests/test_a.py")], 2, False, "failed", "tests/test_a.py"),
        ([("began", "a"), ("ended", "a"), ("began", "b")], -9, True, "hung", "b"),
        ([("began", "a"), ("ended", "a"), ("began", "b")], -11, False, "crashed", "b"),
        # the process ended as if all were well
        ([("began", "a")], 0, False, "crashed", "a"),
        ([], 1, False, "crashed", ""),
    ],
)
def test_what_comes_of_a_run(tmp_path, told, status, hung, found, test):
    (tmp_path / "progress").write_text("".join(json.dumps(one) + "\n" for one in told))
    outcome = outcome_of(tmp_path / "progress", status, hung=hung)
    assert (outcome.found, outcome.test) == (found, test)
    assert outcome.ended == {one for what, one in told if what == "ended"}


def test_rings_add_up_in_the_table():
    mutants = [
        Mutant(
            number=number, area=area, operator="call", path="fdasync/a.py", line=number, scope="", above="", below="",
            before="one()", after="pass",
        )
        for number, area in enumerate(["cache", "cache", "router"], 1)
    ]  # fmt: skip
    first = Ring("not ci and not nightly", [Result(mutant=one, state="survived") for one in mutants[1:]])
    first.results[1].num_run, first.results[1].num_left = 7, 2
    first.results.append(Result(mutant=mutants[0], state="killed", test="a", how="failed"))
    second = Ring("ci and not nightly", [Result(mutant=mutants[1], state="killed", test="b", how="hung")])
    written = table([first, second])
    assert "| area | drawn | `not ci and not nightly` | `ci and not nightly` too |" in written
    assert "| cache | 2 | 1 | 2 |" in written
    assert "| router | 1 | 0 | 0 |" in written
    assert "| all | 3 | 1 | 2 |" in written
    assert "3. `fdasync/a.py:3` (module), call: survived (7 tests, 2 not tried)" in written
    assert "2. `" not in written
