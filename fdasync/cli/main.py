"""The `fdasync` command, also `python -m fdasync`: serve, up, demo, doctor, plugins, store.

Parses, prints, sets exit codes; the work is in `run.py`, `doctor.py` and the registry.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fdasync.cli.common.options import STORE_HELP
from fdasync.cli.serve import serve, up
from fdasync.cli.store import store
from fdasync.errors import BadInput, EngineFailed, FdasyncError

EXIT_DIFFERS = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("fdasync"), "-V", "--version")
def cli() -> None:
    """fdasync: serve mixture-of-experts models, and get the exact expert routing of every token."""


@cli.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face MoE checkpoint folder. Without it a small random Qwen3-MoE is made, once, in a cache folder.",
)
@click.option("--requests", default=64, show_default=True, type=click.IntRange(1, 100_000), help="Requests to serve.")
@click.option(
    "--concurrency", default=32, show_default=True, type=click.IntRange(1, 4096), help="Requests in flight at a time."
)
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1, 100_000), help="Longest output.")
@click.option("--depth", default=2, show_default=True, type=click.IntRange(1, 2), help="Steps in flight; 2 overlaps.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the prompts and of sampling.")
@click.option(
    "--store",
    default="",
    metavar="STORE",
    help=f"Serve everything twice: first fill the store, then start a fresh engine on it and show what came back."
    f" {STORE_HELP} A pool of mooncake needs a lender of memory that outlives the engine.",
)
@click.option(
    "--pd",
    default="",
    metavar="PxD",
    help="Serve with P prefill and D decode instances, each a process of its own, e.g. 1x1; with --store file:DIR each"
    " has its own folder in DIR. 0: one engine in this process, the default.",
)
@click.option("--inline", is_flag=True, help="Run the model on the engine's own loop instead of in a worker process.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def demo(**options: Any) -> None:
    """Serve requests from a real checkpoint, then check every token and routing row.

    Serves requests of mixed lengths - half of them with shared prefixes, some as groups of samples of one
    prompt - with the engine in this process and the model in a worker, or with prefill and decode instances (--pd),
    then runs the library's own plain
    forward pass over the same tokens and compares: greedy tokens, and the experts of every position and
    layer. Exit code 0: all equal. 1: something differs. 2: it could not run.
    """
    from fdasync.cli.demo.run import run_demo
    from fdasync.cli.demo.workload import DemoOptions

    sys.exit(run_demo(DemoOptions(**options), Console()))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> None:
    """Tell what is here, and what is missing for what.

    Exit code 1 if something that every engine needs is missing.
    """
    from fdasync.cli.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
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
    import msgspec

    from fdasync.registry.registry import Registry

    found = Registry().list(load=not no_load)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        table = Table(title="fdasync plugins")
        for column in ("group", "name", "state", "from", "target"):
            table.add_column(column, overflow="fold")
        for info in found:
            state = {None: "found", "": "[green]loaded[/]"}.get(info.problem, f"[red]broken:[/] {info.problem}")
            table.add_row(info.group, info.name, state, f"{info.distribution} {info.version}", info.target)
        Console().print(table)
    sys.exit(EXIT_DIFFERS if any(info.problem for info in found) else 0)


cli.add_command(serve)
cli.add_command(up)
cli.add_command(store)


def main() -> None:
    """Entry point: errors of ours become one line and exit code 2; Ctrl-C becomes 130."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # whoever read has enough; nothing more can be said, and Python must not try at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
    except OSError as error:
        hint = "; raise the limit with `ulimit -n 1024`, or more" if error.errno == errno.EMFILE else ""
        click.echo(f"fdasync: {error}{hint}", err=True)
        sys.exit(EXIT_ERROR)
    except FdasyncError as error:
        kind = "bad input" if isinstance(error, BadInput) else type(error).__name__
        shown = error.cause if isinstance(error, EngineFailed) else error
        click.echo(f"fdasync: {kind}: {shown}", err=True)
        sys.exit(EXIT_ERROR)
