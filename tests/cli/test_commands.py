"""Commands that plugins add to `fdasync` (`fdasync.commands`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from fdasync.cli.main import cli
from fdasync.errors import PluginError
from fdasync.registry.registry import Registry
from tests.support.plugins import install_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
import click

@click.command()
@click.option("--times", default=1)
def greet(times):
    '''Say hello.'''
    click.echo("hello " * times)

def plain():
    pass
"""
POINTS = {
    "greet": "fdasync_bad:greet", "plain": "fdasync_bad:plain", "absent": "fdasync_bad:nothing",
    "store": "fdasync_bad:greet",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, SOURCE, "fdasync.commands", POINTS)


def test_a_plugins_command_is_listed_and_runs() -> None:
    listed = CliRunner().invoke(cli, ["--help"])
    assert listed.exit_code == 0
    assert "Say hello." in listed.output
    ran = CliRunner().invoke(cli, ["greet", "--times", "2"])
    assert (ran.exit_code, ran.output.split()) == (0, ["hello", "hello"])


@pytest.mark.parametrize(("name", "told"), [("plain", "no click command"), ("absent", "importing .* failed")])
def test_a_broken_command_is_listed_as_such_and_says_why_when_it_is_run(name: str, told: str) -> None:
    listed = CliRunner().invoke(cli, ["--help"])
    assert [line for line in listed.output.splitlines() if line.split()[:2] == [name, "(broken:"]]
    ran = CliRunner().invoke(cli, [name, "--any", "thing"])
    assert isinstance(ran.exception, PluginError)
    with pytest.raises(PluginError, match=told):
        raise ran.exception


def helps(command: click.Command | None, name: str) -> Iterator[str]:
    """What a command, and each command inside it, says of its options."""
    assert command is not None
    if isinstance(command, click.Group):
        for inner in command.list_commands(ctx := click.Context(command)):
            yield from helps(command.get_command(ctx, inner), f"{name} {inner}")
    yield from (f"{name} {one.opts[0]}: {one.help or ''}" for one in command.params if isinstance(one, click.Option))


def test_options_are_told_in_words_of_the_command_line() -> None:
    python = re.compile(r"\b(None|True|False|raises|\w+Config|\w+Params|Engine|aclose)\b|`tensor_parallel`|\w\(")
    told = list(helps(cli, "fdasync"))
    assert len([one for one in told if "--max-running" in one]) > 2
    assert [one for one in told if python.search(one)] == []


def test_a_plugin_replaces_no_command_of_ours() -> None:
    assert "folder of a file store" in CliRunner().invoke(cli, ["store", "--help"]).output


def test_a_command_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "names", lambda _self, _group: [])
    ran = CliRunner().invoke(cli, ["serve", "--model", "DIR"])
    assert ran.exit_code == 2
    assert "No such command 'serve': it is of fdasync-fleet: in a checkout, pip install" in ran.output
    assert " ./plugins/fdasync-fleet" in ran.output
    assert "pip install" not in CliRunner().invoke(cli, ["no-such"]).output
