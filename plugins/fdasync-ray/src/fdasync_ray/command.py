"""`fdasync ray`: options and exit codes. Parses; `up.py` does the work, and is imported when the command runs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import click

from fdasync.cli.common.fields import Fields, GroupedCommand
from fdasync.cli.common.options import engine_config, engine_options
from fdasync.errors import ConfigError
from fdasync_ray.config import FleetConfig

_FLEET = Fields(
    FleetConfig,
    groups={"Fleet": ("prefill", "decode", "mixed", "name", "cpus", "gpus", "room_s", "drain_s"),
            "Links": ("listen", "keys", "transport")},
    names={"gpus": "--ray-gpus"},
    defaults={"gpus": "--tp, on GPU clusters"},
    leave=("engine", "resources", "serve_options", "place_s", "restart"),
)  # fmt: skip


@click.group()
def ray() -> None:
    """Fleets on a Ray cluster."""


@ray.command(cls=GroupedCommand)
@_FLEET
@click.option("--address", default="", help="Of a Ray cluster that runs, or auto. Default: one of this machine alone.")
@click.option("--encrypt-blocks", is_flag=True, help="As of `fdasync serve`.")
@engine_options
def up(address: str, encrypt_blocks: bool, **options: Any) -> None:
    """Start a fleet on a Ray cluster and keep it whole, until Ctrl-C or SIGTERM.

    Each instance is a `fdasync serve` under an actor of its own, spread over the nodes. An instance that ends, or whose
    node dies, is started again where there is room, and gets the fleet's weights before it gets requests. Folders
    (--model) must be there on every node. Routers find the fleet by its name, from any process of the cluster:
    `fdasync_ray.attach(NAME).router()`. All links are authenticated.

    The first signal drains, the second ends at once. Exit code 0: all drained. 1: requests were cut short. 2: it could
    not start. 130: interrupted while it loaded.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray", "is not installed", hint="pip install 'ray>=2.50'")
    from fdasync_ray.up import run_up

    chosen = options["ray_gpus"] is not None
    extra = ("--encrypt-blocks",) if encrypt_blocks else ()
    engine = engine_config(options)
    sys.exit(run_up(_FLEET.take(options, engine=engine, serve_options=extra), address, chosen=chosen))
