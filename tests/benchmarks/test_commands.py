"""Commands of benchmarks and nightly plays: pages name those there are, and a wrong name is answered by the list."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import COMMANDS
from benchmarks.lib import arguments
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
@pytest.mark.parametrize("arguments", [["--help"], [], ["gpu_serve"]])
def test_without_a_command_all_are_listed(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if arguments == ["gpu_serve"]:
        assert done.returncode == 2
        assert done.stderr.startswith("python -m benchmarks: error: 'gpu_serve' is no command; there are engine_step, ")
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0
        assert all(re.search(rf"^  {name} +[A-Z]", done.stdout, re.MULTILINE) for name in COMMANDS)


class Parsed(Exception):
    """A command has read its options."""


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a command."""

    def parse(self: argparse.ArgumentParser, *_arguments: Any) -> None:
        raise Parsed(self)

    main = importlib.import_module(module).main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        with pytest.raises(Parsed) as parsed:
            main()
    parser: argparse.ArgumentParser = parsed.value.args[0]
    return parser


def refusal(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The line that a command ends with, which takes none of these options; nothing is measured."""

    def measured(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError(f"{arguments} are taken")

    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.setattr("benchmarks.lib.report.calibrate_us", measured)
    with pytest.raises(SystemExit) as told:
        importlib.import_module(module).main()
    assert told.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line.partition("error: ")[2])


@pytest.mark.ci
@pytest.mark.parametrize("module", [*COMMANDS.values(), *PLAYS.values()])
def test_every_option_of_every_command_refuses_what_it_cannot_be(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for option in parser_of(module, monkeypatch)._actions:
        name = option.option_strings[-1]
        # kinds of faults are known when there is a fleet; and a seed is any number
        if option.nargs == 0 or name == "--seed" or (module, name) == ("tests.nightly.chaos.chaos", "--only"):
            continue
        wrong = ["no such"]
        if option.type in (arguments.at_least_one, arguments.above_zero):
            wrong += ["0", "-1", "1e400", "nan", ""]
        if option.type is arguments.writable:
            wrong = [f"{tmp_path}", "/proc/new.json", f"{tmp_path}/missing/out.json", f"{tmp_path}/file/out.json"]
        if option.type is arguments.folder:
            wrong += [str(tmp_path / "missing"), str(tmp_path / "file")]
        for value in wrong:
            said = refusal(module, [name, *[value] * (option.nargs or 1)], monkeypatch, capsys)
            # the option, the value and, behind it, what there is or what to do
            assert re.match(rf"{name}\b.*{re.escape(value)}.*\w", said), said
    assert "unrecognized arguments: --nothing" in refusal(module, ["--nothing"], monkeypatch, capsys)


def needs_gpus(module: str, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """The options with which a command needs a GPU, or None."""
    names = {name for one in parser_of(module, monkeypatch)._actions for name in one.option_strings}
    return ["--device", "cuda"] if "--device" in names else [] if "--tiny" in names else None


@pytest.mark.ci
@pytest.mark.parametrize("module", [*COMMANDS.values(), *PLAYS.values()])
def test_a_command_for_gpus_says_so_where_there_are_none(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = needs_gpus(module, monkeypatch)
    if options is None:
        assert ".gpu." not in module
        return
    for seen, count in ((0, r"(a|\d) CUDA GPUs?"), (1, "2 CUDA GPUs")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        said = refusal(module, options, monkeypatch, capsys)
        assert re.match(rf"this needs {count}, torch sees {seen}; .* give --(tiny|device cpu) ", said), said
        if "this needs a CUDA GPU" in said:
            break


@pytest.mark.parametrize(
    ("module", "given", "words"),
    [
        ("benchmarks.stores.stores", ["--pairs", "0"], "--pairs: 0 is less than 1; give a number between"),
        ("benchmarks.stores.stores", ["--blocks", "999999999999"], "--blocks 999999999999: 1572863999998427136 bytes"),
        ("benchmarks.http.http", ["--streams", "999999"], "--streams: 999999 is more than 4096; give a number between"),
        ("benchmarks.engine.sleep", ["--ranks", "3"], "--ranks: invalid choice: 3 (choose from 1, 2, 4, 8)"),
        ("benchmarks.fleet.pd_isolation", ["--seconds", "nan"], "--seconds: nan is not above 0"),
        ("tests.nightly.http.fuzz", ["--python", "/no/such"], "/no/such has no Schemathesis"),
        ("tests.nightly.same_bits", ["--families", "olmoe,nope"], "no nope; there are qwen3_moe"),
    ],
)
def test_a_wrong_value_is_named(
    module: str, given: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(module, given, monkeypatch, capsys)
