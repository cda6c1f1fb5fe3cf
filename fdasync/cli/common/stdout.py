"""Text to stdout for as long as somebody takes it. Used by `up.py`, whose instances outlive whoever reads of them.

A reader that ends (`up | head`) and a terminal that closes are no reason to end what serves requests: that is told once
on stderr, where what is said from then on goes as well. Waits for a reader that is slow, as any program does.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from typing import TextIO


_STDERR = 2


class Outlet:
    """A file for a `Console`, which never raises OSError.

    Args:
        out: stdout.
        name: of the program, for what is said on stderr.

    Attributes:
        lost: nobody takes what is written any more.
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
            # what its buffer holds is written once more when Python ends
            null = os.open(os.devnull, os.O_WRONLY)  # blocking: once
            os.dup2(null, self._out.fileno())
            os.close(null)
        self.complain(f"{self._name}: stdout is gone ({error.strerror}); it goes on, and tells the rest here")

    def complain(self, text: str, *, markup: bool = False) -> None:
        """Say a line on stderr, if that is still there."""
        plain = Text.from_markup(text).plain if markup else text
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"{plain}\n".encode(errors="replace"))  # blocking: a short line, now and then
