"""The `fdasync` command's first lines: all that must be so before anything heavy is imported.

Beside the package and not in it: importing any of its modules imports the package first, and that takes long enough
for somebody to press Ctrl-C. A library changes no signals and descriptors; this is for a process of our own.
"""

from __future__ import annotations

import os
import signal
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point: what `fdasync.cli.main.main` is, and Ctrl-C is a short end from the first moment on."""
    open_standard_streams()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        # an exception in the middle of an import ends in a traceback, or is lost; nothing was made that must be undone
        signal.signal(signal.SIGINT, _leave)
    from fdasync.cli.main import main as command

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        # beside what `command` itself catches
        sys.exit(EXIT_INTERRUPTED)
    finally:
        if ours:
            # it has ended, and its exit code stands: one more must not kill it while Python cleans up
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(EXIT_INTERRUPTED)


def open_standard_streams() -> None:
    """Open what is closed of descriptors 0 to 2 on /dev/null: whatever was opened next would be taken for them."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # the lowest one that is free: those below are open
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            # as Python's own, it is there until the process ends
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
