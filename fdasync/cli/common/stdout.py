"""Writes to stdout: JSON, and text that goes to stderr once stdout has no reader.

A reader that ends (`up | head`) and a terminal that closes must not end processes that serve requests. Waits for a slow
reader, as any program does. Called by `up.py` and by commands with `--json`.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

if TYPE_CHECKING:
    from typing import TextIO

_STDERR = 2


def print_json(value: Any) -> None:
    """Print structs or plain values as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


class StdoutWriter:
    """A file for a `Console`, which never raises OSError.

    Args:
        out: stdout.
        name: of the program, for lines on stderr.

    Attributes:
        encoding: of stdout.
        lost: stdout has no reader any more.
    """

    def __init__(self, out: TextIO, name: str) -> None:
        self.lost = False
        self.encoding = out.encoding
        self._out = out
        self._name = name

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                self._out.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._out.flush()
            except OSError as error:
                self._lose(error)

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    def _lose(self, error: OSError) -> None:
        self.lost = True
        with contextlib.suppress(OSError):
            # Python writes the rest of its buffer once more at its end
            null = os.open(os.devnull, os.O_WRONLY)  # blocking: once
            os.dup2(null, self._out.fileno())
            os.close(null)
        self.complain(f"{self._name}: stdout is gone ({error.strerror}); it goes on, and writes the rest here")

    def complain(self, text: str, *, markup: bool = False) -> None:
        """Write a line to stderr, if that is still there."""
        plain = Text.from_markup(text).plain if markup else text
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"{plain}\n".encode(errors="replace"))  # blocking: a short line, now and then
