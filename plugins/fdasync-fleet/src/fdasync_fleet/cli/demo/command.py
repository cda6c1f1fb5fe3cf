"""`fdasync demo`: parses. Its work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fdasync.cli.common.fields import Fields
from fdasync_fleet.cli.demo.workload import DemoOptions

_PICTURE_COLUMNS = 96
_DEMO = Fields(
    DemoOptions,
    names={"json_path": "--json", "svg_path": "--svg"},
    types={
        "model": click.Path(exists=True, file_okay=False, path_type=Path),
        "json_path": click.Path(dir_okay=False, path_type=Path),
        "svg_path": click.Path(dir_okay=False, path_type=Path),
    },
)


@click.command()
@_DEMO
def demo(**options: Any) -> None:
    """Let a real checkpoint answer chats and requests, then check every token and routing row.

    Three chats show their answers while they grow, and a map shows which experts computed one of them. Then requests of
    mixed lengths are served, half of them with shared prefixes, some as groups of samples of one prompt. The engine
    runs in this process and the model in a worker, or prefill and decode instances serve (--pd). At last the library's
    own plain forward pass runs over the same tokens, and greedy tokens and the experts of every position and layer are
    compared. Exit code 0: all equal. 1: something differs. 2: the demo could not run.
    """
    from fdasync_fleet.cli.demo.run import run_demo

    asked = _DEMO.take(options)
    if asked.svg_path is None:
        sys.exit(run_demo(asked, Console()))
    # frames of a live display would all be recorded; without a terminal it prints its last one
    console = Console(record=True, force_terminal=False, width=_PICTURE_COLUMNS)
    code = run_demo(asked, console)
    console.save_svg(str(asked.svg_path), title="fdasync demo")
    sys.exit(code)
