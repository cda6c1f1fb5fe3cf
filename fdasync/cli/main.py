"""The `fdasync` command, also `python -m fdasync`: serve, up, top, demo, verify-trainer, doctor, plugins, store, keys.

Parses, prints and sets exit codes. A command imports its work when it runs: `demo/run.py`, `doctor.py`, the registry.
Called by the command `fdasync` (`fdasync_command.py`).
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from fdasync.cli.common.options import POLICY_HELP, STORE_HELP, as_typed, engine_config, engine_options
from fdasync.cli.common.stdout import print_json
from fdasync.cli.keys import keys
from fdasync.cli.serve import serve, up
from fdasync.cli.store import store
from fdasync.cli.top import top
from fdasync.errors import BadInput, EngineFailed, FdasyncError, PluginError
from fdasync.registry.registry import COMMANDS, Registry
from fdasync.request import Numerics
from fdasync.runner.shares import MOST_RANKS

EXIT_DIFFERS = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class _Commands(click.Group):
    """The commands of this package, and those that plugins add (`fdasync.commands`)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *Registry().names(COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in Registry().names(COMMANDS):
            return own
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
    from fdasync.cli.demo.run import run_demo
    from fdasync.cli.demo.workload import DemoOptions

    sys.exit(run_demo(DemoOptions(**options), Console()))


@cli.command(name="verify-trainer")
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Hugging Face checkpoint folder."
)
@click.option(
    "--numerics", default="fixed", show_default=True, type=click.Choice(["fixed", "default"]), help="Of both sides."
)
@click.option(
    "--sum-slices", default=1, show_default=True, type=click.Choice([1, 2, 4]), help="Of fixed numerics, of both sides."
)
@click.option(
    "--tp", "tensor_parallel", default=1, show_default=True, type=click.IntRange(1, MOST_RANKS), help="Of the rollout."
)
@click.option(
    "--tokens", default=2000, show_default=True, type=click.IntRange(1, 10_000_000), help="Sampled tokens, at least."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of prompts, sampling and weights.")
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Sequences in a trainer's pass.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Of weights and KV, of both sides; float64 has no fixed numerics.",
)
@click.option("--device", help="Of both sides: cpu, cuda:1, ... Default: a GPU if there is one.")
@click.option("--num-threads", type=click.IntRange(1), help="CPU threads of each model process.")
@click.option("--pd/--no-pd", default=True, show_default=True, help="Serve by a prefill and a decode instance, too.")
@click.option("--update/--no-update", default=True, show_default=True, help="Update the weights in the middle.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rollout's log-probs here, for another trainer; goes without an update.",
)
@click.option(
    "--rollout",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A rollout's file (--write), to be compared with --logprobs; serves nothing.",
)
@click.option(
    "--logprobs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another trainer's file of log-probs for --rollout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def verify_trainer(**options: Any) -> None:
    """Compare a rollout's log-probs with a trainer's, bit by bit.

    Serves prompts with too few blocks (preemption), shared prefixes, chunks of odd sizes, two steps in flight, a weight
    update in the middle, and by a prefill and a decode instance. Then the library's model computes the log-probs of
    all sampled tokens as a trainer does, in padded batches. Where bits differ, the first request and position are
    named, and the first layer and module whose output differs. For other trainers: --write FILE, then --rollout FILE
    --logprobs THEIRS (`pydoc fdasync_transformers.verification.logprob_file` has the layout).

    Exit code 0: all bits are equal. 1: something differs. 2: it could not run.
    """
    from fdasync.cli.trainer.run import run_verify
    from fdasync.cli.trainer.workload import TrainerOptions

    # with --json, stdout has nothing else
    sys.exit(run_verify(TrainerOptions(**options), Console(stderr=options["as_json"])))


@cli.command()
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool, **options: Any) -> None:
    """Show what this machine has, and what is missing for what; with --model, whether that model would be served.

    Of a model: by which class, how much memory it takes at which context and concurrency, and which parts are skipped,
    dequantised or refused. Only headers are read; the options are those of an engine.

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
cli.add_command(keys)
cli.add_command(top)


def main() -> None:
    """Entry point: an FdasyncError becomes one line and exit code 2; Ctrl-C becomes 130."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
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
