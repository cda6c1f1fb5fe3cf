"""A child process that talks over a channel: started, watched by pidfd, killed and reaped.

No thread, no signal handler, no asyncio child watcher. The child gets one end of a socket pair; its death closes that
end, and the kernel kills the child should this process die first (`die_with_parent`). The module knows no messages.
`ipc/rpc.py` uses it for the worker, the tokenizer's process and the store's process; programs of child processes call
the functions at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

from fdasync.errors import ConfigError, DeadlineExceeded, WorkerDied
from fdasync.ipc.channel import Channel
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

_REAP_DEADLINE_S = 10.0
# the collector begins a round when so many more objects were made than freed: Python's own number, and a child's until
# it has settled
_ROUND_OBJECTS = gc.get_threshold()[0]
_ROUND_OBJECTS_AT_START = 50_000


class ChildProcess:
    """`module.main()` in a fresh interpreter, its end of the channel as the fd in argv[1].

    Args:
        name: the child's purpose in words; part of errors.
        module: its `main` is the child's whole program.
        on_frame: called for each frame that the child sends; fds belong to the callee.
        on_death: called once when the child has ended by itself and was reaped; not after `close` or `kill`.
        environment: variables that the child has beside this process's own, or instead of them.

    Attributes:
        name: as given.
        pid: the child's process id.
        exited: done, with the exit status, when the child was reaped.
        channel: this end of the channel.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        module: str,
        on_frame: Callable[[bytes, list[int]], None],
        on_death: Callable[[Exception], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises OSError if no process can be started or watched; then none is left."""
        self.name = name
        self._loop = loop
        self._on_death = on_death
        self._error: Exception | None = None
        self._silent = False
        self.exited: asyncio.Future[int] = loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = subprocess.Popen(  # blocking: fork and exec, milliseconds, once
                    [sys.executable, "-P", "-c", f"from {module} import main; main()", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C at a terminal goes to this process's group: this process decides what it means for the
                    # child
                    process_group=0,
                )
            self.pid = self._process.pid
            self._watch(ours, on_frame)
        except BaseException:
            # fds may have run out at any of these steps
            ours.close()
            raise

    def _watch(self, ours: socket.socket, on_frame: Callable[[bytes, list[int]], None]) -> None:
        """Watch for the child's end and its frames; a child that cannot be watched is killed."""
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._reap)
            self.channel = Channel(self._loop, ours, on_frame, self._channel_ended)
        except BaseException:
            if self._pidfd >= 0:
                self._loop.remove_reader(self._pidfd)
                os.close(self._pidfd)
            self._process.kill()
            self._process.wait()  # blocking: it has done nothing yet, and was killed
            raise

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        self.channel.send(payload, fds)

    async def close(self, payload: bytes, deadline_s: float) -> None:
        """Send this frame, which asks the child to end; kill it at the deadline. Idempotent; reaped on return."""
        self._silent = True
        if not self.exited.done():
            self.channel.send(payload)
            await wait_within([self.exited], deadline_s)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL and reap; idempotent. On return the child writes nothing any more (docs/design.md, section 2).

        Raises DeadlineExceeded if the kernel does not let go of the child.
        """
        self._silent = True
        if not self.exited.done():
            self._process.kill()
            done, _ = await wait_within([self.exited], _REAP_DEADLINE_S)
            if not done:
                raise DeadlineExceeded(f"reaping the {self.name} process {self.pid}", _REAP_DEADLINE_S)
        self.channel.close()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()  # blocking: the pidfd said that it has ended
        # frames that it wrote before it ended are still in the socket: deliver them first, then its end
        self.channel.drain()
        self.exited.set_result(status)
        if not self._silent:
            self._silent = True
            self.channel.close()
            self._on_death(self._error or WorkerDied(self.name, self.pid, status))

    def _channel_ended(self, error: Exception | None) -> None:
        # the end of the stream is its death, and a child that broke the protocol must not go on; of a child that is
        # dying already the exit status is the error
        if error is not None and not isinstance(error, OSError):
            self._error = error
        if not self._silent and not self.exited.done():
            self._process.kill()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. A child calls it first."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger; False if it has ended."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # blocking: procfs, microseconds
    except OSError:
        return False
    try:
        told = os.pread(fd, 1024, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    # behind its name, which may have parentheses
    return told.rpartition(b") ")[2][:1] in (b"T", b"t")


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files to the hard limit. For processes that run fdasync alone, first thing.

    Raises ConfigError if that is fewer than `needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            "open files", f"this process may open {soft}, and needs more", limit=f"{needed} or more",
            hint=f"say `ulimit -n {max(needed, 1024)}` first, or have the hard limit raised",
        )  # fmt: skip


def leave(status: int) -> NoReturn:
    """End this process with an exit status: exit handlers run, streams are flushed, and the interpreter is not taken
    apart, which takes a second over a library like torch. For processes that run fdasync alone, when all is closed."""
    # a further Ctrl-C has nothing left to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # its reader may have gone
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def start_quietly() -> None:
    """Let the garbage collector begin its rounds seldom until `settle`. A child calls it before it imports its
    libraries: over them, and over the model that is built then, the rounds find next to nothing and take a fifth of the
    CPU time of the start. For processes that run fdasync alone."""
    gc.set_threshold(_ROUND_OBJECTS_AT_START)


def settle() -> None:
    """Take all present objects out of the garbage collector's rounds. For processes that run fdasync alone, when they
    are ready to serve; never where a caller's own program runs.

    A full round over a library like torch and its models stops the loop for a tenth of a second, and again whenever
    enough objects were made since. After this call rounds skip the objects made before it.
    """
    gc.collect()
    gc.freeze()
    if gc.get_threshold()[0] == _ROUND_OBJECTS_AT_START:
        gc.set_threshold(_ROUND_OBJECTS)
    # libraries look for leaks when the interpreter ends
    atexit.register(gc.unfreeze)
