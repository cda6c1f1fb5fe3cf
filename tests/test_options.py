"""The reference of settings is that of the code, and its file of every key is taken by the commands that it is for."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fdasync.cli.main import cli
from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from fdasync.registry.mapping import struct_of
from tests.support.options import FILE, PAGE, SECTIONS, bound, file, page, plugins, typed

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ("serve", "up", "http")
#: what the file would be if each of its defaults were set
ALL_SET = re.sub(r"^#(\w+ = |\[)", r"\1", FILE.read_text(), flags=re.MULTILINE)


@pytest.mark.ci  # the settings of a plugin are in what it imports, such as torch
def test_the_page_and_the_file_are_those_of_the_code() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.support.options"
    assert FILE.read_text() == file(), "write it anew: python -m tests.support.options"


def test_types_and_bounds_are_told_as_a_reader_writes_them() -> None:
    hints = EngineConfig.__annotations__
    assert "max_running" in hints
    shown = PAGE.read_text()
    assert '| `max_context_tokens` | int or "auto" | `"auto"` | 2 to 2147483648 |' in shown
    assert "| `top_p` | float | `1.0` | above 0.0, up to 1.0 |" in shown
    assert "| `engine` | EngineConfig | required |" in shown
    assert (typed(tuple[int, ...] | None), bound(int)) == ("list of int or none", "")


@pytest.mark.parametrize("kind", [*SECTIONS["Engine"]], ids=lambda kind: kind.__name__)
def test_the_file_has_every_key_of_an_engine(kind: type[EngineConfig]) -> None:
    for key in kind.__struct_fields__:
        assert re.search(rf"^#?\[?{key}( = |\]$)|^# {key}: not set$", FILE.read_text(), re.MULTILINE), key


@pytest.mark.ci
def test_the_defaults_in_the_file_are_those_of_the_structs() -> None:
    values = {key: value for key, value in tomllib.loads(ALL_SET).items() if key not in COMMANDS}
    config = EngineConfig.from_mapping(values)
    assert config.speculation == Speculation()
    left = {"model": "", "store": "", "store_config": {}, "runner_config": {}, "speculation": None}
    assert replace(config, **left) == EngineConfig()
    found = plugins()
    runner = found["runners: transformers"]
    assert struct_of(runner, config.runner_config) == runner()
    store = found["stores: file"]
    assert struct_of(store, config.store_config) == store(path=config.store_config["path"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_the_file(name: str, tmp_path: Path) -> None:
    """With its defaults set or not. A key of its table that is no option is refused: the table is looked at."""
    path = tmp_path / "all.toml"
    for text, exit_code in ((FILE.read_text(), 0), (ALL_SET, 0), (f"{ALL_SET}\n[{name}.no]\nsuch = 1\n", 1)):
        path.write_text(text)
        ran = CliRunner().invoke(cli, [name, "--config", str(path), "--help"])
        assert ran.exit_code == exit_code, ran.output or ran.exception
    assert f"{name}.no is no option of the command" in str(ran.exception)
