"""The `fdasync` command, also `python -m fdasync`: doctor, plugins, store, and the commands that plugins add.

Parses, prints and sets exit codes. A command imports its work when it runs: `doctor.py`, the registry. Called by the
command `fdasync` (`fdasync_command.py`).
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fdasync.cli.common.fields import GroupedCommand
from fdasync.cli.common.options import as_typed, engine_config, engine_options
from fdasync.cli.common.stdout import print_json
from fdasync.cli.store import store
from fdasync.errors import BadInput, EngineFailed, FdasyncError, PluginError
from fdasync.registry.registry import COMMANDS, Registry

EXIT_DIFFERS = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


# commands of distributions that may not be installed: the distribution, and what it requires of ours
_ELSEWHERE = {
    **dict.fromkeys(("demo", "keys", "serve", "top", "up"), ("fdasync-fleet",)),
    **dict.fromkeys(("http", "profile"), ("fdasync-http", "fdasync-fleet")),
    "ray": ("fdasync-ray", "fdasync-fleet"),
    "verify-trainer": ("fdasync-trainer",),
}


class _Commands(click.Group):
    """The commands of this package, and the commands that plugins add (`fdasync.commands`)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *Registry().names(COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name not in Registry().names(COMMANDS):
            if (needed := _ELSEWHERE.get(cmd_name)) is not None:
                folders = " ".join(f"./plugins/{distribution}" for distribution in needed)
                ctx.fail(f"No such command {cmd_name!r}: it is of {needed[0]}: in a checkout, pip install {folders}")
            return None
        try:
            command = Registry().load_function(COMMANDS, cmd_name)
        except PluginError as error:
            return _broken(cmd_name, error)
        return command if isinstance(command, click.Command) else _broken(cmd_name, _no_command(cmd_name))


def _no_command(name: str) -> PluginError:
    return PluginError(COMMANDS, name, "", "it is no click command")


def _broken(name: str, error: PluginError) -> click.Command:
    """Stands for a command that cannot be loaded, so that the others can still be listed and used."""

    def fail() -> None:
        raise error

    return click.Command(name, callback=fail, short_help="(broken: see `fdasync plugins`)", add_help_option=False,
                         context_settings={"ignore_unknown_options": True, "allow_extra_args": True})  # fmt: skip


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("fdasync"), "-V", "--version")
def cli() -> None:
    """fdasync: serve mixture-of-experts models, and get the exact expert routing of every token."""


@cli.command(cls=GroupedCommand)
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool, **options: Any) -> None:
    """Show what this machine has, and what is missing for what; with --model, whether that model would be served.

    Tell of a model which class runs it, its memory by context and concurrency, which parts are skipped, dequantised or
    refused, and what kernels would replace on a GPU. Only headers are read; it takes an engine's options.

    Exit code 0: all is well. 1: something that every engine needs is missing, or the model would not be served, such as
    by so many processes (--tp). 2: the checkpoint or the options cannot be used.
    """
    if options["model"] is not None or options["config_path"] is not None:
        from fdasync.cli.doctor_model import examine_model

        sys.exit(0 if examine_model(engine_config(options), as_json, Console()) else EXIT_DIFFERS)
    from fdasync.cli.doctor import examine

    findings = examine()
    if as_json:
        print_json(findings)
    else:
        table = Table(title="fdasync doctor")
        for column in ("", "what", "found", "needed for"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            mark = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}[finding.state]
            table.add_row(mark, finding.what, finding.found, finding.needed_for)
        Console().print(table)
    sys.exit(EXIT_DIFFERS if any(f.essential and f.state != "ok" for f in findings) else 0)


@cli.command()
@click.option("--no-load", is_flag=True, help="List only; do not import them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def plugins(no_load: bool, as_json: bool) -> None:
    """List plugins: found, loaded, or broken and why.

    Exit code 1 if one is broken.
    """
    from fdasync.cli.common.plugins import checked_plugins

    found = Registry().list() if no_load else checked_plugins()
    if as_json:
        print_json(found)
    else:
        table = Table(title="fdasync plugins")
        for column in ("group", "name", "state", "from"):
            table.add_column(column, overflow="fold")
        for info in found:
            state = {None: "found", "": "[green]loaded[/]"}.get(info.problem, "[red]broken[/]")
            group = info.group.removeprefix("fdasync.")
            table.add_row(group, info.name, state, f"{info.distribution} {info.version}")
        console = Console()
        console.print(table)
        for info in found:
            if info.problem:
                # not in a cell, where long words break
                console.print(f"[red]{info.name}:[/] {escape(info.problem)}", soft_wrap=True, highlight=False)
    sys.exit(EXIT_DIFFERS if any(info.problem for info in found) else 0)


cli.add_command(store)


def main() -> None:
    """Entry point: a wrong word and an FdasyncError become one line and exit code 2; Ctrl-C becomes 130."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        hint = f" (see `{ctx.command_path} --help`)" if ctx is not None else ""
        click.echo(f"fdasync: {error.format_message()}{hint}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # the reader of stdout has gone; Python must not try to write the rest at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
    except OSError as error:
        hint = "; raise the limit with `ulimit -n 1024`, or more" if error.errno == errno.EMFILE else ""
        click.echo(f"fdasync: {error}{hint}", err=True)
        sys.exit(EXIT_ERROR)
    except FdasyncError as error:
        kind = "bad input" if isinstance(error, BadInput) else type(error).__name__
        shown = error.cause if isinstance(error, EngineFailed) else error
        click.echo(f"fdasync: {kind}: {as_typed(shown, sys.argv[1:])}", err=True)
        sys.exit(EXIT_ERROR)
