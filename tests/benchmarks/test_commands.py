"""Commands of benchmarks and nightly plays: pages name those there are, and a wrong name is answered by the list."""

from __future__ import annotations

import ast
import importlib
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


def refusal(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command says of options that it does not take; nothing is measured."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as told:
        importlib.import_module(module).main()
    assert told.value.code == 2
    return capsys.readouterr().err.rsplit("error: ", 1)[1]


@pytest.mark.ci
@pytest.mark.parametrize("module", [*COMMANDS.values(), *PLAYS.values()])
def test_a_command_is_told_at_once_where_figures_cannot_be_written(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(module, ["--json", str(tmp_path / "missing" / "out.json")], monkeypatch, capsys)
    assert f"make the folder '{tmp_path / 'missing'}'" in said
    assert "is a folder" in refusal(module, ["--json", str(tmp_path)], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("benchmarks.stores.stores", ["--pairs", "0"], "0 is less than 1"),
        ("benchmarks.fleet.link", ["--runs", "-1"], "-1 is less than 1"),
        ("benchmarks.fleet.pd_isolation", ["--seconds", "nan"], "nan is not above 0"),
        ("tests.nightly.chaos.chaos", ["--minutes", "0"], "0 is not above 0"),
        ("tests.nightly.http.attack", ["--pairs", "0"], "0 is less than 1"),
        ("tests.nightly.http.fuzz", ["--python", "/no/such"], "/no/such has no Schemathesis"),
        ("tests.nightly.same_bits", ["--families", "olmoe,nope"], "no nope; there are qwen3_moe"),
    ],
)
def test_a_wrong_value_is_named(
    module: str,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert words in refusal(module, arguments, monkeypatch, capsys)
