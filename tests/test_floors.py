"""The oldest versions that are allowed are named once, are all tested, and are no newer than what tests run with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.floors import ROOT, floors, pyprojects

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = """
[build-system]
requires = ["setuptools>=77"]
[project]
name = "Mine"
dependencies = ["One_Thing[with,extras]>=1.2,<2", 'two >= 0.3; python_version < "3.13"']
[project.optional-dependencies]
all = ["mine[more]", "three==4.5"]
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(text)
    return folder / "pyproject.toml"


def test_floors_are_read_from_every_list(tmp_path: Path) -> None:
    found = floors([write(tmp_path / "a", PLAIN)])
    assert found == {"one-thing": "1.2", "setuptools": "77", "three": "4.5", "two": "0.3"}


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("three==4.5", "three", "'three' names no oldest version"),
        ("three==4.5", "three<5", "'three<5' names no oldest version"),
        ("two >= 0.3", "one.thing>=1.1", "one-thing has floor 1.1 here and 1.2 in another"),
    ],
)
def test_a_requirement_without_one_floor_is_refused(was: str, becomes: str, told: str, tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", PLAIN), write(tmp_path / "b", PLAIN.replace(was, becomes))]
    with pytest.raises(ValueError, match=told):
        floors(paths)


def test_what_tests_run_with_is_no_older_than_the_floors() -> None:
    found = floors(pyprojects())
    # constraints name packages as their authors do
    lines = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower().replace("_", "-"): version for name, _, version in lines}
    assert {"torch", "transformers", "numpy"} <= found.keys() & pinned.keys()
    older = {name: found[name] for name in found.keys() & pinned.keys() if numbers(pinned[name]) < numbers(found[name])}
    assert not older


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
