"""The entry point of the `fdasync` command: prepares signals and descriptors before anything heavy is imported.

It stands beside the package: importing a module of the package imports the package first, which takes long enough for a
user to press Ctrl-C. Importing the package changes no signals and descriptors; this is for a process of our own.
"""

from __future__ import annotations

import os
import signal
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run `fdasync.cli.main.main`; Ctrl-C ends the process with one line from the first moment on."""
    open_standard_streams()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        # an exception in the middle of an import ends in a traceback, or is lost; there is nothing to undo yet
        signal.signal(signal.SIGINT, _leave)
    from fdasync.cli.main import main as command

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        # outside of what `command` itself catches
        sys.exit(EXIT_INTERRUPTED)
    finally:
        if ours:
            # the exit code stands: another Ctrl-C must not kill the process while Python cleans up
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(EXIT_INTERRUPTED)


def open_standard_streams() -> None:
    """Open closed descriptors of 0 to 2 on /dev/null: the next file that is opened would be taken for one of them."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # gets this number, the lowest that is free
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            # like Python's own streams it stays open until the process ends
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
