"""The `fdasync serve` and `fdasync up` commands: exit codes, and what their options (`options.py`) must have together.

Parses; the work is in `service.py` and `up.py`, which are imported when a command runs. Called by `main.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from fdasync.cli.common.fields import GroupedCommand
from fdasync.cli.common.options import engine_config, engine_options
from fdasync_fleet.cli.local.options import SERVE, UP, missing_half


@click.command(cls=GroupedCommand)
@SERVE
@engine_options
def serve(**options: Any) -> None:
    """Run one instance until Ctrl-C or SIGTERM, for `fdasync.connect([ADDRESS, ...])`.

    It speaks the native protocol only; `fdasync http` serves HTTP in front of it. Without --keys, addresses are ipc://
    or loopback tcp:// only, and every process that can connect is trusted.

    When requests may come, a line "fdasync serve: ready at ADDRESS as NAME (ROLE): ..." goes to stdout, and with
    --ready-fd a JSON object with name, role, address, listens, pid, model, block_tokens, num_blocks, worker_pids, gpus
    and metrics_port.

    The first signal drains: no new work is taken, live requests end here or go to other instances. The second signal
    ends at once, as a terminal that closes does.

    Exit code 0: drained. 1: the instance failed while it ran, or requests were cut short. 2: it could not start.
    130: interrupted while it loaded.
    """
    from fdasync.ipc.child import leave
    from fdasync_fleet.cli.service import run_serve

    plan = SERVE.take(options)
    leave(run_serve(engine_config(options, plan.role), plan))


@click.command(cls=GroupedCommand)
@UP
@engine_options
@click.pass_context
def up(ctx: click.Context, /, **options: Any) -> None:
    """Start prefill, decode and mixed instances on this machine and show how they do, until Ctrl-C or SIGTERM.

    Each is a process of its own (`fdasync serve`), reachable for this user only, over ipc; or from other machines, with
    --listen and --keys. When all are ready, the call `fdasync.connect([...])` is printed, whose router is used like an
    engine.

    An instance that fails or is killed is started again: after 0.5 s, then after twice as long each time, five times at
    most unless it has taken requests for five minutes in between. Before it gets requests, it gets the weights of the
    others from the router that updated them. An instance that does not come up the first time, or ends before all are
    up, ends all.

    The first signal drains all, prefill instances first; the second ends all at once, as a terminal that closes does;
    the third kills. A reader of the output that ends (| head) ends nothing: later lines go to stderr.

    Exit code 0: all drained. 1: an instance was given up, or was not there at the end; or requests were cut short. 2:
    an instance could not start. 130: interrupted while instances loaded, or were connected to.
    """
    from fdasync_fleet.cli.up import run_up

    plan, config = UP.take(options), engine_config(options)
    if not plan.prefill + plan.decode + plan.mixed:
        raise click.UsageError("no instances: say --prefill 1 --decode 1, or --mixed 1", ctx)
    if missing := missing_half(plan.prefill, plan.decode, plan.mixed):
        raise click.UsageError(f"one half is missing: add {missing} 1, or run --mixed ones", ctx)
    sys.exit(run_up(config, plan))
