"""Commands of benchmarks and nightly plays: pages name those there are, and a wrong name is answered by the list."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS
from tests.nightly.__main__ import COMMANDS as PLAYS

ROOT = Path(__file__).parents[2]
PACKAGES = {"benchmarks": COMMANDS, "tests.nightly": PLAYS}


def test_pages_and_makefile_name_commands_that_are_there() -> None:
    pages = [ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/*.md")]
    named = {
        (package, name)
        for page in pages
        for package, name in re.findall(r"-m (benchmarks|tests\.nightly)\s+([a-z]\w+)", page.read_text())
    }
    assert len(named) > 20
    assert {(package, name) for package, name in named if name not in PACKAGES[package]} == set()


@pytest.mark.parametrize("module", [*COMMANDS.values(), *PLAYS.values()])
def test_a_command_has_a_main_and_says_what_it_is_for(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"] != []
    assert (ast.get_docstring(tree) or "").partition("\n\n")[0].endswith(".")


@pytest.mark.ci
@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 0), (["gpu_serve"], 2)])
def test_without_a_command_all_are_listed(arguments: list[str], status: int) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == status
    said = done.stderr if status else done.stdout
    assert all(re.search(rf"^  {name} +[A-Z]", said, re.MULTILINE) for name in COMMANDS)
    assert ("'gpu_serve' is no command" in said) == bool(status)
