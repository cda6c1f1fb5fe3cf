"""`fdasync profile URL`: has a server record what its model's processes do, and says where the files are."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from fdasync.cli.common.fields import between
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
    type=between(0.01, MOST_PROFILE_S),
    help="How long it lasts. Requests go on meanwhile, more slowly, and stop while the files are written.",
)
@click.option("--key-file", type=_FILE, help="File with the server's admin key.")
def profile(url: str, seconds: float, key_file: Path | None) -> None:
    """Record what the processes of a server's model do.

    URL is that of `fdasync http`, as http://127.0.0.1:30000. Each engine writes a folder on its own machine, with a
    file for each rank; Perfetto (ui.perfetto.dev) and chrome://tracing open them.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise click.BadParameter(f"{url!r} is no http address, such as http://127.0.0.1:30000", param_hint="URL")
    base = url.rstrip("/")
    headers = {} if key_file is None else {"authorization": f"Bearer {_key_of(key_file)}"}
    begun = _post(f"{base}/start_profile", {"seconds": seconds}, headers, _MORE_S)
    click.echo(begun.message, err=True)
    written = _post(f"{base}/stop_profile", {}, headers, seconds + _MORE_S)
    for name, folder in written.folders.items():
        click.echo(f"{name}: {folder}")


def _key_of(path: Path) -> str:
    """The key in a file, which is one line of ASCII."""
    try:
        (key,) = path.read_text("ascii").split()
    except (OSError, ValueError):
        raise click.BadParameter(f"{str(path)!r} has no key: one line of ASCII", param_hint="--key-file") from None
    return key


class _Told(msgspec.Struct):
    """What the server answers."""

    message: str
    folders: dict[str, str] = {}


def _post(url: str, body: dict[str, Any], headers: dict[str, str], within_s: float) -> _Told:
    """What a path answers. Exits with the server's words where it refuses, and with what is wrong otherwise."""
    try:
        headers = {**headers, "content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=within_s) as answer:
            data = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise click.ClickException(f"{url}: {error.code}: {_words(error.read(4000))}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(f"{url} does not answer: {reason}; does `fdasync http` run there?") from None
    try:
        return msgspec.json.decode(data, type=_Told)
    except msgspec.MsgspecError:
        raise click.ClickException(f"{url} answers in other words than `fdasync http` does") from None


def _words(body: bytes) -> str:
    """The message of a refusal; the whole of it where it has none."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body.decode(errors="replace")
