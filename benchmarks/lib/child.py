"""A child process of a benchmark: started, heard, asked and killed by its parent, one line at a time.

A child prints a line when it is ready, and may answer lines. A child that waits in `stay` also ends when its parent has
died. Knows no benchmark. Used by the benchmarks of links, transports, fleets, HTTP and stores.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence


class Child:
    """`python -m MODULE ARGUMENTS`, which `with` kills and reaps.

    Args:
        before: a command that runs this one, such as nsenter.
        fds: descriptors that the child has, too.

    Attributes:
        pid: of the process.
    """

    def __init__(self, module: str, *arguments: str, before: Sequence[str] = (), fds: Sequence[int] = ()) -> None:
        command = [*before, sys.executable, "-m", module, *arguments]
        self._name = module
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that it prints. Blocks. Raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")
        return line.strip()

    def ask(self, line: str) -> str:
        """Write a line; the line that answers it. Raises RuntimeError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill and reap; idempotent."""
        # the process's own `with` closes its pipes and waits for it
        with self._process:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def stay(line: str) -> None:
    """In a child: say that it is ready, and wait until its parent has died."""
    print(line, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()
