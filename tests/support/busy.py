"""Run a command beside processes that do nothing but take CPU: what passes there depends on no machine's speed.

    python -m tests.support.busy 8 -- make ring-one

Starts as many processes that spin, runs the command, ends them, and exits with the command's status (128 and the
signal's number if a signal ended it). They also end when this program is interrupted, ended or killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# it looks now and then whether the one that started it is still there
_SPIN = """
import os
while os.getppid() == {pid}:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that spin until the block ends."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            # -I: nothing is imported that takes its time
            process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN.format(pid=os.getpid())])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def main(arguments: Sequence[str]) -> int:
    """The command's status; 2 where the arguments are none."""
    if len(arguments) < 3 or not arguments[0].isdigit() or arguments[1] != "--":
        print("usage: python -m tests.support.busy COUNT -- COMMAND ...", file=sys.stderr)
        return 2
    # the end of this program by a signal ends them too
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with busy(int(arguments[0])):
            status = subprocess.call(arguments[2:])
    except KeyboardInterrupt:
        # the terminal told the command too, and it was waited for
        return 128 + signal.SIGINT
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
