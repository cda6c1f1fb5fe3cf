"""`fdasync demo`: parses. Its work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fdasync.cli.common.fields import Fields
from fdasync_fleet.cli.demo.workload import DemoOptions

_DEMO = Fields(
    DemoOptions,
    names={"json_path": "--json"},
    types={
        "model": click.Path(exists=True, file_okay=False, path_type=Path),
        "json_path": click.Path(dir_okay=False, path_type=Path),
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

    sys.exit(run_demo(_DEMO.take(options), Console()))
