"""`fdasync ray`: options and exit codes. Parses; `up.py` does the work, and is imported when the command runs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from fdasync.cli.common.numbers import NumberRange
from fdasync.cli.common.options import engine_config, engine_options
from fdasync.errors import ConfigError

_COUNT = click.IntRange(0, 512)


@click.group()
def ray() -> None:
    """Fleets on a Ray cluster."""


@ray.command()
@click.option("--prefill", default=0, type=_COUNT, help="Prefill instances.")
@click.option("--decode", default=0, type=_COUNT, help="Decode instances.")
@click.option("--mixed", default=0, type=_COUNT, help="Mixed instances.")
@click.option("--address", help="Of a Ray cluster that runs, or auto.  [default: one of this machine alone]")
@click.option("--name", default="fleet", show_default=True, help="Of the fleet: fdasync_ray.attach(NAME).")
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="tcp://INTERFACE:0, where nodes have several networks.  [default: the address by which Ray knows the node]",
)
@click.option(
    "--keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of `fdasync keys new`, here alone: Ray brings the keys to the nodes. Needed by routers outside of the"
    " cluster.  [default: keys of this fleet alone]",
)
@click.option("--encrypt-blocks", is_flag=True, help="As of `fdasync serve`.")
@click.option(
    "--cpus",
    default=1.0,
    show_default=True,
    type=NumberRange(0),
    help="Ray CPUs of an instance, and its threads where it computes on CPUs.",
)
@click.option(
    "--ray-gpus",
    "ray_gpus",
    type=NumberRange(0),
    help="Ray GPUs of an instance.  [default: --tp, on GPU clusters]",
)
@click.option("--transport", default="auto", show_default=True, metavar="NAME", help="As of `fdasync serve`.")
@click.option(
    "--room-s",
    default=60.0,
    show_default=True,
    type=NumberRange(0, 1e6),
    help="Longest wait for room in the cluster.",
)
@click.option(
    "--drain-s", default=600.0, show_default=True, type=NumberRange(0, 1e9), help="Longest wait for requests."
)
@engine_options
def up(**options: Any) -> None:
    """Start a fleet on a Ray cluster and keep it whole, until Ctrl-C or SIGTERM.

    Each instance is a `fdasync serve` under an actor of its own, spread over the nodes. An instance that ends, or whose
    node dies, is started again where there is room, and gets the fleet's weights before it gets requests. Folders
    (--model) must be there on every node. Routers find the fleet by its name, from any process of the cluster:
    `fdasync_ray.attach(NAME).router()`. All links are authenticated.

    The first signal drains, the second ends at once. Exit code 0: all drained. 1: requests were cut short. 2: it could
    not start. 130: interrupted while it loaded.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray", "is not installed", hint="pip install 'fdasync-ray[ray]'")
    from fdasync_ray.up import UpOptions, run_up

    own = {name: options.pop(name) for name in UpOptions.__struct_fields__}
    sys.exit(run_up(engine_config(options), UpOptions(**own)))
