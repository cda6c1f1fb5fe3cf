"""How large the product is: lines of each room and files that one request crosses, against `tests/budget.toml`; and no
import circle among the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.imports import imports_of
from tests.test_budget import BUDGET

ROOT = Path(__file__).parent.parent
WAY_OUT = "make it smaller, or raise the number in tests/budget.toml and say there why"


def lines_of(folder: str) -> int:
    """Lines of Python of a folder and of those in it; of `fdasync` those of its root."""
    pattern = "*.py" if folder == "fdasync" else "**/*.py"
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).glob(pattern))


def rooms() -> set[str]:
    """The package's root and its folders, the distributions, the benchmarks."""
    # bytecode of rooms that went stays behind
    folders = [path for path in (ROOT / "fdasync").iterdir() if (path / "__init__.py").exists()]
    folders += [*ROOT.glob("plugins/*/src"), ROOT / "benchmarks", ROOT / "fdasync"]
    return {str(path.relative_to(ROOT)) for path in folders}


def test_every_room_has_a_limit_and_keeps_to_it() -> None:
    assert BUDGET.lines.keys() == rooms()
    sizes = {room: lines_of(room) for room in BUDGET.lines}
    assert {room: size for room, size in sizes.items() if size > BUDGET.lines[room]} == {}, WAY_OUT


def test_a_limit_that_is_far_above_comes_down() -> None:
    loose = {room: size for room, most in BUDGET.lines.items() if (size := lines_of(room)) < most * 0.97 - 20}
    assert loose == {}, "these rooms have become smaller: lower their numbers in tests/budget.toml"


@pytest.mark.ci
def test_a_request_crosses_no_more_files(tmp_path: Path) -> None:
    found = tmp_path / "trip.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "trip", "--json", str(found)], cwd=ROOT, check=True, capture_output=True
    )
    figures = json.loads(found.read_text())["figures"]
    crossed = {name: figures[name] for name in BUDGET.trip}
    assert {name: count for name, count in crossed.items() if count > BUDGET.trip[name]} == {}, WAY_OUT


@pytest.mark.parametrize("folder", ["benchmarks", "tests/nightly"])
def test_no_benchmark_imports_itself_by_way_of_others(folder: str) -> None:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / folder).rglob("*.py")}
    names = {".".join(name.parts): path for name, path in paths.items() if name.name != "__init__"}
    graph = {}
    for name, path in names.items():
        found = imports_of(path.read_text(), types=True, known=names)
        graph[name] = {one for one in names if one in found} - {name}
    TopologicalSorter(graph).prepare()
