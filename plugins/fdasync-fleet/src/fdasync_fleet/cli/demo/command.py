"""`fdasync demo`: parses. Its work is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from fdasync.cli.common.options import POLICY_HELP, STORE_HELP
from fdasync.request import Numerics


@click.command()
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
@click.option(
    "--numerics",
    default="default",
    show_default=True,
    type=click.Choice(get_args(Numerics)),
    help="As of `fdasync serve`.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the prompts and of sampling.")
@click.option(
    "--store",
    metavar="STORE",
    help=f"Serve everything twice: first fill the store, then start a fresh engine on it and show what came back."
    f" {STORE_HELP} A pool of mooncake needs a process that gives it memory and outlives the engine.",
)
@click.option("--policy", metavar="POLICY", help=POLICY_HELP)
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

    Serves requests of mixed lengths, half of them with shared prefixes, some as groups of samples of one prompt. The
    engine runs in this process and the model in a worker, or prefill and decode instances serve (--pd). Then the
    library's own plain forward pass runs over the same tokens, and greedy tokens and the experts of every position and
    layer are compared. Exit code 0: all equal. 1: something differs. 2: the demo could not run.
    """
    from fdasync_fleet.cli.demo.run import run_demo
    from fdasync_fleet.cli.demo.workload import DemoOptions

    sys.exit(run_demo(DemoOptions(**options), Console()))
