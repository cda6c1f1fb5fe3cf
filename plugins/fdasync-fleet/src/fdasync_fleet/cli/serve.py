"""The `fdasync serve` and `fdasync up` commands: options and exit codes.

Parses; the work is in `service.py` and `up.py`, which are imported when a command runs. Called by `main.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fdasync.cli.common.numbers import NumberRange
from fdasync.cli.common.options import engine_config, engine_options

_MAX_INSTANCES = 64
_drain_s = click.option(
    "--drain-s",
    default=600.0,
    show_default=True,
    type=NumberRange(0, 1e9),
    help="Longest that the first signal waits for requests.",
)
_host = click.option(
    "--host",
    default="",
    metavar="HOST",
    help="What other machines dial in place of the host of --listen, behind address translation or where --listen is"
    " tcp://0.0.0.0:PORT: an address in numbers, or an interface.",
)
_encrypt_blocks = click.option(
    "--encrypt-blocks",
    is_flag=True,
    help="Blocks that go over tcp do so by TLS 1.3, both ways; needs --keys, and the package of fdasync-fleet[tls].",
)
_trusted_network = click.option(
    "--trusted-network",
    is_flag=True,
    help="Whoever reaches this machine's ports may read and write blocks on their way: have them come from other"
    " machines by Mooncake's engine (fdasync-mooncake), over RDMA or TCP, where both instances say so.",
)


@click.command()
@click.option(
    "--role",
    type=click.Choice(["mixed", "prefill", "decode"]),
    help="mixed serves requests whole; prefill ones compute prompts and hand over to decode ones.  [default: mixed]",
)
@click.option(
    "--listen",
    required=True,
    metavar="ADDRESS",
    help="ipc:///path, or tcp://127.0.0.1:PORT (0: any). With --keys tcp://HOST:PORT: an address that the other"
    " machines reach, or an interface's name.",
)
@_host
@click.option(
    "--data-port",
    default=0,
    type=click.IntRange(0, 65535),
    help="Port from which other machines read blocks, where address translation has to pass it on.  [default: any]",
)
@click.option(
    "--keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of `fdasync keys new`: every link that is not ipc is authenticated and encrypted.",
)
@_encrypt_blocks
@_trusted_network
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="ADDRESS",
    help="A decode instance to connect to at once; to others it connects when a router names them.",
)
@click.option("--name", default="", help="For people.  [default: the address]")
@click.option(
    "--transport",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="How blocks come from other instances: shm (mapped memory), tcp (a loopback port), a plugin's name, or auto:"
    " shm where that works, else tcp; both where --listen is a tcp address. device: from GPU to GPU of one machine"
    " where both instances say so, else as auto.",
)
@engine_options
@_drain_s
@click.option("--json-log", default="", metavar="PATH", help="Append events as JSON lines; - is stderr.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Prometheus on the loopback; 0: any free port.")
@click.option("--ready-fd", type=click.IntRange(0), help="Write one JSON line to this descriptor when ready.")
@click.option("--parent", type=click.IntRange(1), hidden=True, help="End when this process, our parent, ends.")
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
    from fdasync_fleet.cli.service import ServeOptions, run_serve

    config = engine_config(options, options.pop("role"))
    leave(run_serve(config, ServeOptions(**{**options, "peers": tuple(options["peers"])})))


@click.command()
@click.option("--prefill", default=0, type=click.IntRange(0, _MAX_INSTANCES), help="Prefill instances.")
@click.option("--decode", default=0, type=click.IntRange(0, _MAX_INSTANCES), help="Decode instances.")
@click.option("--mixed", default=0, type=click.IntRange(0, _MAX_INSTANCES), help="Mixed instances.")
@engine_options
@click.option(
    "--transport",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="How blocks go from one to another.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the sockets are made, and removed at the end; holds nothing else. Addresses are ipc://FOLDER/p0,"
    " .../d0 and so on. Made if missing. Default: a private temporary folder.",
)
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="tcp://HOST:PORT of the first instance, instead of sockets; the others listen at the ports behind it, or each"
    " at a free one with port 0. Beyond the loopback with --keys alone.",
)
@_host
@click.option(
    "--keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of `fdasync keys new`: links over tcp are authenticated and encrypted.",
)
@_encrypt_blocks
@_trusted_network
@_drain_s
@click.option(
    "--json-log",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Append the events of each instance to DIR/NAME.jsonl, as JSON lines.",
)
@click.option(
    "--restart",
    default="on-failure",
    show_default=True,
    type=click.Choice(["on-failure", "no"]),
    help="Whether an instance that fails or is killed is started again.",
)
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
    from fdasync_fleet.cli.local.restarts import RestartRules
    from fdasync_fleet.cli.up import UpOptions, run_up

    config = engine_config(options)
    rules = RestartRules() if options.pop("restart") == "on-failure" else RestartRules(limit=0)
    plan = UpOptions(**options, restart=rules)
    if not plan.prefill + plan.decode + plan.mixed:
        raise click.UsageError("no instances: say --prefill 1 --decode 1, or --mixed 1", ctx)
    if bool(plan.prefill) != bool(plan.decode) and not plan.mixed:
        missing = "--decode" if plan.prefill else "--prefill"
        raise click.UsageError(f"one half is missing: add {missing} 1, or run --mixed ones", ctx)
    sys.exit(run_up(config, plan))
