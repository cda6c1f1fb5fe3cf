"""Writes lines to a file or an inherited pipe, from a loop that must not wait for their reader.

Lines wait in a bounded buffer while the reader takes none. A line that does not fit is dropped whole and counted; the
next line that fits comes behind a note of how many were lost. A descriptor is opened again, so that its owner's flags
stay as they are. A line that a failing write cuts in two stays so. No thread. Knows no events. Called by `json_log.py`
and `fdasync serve`.
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

# lines of one callback; each is a system call of a few microseconds
_TURN_LINES = 64


class LineWriter:
    """See the module.

    Args:
        target: a path (made if missing, appended to), or an open descriptor, which stays its owner's.
        max_nbytes: most bytes that wait.
        note: makes a line from the number of lost lines and the reason; it is written together with the line behind it.

    Attributes:
        written: lines that were written whole, without notes.
        dropped: lines that were lost. The owner adds the lines that it lost before it offered them.
        waiting_nbytes: bytes that the reader has not taken.
        problem: the error of the latest write that failed, or "". Later lines are tried all the same.
    """

    def __init__(
        self, target: str | os.PathLike[str] | int, max_nbytes: int, note: Callable[[int, str], bytes]
    ) -> None:
        """Raises ConfigError for a target that cannot be opened."""
        self.written = self.dropped = self.waiting_nbytes = 0
        self.problem = ""
        self._max_nbytes = max_nbytes
        self._note = note
        self._loop = asyncio.get_running_loop()
        # the rest of each line, and of how many dropped lines the reader knows once it has it
        self._lines: deque[tuple[bytes, int]] = deque()
        # of how many dropped lines the reader knows
        self._known = 0
        # `_flush` will be called
        self._due = False
        self._empty: asyncio.Future[None] | None = None
        self._fd, self._put, self._close = _opened(target)

    def offer(self, line: bytes) -> bool:
        """Write a line, its newline included, as soon as there is room for it; False: it was dropped."""
        lost = self.dropped - (self._lines[-1][1] if self._lines else self._known)
        data = self._note(lost, self.problem) + line if lost else line
        if self._fd < 0 or self.waiting_nbytes + len(data) > self._max_nbytes:
            self.dropped += 1
            return False
        self._lines.append((data, self.dropped))
        self.waiting_nbytes += len(data)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)
        return True

    async def aclose(self, deadline_s: float) -> None:
        """Wait so long for the reader to take all lines, drop the rest, close the descriptor; idempotent."""
        if self._lines:
            # a second close waits for the same end
            if self._empty is None:
                self._empty = self._loop.create_future()
            await wait_within([self._empty], deadline_s)
        self._drop()
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            self._fd = -1
            self._close()

    def _flush(self) -> None:
        if self._fd < 0:
            return
        self._loop.remove_writer(self._fd)
        try:
            for _ in range(_TURN_LINES):
                if not self._lines:
                    break
                self._step()
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._flush)
            return
        except OSError as error:
            self.problem = str(error)
            self._drop()
        self._due = bool(self._lines)
        if self._due:
            # other callbacks run in between
            self._loop.call_soon(self._flush)
        elif self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def _step(self) -> None:
        data, known = self._lines[0]
        count = self._put(data)
        self.waiting_nbytes -= count
        if count < len(data):
            self._lines[0] = data[count:], known
            return
        self._lines.popleft()
        self.written += 1
        self._known = known

    def _drop(self) -> None:
        self.dropped += len(self._lines)
        self._lines.clear()
        self.waiting_nbytes = 0


def _opened(
    target: str | os.PathLike[str] | int,
) -> tuple[int, Callable[[bytes], int], Callable[[], None]]:
    """A descriptor of our own, a function that writes to it without waiting, and a function that closes it. Raises
    ConfigError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        if not isinstance(target, int):
            fd = os.open(target, flags | os.O_CREAT, 0o644)  # blocking: once, at start
        elif stat.S_ISSOCK(os.fstat(target).st_mode):
            # a socket cannot be opened again, but each send may be told not to wait
            sock = socket.socket(fileno=os.dup(target))
            sending = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            return sock.fileno(), lambda data: sock.sendmsg([data], [], sending), sock.close
        else:
            fd = os.open(f"/proc/self/fd/{target}", flags)  # blocking: once, at start
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("write", f"cannot write to {target!r}: {problem}") from None

    # another process that writes to the same open file writes at its shared offset: we move that behind our lines
    given = os.dup(target) if isinstance(target, int) and stat.S_ISREG(os.fstat(fd).st_mode) else -1

    def put(data: bytes) -> int:
        count = os.write(fd, data)  # blocking: a pipe never; a file only where the page cache is full
        if given >= 0:
            os.lseek(given, 0, os.SEEK_END)
        return count

    def close() -> None:
        for own in (fd, given):
            if own >= 0:
                os.close(own)

    return fd, put, close
