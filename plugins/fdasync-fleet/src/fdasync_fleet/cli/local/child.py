"""One instance as a child process: `fdasync serve`, asked to end by signals, watched by pidfd, killed and reaped.

The child runs in a process group of its own, so that Ctrl-C at a terminal comes to this process, and the kernel kills
the child if this process dies first. Knows no requests. Called by `local/fleet.py`.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import msgspec

from fdasync.engine.config import EngineConfig
from fdasync.errors import DeadlineExceeded, FdasyncError
from fdasync.ipc.deadlines import wait_within
from fdasync_fleet.cli.local.options import LINKS, LinkOptions
from fdasync_fleet.link.address import remove_dead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Role = Literal["mixed", "prefill", "decode"]
State = Literal["loading", "ready", "draining", "ending", "ended"]

_STDERR = 2
_TAIL_LINES = 20
_MAX_LINE_CHARS = 2000
_READ_NBYTES = 1 << 16
_COMMAND = "from fdasync.cli.main import main; main()"
# the child reads its configuration from stdin: no file could be left behind
_CONFIG = "/proc/self/fd/0"
# seconds beyond the close deadline of a child's engine
_END_S = 10.0
_KILL_S = 10.0


class _Ready(msgspec.Struct, frozen=True):
    """What is read of a child's ready line (`fdasync_fleet.cli.service.Ready`)."""

    address: str
    listens: str
    notes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one instance; the fields are options of `fdasync serve`.

    Attributes:
        links: where it listens is there as well; "": at a socket in the fleet's folder.
        shares_stderr: what it logs goes to this process's stderr; else to its own, a pipe.
        extra: further options, each word by itself, as `("--metrics-port", "0")`.
    """

    name: str
    role: Role
    config: EngineConfig
    links: LinkOptions = LinkOptions()
    shares_stderr: bool = False
    extra: tuple[str, ...] = ()


class ChildEnded(FdasyncError):
    """An instance ended before it was ready.

    Attributes:
        name: of the instance.
        status: its exit status, negative for a signal.
        lines: its last lines on stderr.
    """

    def __init__(self, name: str, status: int, lines: Sequence[str]) -> None:
        self.name = name
        self.status = status
        self.lines = tuple(lines)
        super().__init__(f"{name} {in_words(status)}" + (f": {lines[-1]}" if lines else ", and said nothing"))


class Child:
    """One `fdasync serve`.

    Attributes:
        name, role: as planned.
        address: where others reach it; with the port that the system gave once it is ready.
        listens: where it listens, which may differ from that (`--host`).
        pid: of its process.
        state: what it does, as far as this process knows.
        exited: its exit status, set when it was reaped.
        ready: set when it takes requests; ChildEnded if it ended before.
        ready_at: when it began to take requests, in the loop's time; None before.
        notes: of its runner, for people; () before it is ready.
        gpus: of its processes, by rank, where they were placed; () before it is ready.
        lines: its last lines on stderr.
    """

    def __init__(self, plan: Plan, address: str, on_end: Callable[[Child], None]) -> None:
        """Raises OSError if no process can be started."""
        self.name, self.role = plan.name, plan.role
        self.address = self.listens = address
        self.state: State = "loading"
        self.lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.ready_at: float | None = None
        self.notes: tuple[str, ...] = ()
        self.gpus: tuple[str, ...] = ()
        self._ready_line = b""
        self._close_s = plan.config.close_deadline_s
        self._text = b""
        arguments = [
            *("serve", "--config", _CONFIG, "--role", plan.role, "--listen", self.listens, "--name", plan.name),
            *("--parent", str(os.getpid()), *LINKS.arguments(plan.links), *plan.extra),
        ]
        ready_fd, error_fd = self._start(arguments, msgspec.json.encode(plan.config), plan.shares_stderr)
        self._fds = {ready_fd, error_fd}
        self.pid = self._process.pid
        self._error_fd = error_fd
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            # fds may have run out; a child that cannot be watched is ended here
            self._process.kill()
            self._process.wait()  # blocking: it has done nothing yet, and was killed
            for fd in self._fds:
                os.close(fd)
            raise
        self._loop.add_reader(self._pidfd, self._reap)
        for fd, read in ((ready_fd, self._on_ready), (error_fd, self._on_error)):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, read, fd)

    def _start(self, arguments: list[str], config: bytes, shares_stderr: bool) -> tuple[int, int]:
        """Start the process; returns our ends of the pipes for its ready line and its stderr. Raises OSError, with
        nothing left open."""
        with ExitStack() as theirs, ExitStack() as ours:

            def pipe() -> tuple[int, int]:
                read, write = os.pipe()
                ours.callback(os.close, read)
                theirs.callback(os.close, write)
                return read, write

            config_fd = os.memfd_create(f"{self.name}.json")
            theirs.callback(os.close, config_fd)
            os.write(config_fd, config)  # blocking: memory
            os.lseek(config_fd, 0, os.SEEK_SET)
            ready_fd, ready_end = pipe()
            error_fd, error_end = pipe()
            passed = [ready_end]
            if shares_stderr:
                # lines go straight there, whole: nothing in between reads and writes them again
                log_end = os.dup(_STDERR)
                theirs.callback(os.close, log_end)
                passed.append(log_end)
                arguments = [*arguments, "--log-fd", str(log_end)]
            self._process = subprocess.Popen(  # blocking: fork and exec, milliseconds, once
                [sys.executable, "-P", "-c", _COMMAND, *arguments, "--ready-fd", str(ready_end)],
                pass_fds=passed,
                stdin=config_fd,
                stdout=subprocess.DEVNULL,
                stderr=error_end,
                process_group=0,
            )
            ours.pop_all()
            return ready_fd, error_fd

    def drain(self) -> None:
        """Ask the child to take no new requests, and to end when it has none. A child that is not ready ends."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
            self._send(signal.SIGTERM)

    def end(self) -> None:
        """Ask the child to end at once."""
        if self.state not in ("ending", "ended"):
            # two different signals: of two equal pending signals the kernel delivers one
            signals = (signal.SIGINT,) if self.state == "draining" else (signal.SIGTERM, signal.SIGINT)
            self.state = "ending"
            for number in signals:
                self._send(number)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    async def aclose(self) -> None:
        """End the child, kill it if it does not end; idempotent. Raises DeadlineExceeded if that does not end it."""
        self.end()
        await wait_within([self.exited], self._close_s + _END_S)
        self.kill()
        await wait_within([self.exited], _KILL_S)
        if not self.exited.done():
            raise DeadlineExceeded(f"reaping {self.name}, process {self.pid}", _KILL_S)

    def remove_socket(self) -> None:
        """Remove the socket that a killed child left at its address."""
        remove_dead(self.address)

    def _on_ready(self, fd: int) -> None:
        data = os.read(fd, _READ_NBYTES)
        self._ready_line += data
        if self._ready_line.endswith(b"\n") and self.ready_at is None:
            ready = msgspec.json.decode(self._ready_line, type=_Ready)
            self.address, self.listens = ready.address, ready.listens
            self.notes, self.gpus = ready.notes, ready.gpus
            self.state = "ready" if self.state == "loading" else self.state
            self.ready_at = self._loop.time()
            if not self.ready.done():
                self.ready.set_result(None)
        elif not data:
            self._close(fd)

    def _on_error(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_NBYTES)
        except BlockingIOError:
            return
        *lines, self._text = (self._text + data).split(b"\n")
        if not data:
            lines, self._text = [*lines, self._text], b""
            self._close(fd)
        self.lines += [line.decode(errors="replace")[:_MAX_LINE_CHARS] for line in lines if line.strip()]
        self._text = self._text[-4 * _MAX_LINE_CHARS :]

    def _close(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self._loop.remove_reader(fd)
            os.close(fd)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()  # blocking: the pidfd said that it has ended
        # its last lines; a process that it left behind may hold the pipe open, and is not waited for
        while self._error_fd in self._fds and self._has_more():
            self._on_error(self._error_fd)
        if self._text.strip():
            self.lines.append(self._text.decode(errors="replace")[:_MAX_LINE_CHARS])
        for fd in list(self._fds):
            self._close(fd)
        expected, self.state = self.state, "ended"
        if not self.ready.done():
            self.ready.set_exception(ChildEnded(self.name, status, self.lines))
        self.exited.set_result(status)
        if expected in ("loading", "ready") or (expected == "draining" and status not in (0, 1)):
            self._on_end(self)

    def _has_more(self) -> bool:
        # `select` knows no descriptors above 1023
        poll = select.poll()
        poll.register(self._error_fd, select.POLLIN)
        return bool(poll.poll(0))


def in_words(status: int) -> str:
    """An exit status for people."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
