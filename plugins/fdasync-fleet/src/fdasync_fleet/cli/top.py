"""`fdasync top`: shows what engines do, from an HTTP front or from the instances themselves.

Owns no engine and changes nothing. `top_sources.py` looks, `top_screen.py` makes the screen; both are imported when the
command runs. Called by `main.py`.
"""

from __future__ import annotations

import os
import select
import sys
import termios
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.live import Live

from fdasync.cli.common.fields import between
from fdasync.errors import FdasyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.telemetry.sight.summary import Summary
    from fdasync_fleet.cli.top_sources import Source

DEFAULT_URL = "http://127.0.0.1:30000"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# where stdout is no terminal, whose width nobody knows
_PLAIN_COLUMNS = 100
# how often keys and the terminal's size are looked at
_LOOK_S = 0.2
_STDIN = 0


@click.command()
@click.argument("sources", nargs=-1, metavar="[URL|ADDRESS...]")
@click.option("--once", is_flag=True, help="Show it once, as text, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line for each look.")
@click.option("--interval", "interval_s", default=1.0, show_default=True, type=between(0.2, 3600.0), help="In seconds.")
@click.option(
    "--window",
    "window_s",
    default=15.0,
    show_default=True,
    type=between(5.0, 600.0),
    help="Seconds that rates and latencies are of.",
)
@click.option("--keys", type=_FILE, help="Of instances: file of `fdasync keys new`.")
@click.option("--api-key-file", type=_FILE, help="Of a front: file with its key.")
@click.option(
    "--connect-s", default=10.0, show_default=True, type=between(0.1, 1e6), help="Longest wait for instances."
)
def top(
    sources: tuple[str, ...],
    once: bool,
    as_json: bool,
    interval_s: float,
    window_s: float,
    keys: Path | None,
    api_key_file: Path | None,
    connect_s: float,
) -> None:
    """Show what engines do: requests, tokens, latencies, cache hits, blocks, experts, and what is wrong.

    URL is an HTTP front (`fdasync http`), ADDRESS an instance's (`fdasync serve`, `fdasync up`). Without one: the front
    at http://127.0.0.1:30000. In a terminal the screen is drawn anew each second until q or Ctrl-C; elsewhere text
    follows text.

    Exit code 0: ended by --once, q or Ctrl-C, or by a reader of its output that went away. 2: nothing could be seen at
    the start.
    """
    from fdasync_fleet.cli.top_sources import source_of

    key = "" if api_key_file is None else api_key_file.read_text(errors="replace").strip()
    with source_of(sources or (DEFAULT_URL,), keys, key, window_s, connect_s) as source:
        try:
            _show(source, once=once, as_json=as_json, interval_s=interval_s)
        except KeyboardInterrupt:
            return
        except BrokenPipeError:
            # whoever read it has enough; Python must not try to write the rest at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(source: Source, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Look and show until it is enough. Raises what the first look raises; later ones are shown."""
    console = Console()
    summary, problem = source.look(), ""
    if as_json or once or not console.is_terminal:
        while True:
            click.echo(_line(summary, problem) if as_json else _text(summary, problem, console))
            if once:
                return
            source.wait(interval_s)
            summary, problem = _next(source, summary)
    from fdasync_fleet.cli.top_screen import Screen

    with _quiet_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Screen(summary, problem), refresh=True)
            if _wait(source, live, interval_s):
                return
            summary, problem = _next(source, summary)


def _wait(source: Source, live: Live, seconds: float) -> bool:
    """Let time pass, and draw the screen anew where the terminal has another size; True: the user pressed q."""
    while seconds > 0:
        size = live.console.size
        source.wait(min(seconds, _LOOK_S))
        seconds -= _LOOK_S
        if live.console.size != size:
            live.refresh()
        if _pressed_q():
            return True
    return False


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Keys are not shown, which would spoil the screen, and come at once; Ctrl-C stays what it is."""
    if not os.isatty(_STDIN):
        yield
        return
    before = termios.tcgetattr(_STDIN)
    quiet = list(before)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(_STDIN, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


def _pressed_q() -> bool:
    if not os.isatty(_STDIN) or not select.select([_STDIN], [], [], 0)[0]:
        return False
    return b"q" in os.read(_STDIN, 1024)


def _next(source: Source, before: Summary) -> tuple[Summary, str]:
    """The next look; where it fails, what was seen before, and why it failed."""
    try:
        return source.look(), ""
    except FdasyncError as error:
        return before, str(error)


def _line(summary: Summary, problem: str) -> str:
    if problem:
        return msgspec.json.encode({"problem": problem}).decode()
    return msgspec.json.encode(summary).decode()


def _text(summary: Summary, problem: str, console: Console) -> str:
    from fdasync_fleet.cli.top_screen import Screen

    plain = Console(width=console.width if console.is_terminal else _PLAIN_COLUMNS, color_system=None)
    with plain.capture() as captured:
        plain.print(Screen(summary, problem, whole=True))
    return captured.get()
