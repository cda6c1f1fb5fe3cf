"""Lines to a pipe, a terminal, a socket or a file from a loop that must not wait for whoever reads them.

Lines wait in a bounded buffer while nobody takes them; what does not fit is dropped, whole, and counted. No thread, and
no change to a descriptor that others use: a pipe or a terminal is opened again, so that only our own end is
non-blocking. Made by `json_log.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Callable

# lines of one callback: each is a system call of a few microseconds
_TURN_LINES = 64


class LineWriter:
    """See the module.

    Args:
        target: a path (made if missing, appended to), or an open descriptor, which stays its owner's.
        max_nbytes: most bytes that wait.
        note: makes a line of how many were lost, and why; it is written before the next line that there is room for,
            again and again until it got through.

    Attributes:
        written, dropped: lines; notes do not count.
        problem: what the latest write that failed said, or "". Later lines are tried all the same.
    """

    def __init__(
        self, target: str | os.PathLike[str] | int, max_nbytes: int, note: Callable[[int, str], bytes]
    ) -> None:
        """Raises ConfigError for what cannot be opened."""
        self.written = 0
        self.dropped = 0
        self.problem = ""
        self._max_nbytes = max_nbytes
        self._loop = asyncio.get_running_loop()
        self._note = note
        self._untold = 0  # of dropped, those that no note in the buffer tells of
        self._lines: deque[_Line] = deque()
        self._nbytes = 0
        self._begun = False  # the first line is out in part
        self._torn = False  # a line that ends in the middle is out, without its end
        self._scheduled = False
        self._watching = False
        self._empty: asyncio.Future[None] | None = None
        self._sink = _Sink(target)
        self._fd = self._sink.fd

    @property
    def waiting_nbytes(self) -> int:
        """Bytes that nobody has taken yet."""
        return self._nbytes

    def offer(self, line: bytes) -> bool:
        """Write a line, its newline included, as soon as there is room for it; False: it was dropped."""
        if self._nbytes + len(line) > self._max_nbytes or self._fd < 0:
            self.lose(1)
            return False
        if self._untold:
            note = self._note(self._untold, self.problem)
            if self._nbytes + len(note) + len(line) <= self._max_nbytes:
                self._append(_Line(note, self._untold))
                self._untold = 0
        self._append(_Line(line, 0))
        self._later()
        return True

    def lose(self, count: int) -> None:
        """Lines that were lost, here or before they came here."""
        self.dropped += count
        self._untold += count

    async def aclose(self, deadline_s: float) -> None:
        """Wait so long for what is buffered to be taken, drop the rest, give the descriptor back; idempotent."""
        if self._lines and self._fd >= 0:
            self._empty = self._loop.create_future()
            await wait_within([self._empty], deadline_s)
        self._unwatch()
        self._drop_all()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._sink.close()

    def _append(self, line: _Line) -> None:
        if self._torn:
            line.data = b"\n" + line.data
            self._torn = False
        self._lines.append(line)
        self._nbytes += len(line.data)

    def _later(self) -> None:
        if not self._scheduled and not self._watching:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._fd < 0:
            return
        try:
            for _ in range(_TURN_LINES):
                if not self._lines:
                    break
                self._step()
        except BlockingIOError:
            self._watch()
        except OSError as error:
            self._fail(error)
        if self._lines:
            # others run in between; a watched descriptor calls again by itself
            self._later()
            return
        self._unwatch()
        if self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def _step(self) -> None:
        line = self._lines[0]
        count = self._sink.write(line.data)
        self._nbytes -= count
        if count < len(line.data):
            line.data = line.data[count:]
            self._begun = True
            return
        self._lines.popleft()
        self._begun = False
        self.written += not line.tells

    def _watch(self) -> None:
        if not self._watching:
            try:
                self._loop.add_writer(self._fd, self._flush)
            except OSError as error:
                self._fail(error)
                return
            self._watching = True

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)

    def _fail(self, error: OSError) -> None:
        self.problem = str(error)
        self._drop_all()

    def _drop_all(self) -> None:
        self._torn = self._torn or self._begun
        self._begun = False
        self.lose(sum([not line.tells for line in self._lines]))
        self._untold += sum([line.tells for line in self._lines])
        self._lines.clear()
        self._nbytes = 0


class _Line:
    """What is left of a line; `tells`: of so many lost ones, where it is a note."""

    __slots__ = ("data", "tells")

    def __init__(self, data: bytes, tells: int) -> None:
        self.data = data
        self.tells = tells


class _Sink:
    """A descriptor of our own that does not block."""

    def __init__(self, target: str | os.PathLike[str] | int) -> None:
        self._socket: socket.socket | None = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            if not isinstance(target, int):
                self.fd = os.open(target, flags | os.O_CREAT, 0o644)  # blocking: once, at start
            elif stat.S_ISSOCK(os.fstat(target).st_mode):
                # a socket cannot be opened again, but each send may say that it does not wait
                self._socket = socket.socket(fileno=os.dup(target))
                self.fd = self._socket.fileno()
            else:
                self.fd = os.open(f"/proc/self/fd/{target}", flags)  # blocking: once, at start
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError("write", f"cannot write to {target!r}: {problem}") from None

    def write(self, data: bytes) -> int:
        """How many bytes were taken. Raises BlockingIOError if none can be now, OSError."""
        if self._socket is not None:
            return self._socket.sendmsg([data], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return os.write(self.fd, data)  # blocking: a pipe never; a file only where the page cache is full

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self.fd)
