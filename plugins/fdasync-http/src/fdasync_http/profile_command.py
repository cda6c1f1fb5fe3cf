"""`fdasync profile URL`: has a server record what its model's processes do, and says where the files are."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from fdasync.cli.common.numbers import NumberRange
from fdasync.request import MOST_PROFILE_S

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# beyond the profile: its files are written, and asked for
_MORE_S = 180.0


@click.command()
@click.argument("url")
@click.option(
    "--seconds",
    default=5.0,
    show_default=True,
    type=NumberRange(0.01, MOST_PROFILE_S),
    help="How long it lasts. Requests go on meanwhile, more slowly.",
)
@click.option("--key-file", type=_FILE, help="File with the server's admin key.")
def profile(url: str, seconds: float, key_file: Path | None) -> None:
    """Record what the processes of a server's model do.

    URL is that of `fdasync http`, as http://127.0.0.1:30000. Each engine writes a folder on its own machine, with a
    file for each GPU; Perfetto (ui.perfetto.dev) and chrome://tracing open them.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no http address", param_hint="URL")
    key = "" if key_file is None else key_file.read_text().strip()
    begun = _post(f"{url.rstrip('/')}/start_profile", {"seconds": seconds}, key, _MORE_S)
    click.echo(begun["message"], err=True)
    written = _post(f"{url.rstrip('/')}/stop_profile", {}, key, seconds + _MORE_S)
    for name, folder in written["folders"].items():
        click.echo(f"{name}: {folder}")


def _post(url: str, body: dict[str, Any], key: str, within_s: float) -> dict[str, Any]:
    """The JSON that a path answers. Exits with the server's words where it refuses."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=within_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            raise click.ClickException(f"{url}: {error.code}: {error.read(2000).decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{url} cannot be asked: {error}") from None
