"""The `fdasync keys` commands: make the keys of a fleet, and replace them while it runs.

Parses and prints; the work is in `fdasync_fleet/link/keys.py`, imported when a command runs. Called by `main.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fdasync.cli.common.stdout import print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.keys import FleetKeys

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group()
def keys() -> None:
    """Keys of a fleet: they let its machines connect to each other, and nobody else.

    Copy the file to all machines by a safe way, and give it to `fdasync serve` and `fdasync http` as --keys, to
    `fdasync.connect` as keys=. Its readers can be instances and routers. To replace the keys while the fleet runs: add
    a key, copy the file, restart the processes one by one; rotate, copy, restart; drop, copy, restart.
    """


@keys.command()
@_FILE
def new(file: Path) -> None:
    """Make a file of keys that only you can read. A file that is there is never replaced."""
    from fdasync_fleet.link.keys import new_keys, save_keys

    save_keys(file, new_keys(), replace=False)
    click.echo(f"{file}: copy it to all machines of the fleet, and say --keys {file} there")


@keys.command()
@_FILE
def add(file: Path) -> None:
    """Add a second key, which holds beside the one in use."""
    from fdasync_fleet.link.keys import add_key

    _change(file, add_key)


@keys.command()
@_FILE
def rotate(file: Path) -> None:
    """Take the second key into use; the first one holds beside it."""
    from fdasync_fleet.link.keys import rotate_keys

    _change(file, rotate_keys)


@keys.command()
@_FILE
def drop(file: Path) -> None:
    """Drop the key that is not in use."""
    from fdasync_fleet.link.keys import drop_key

    _change(file, drop_key)


def _change(file: Path, change: Callable[[FleetKeys], FleetKeys]) -> None:
    from fdasync_fleet.link.keys import load_keys, save_keys

    save_keys(file, change(load_keys(file)), replace=True)
    click.echo(f"{file}: copy it to all machines, and restart their processes one by one")


@keys.command()
@_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def show(file: Path, as_json: bool) -> None:
    """Print the public keys, never a secret one."""
    from fdasync_fleet.link.keys import load_keys

    loaded = load_keys(file)
    pairs = [{"server": key.server.public, "client": key.client.public} for key in loaded.keys]
    if as_json:
        print_json({"keys": pairs, "allow": loaded.allow})
        return
    for pair, state in zip(pairs, ("in use", "holds beside it"), strict=False):
        click.echo(f"server {pair['server']}  client {pair['client']}  {state}")
    for public in loaded.allow:
        click.echo(f"allowed client {public}")
