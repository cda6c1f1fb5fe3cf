"""Child processes of engines as forks of the test's process: they have its modules, and start at once.

What a fresh interpreter costs, seconds of a CPU where it imports torch, is most of many a test with processes. Tests
that are about these processes themselves start real ones. Knows what `fdasync.ipc.child` asks of `subprocess`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from fdasync.ipc import child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pytest


class _Fork:
    """In place of `subprocess.Popen`: runs the program of `python -P -c PROGRAM FD` in a fork."""

    def __init__(
        self, unguard: Callable[[], None], command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str],
        stdin: int, process_group: int,
    ) -> None:  # fmt: skip
        executable, *options, program, fd = command
        assert (executable, options, stdin, process_group) == (sys.executable, ["-P", "-c"], subprocess.DEVNULL, 0)
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be_child(unguard, program, fd, pass_fds, env)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def fork_children(patch: pytest.MonkeyPatch, unguard: Callable[[], None]) -> None:
    """From now on forks stand for processes. `unguard` ends the search for blocking calls, in the fork alone."""

    def start(command: Sequence[str], **options: Any) -> _Fork:
        return _Fork(unguard, command, **options)

    patch.setattr(child, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def _be_child(
    unguard: Callable[[], None], program: str, fd: str, pass_fds: Sequence[int], env: Mapping[str, str]
) -> NoReturn:
    status = 1
    try:
        # what the test holds stays where it is, and is nothing to look through or to clean up
        gc.disable()
        gc.freeze()
        gc.enable()
        atexit._clear()
        _keep_coverage()
        unguard()
        os.setpgid(0, 0)
        _forget_signals()
        _forget_files(pass_fds)
        os.environ.clear()
        os.environ.update(env)
        # as an interpreter does that starts
        places = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
        sys.path[:0] = [place for place in places if place not in sys.path]
        sys.argv = ["-c", fd]
        asyncio._set_running_loop(None)
        exec(program, {})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _keep_coverage() -> None:
    """Where coverage is measured, of the fork too: it is written as the program ends."""
    measuring = sys.modules.get("coverage")
    current = measuring and measuring.Coverage.current()
    if current:
        atexit.register(current.save)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _forget_files(keep: Sequence[int]) -> None:
    """The test's descriptors lead nowhere. They stay taken: its objects would close what else had their numbers."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, 0)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number not in (nowhere, *keep):
            with contextlib.suppress(OSError):
                # of this listing
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)
