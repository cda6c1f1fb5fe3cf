"""The receiver's side of `tcp.py`: one connection to a sender, shared by all receives from it (`tcp_job.py`).

Receives take turns to ask for runs of bytes; answers come in the order of the requests and go straight into the parts
they are for, hashed slice by slice while the caches hold them. A receive that ended leaves nothing behind but
requests whose answers are read and thrown away, a window's worth at most. A connection that does not move while
something is owed is dropped at a deadline; so is one that says anything but the answers. Made by `TcpTransport`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import ProtocolError
from fdasync.pd.transfer.base import SLICE_NBYTES
from fdasync.pd.transfer.tcp_wire import MAX_REQUESTS, REPLY_NBYTES, greeting, pack_request, parse_address, read_reply
from fdasync.pd.transfer.validation import FORGOTTEN, broken

if TYPE_CHECKING:
    import asyncio

    from fdasync.cache.store.base import Outcome
    from fdasync.pd.transfer.tcp_job import Job, Run

# what is asked for ahead: more than the kernel's buffers hold, little enough to be thrown away
_WINDOW_NBYTES = 8 << 20
# of bytes that are sure to come, wait for so many: a wakeup for each packet costs more than it saves
_AT_ONCE_NBYTES = 256 << 10


class Connection:
    """See the module. Dials at once; whatever becomes of it, its jobs' calls are told.

    Attributes:
        closed: it will not carry anything any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, token: bytes) -> None:
        """Raises ProtocolError for an address that is none or not loopback, OSError."""
        self.closed = False
        self._loop = loop
        self._address = address
        self._jobs: deque[Job] = deque()  # that have something to ask for, in turn
        self._all: dict[Job, None] = {}
        self._asked: deque[Run] = deque()
        self._asked_nbytes = 0
        self._number = 0  # of the next request
        self._unsent = bytearray(greeting(token))
        self._head = bytearray(REPLY_NBYTES)
        self._head_got = 0
        self._left = 0  # bytes of the first run asked for that are still to come, when its head was read
        self._at_once = 1  # what the kernel wakes us for
        self._scratch: bytearray | None = None
        self.moved_at = loop.time()
        host, port = parse_address(address)
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = self._sock.connect_ex((host, port))
            if found not in (0, errno.EINPROGRESS):
                raise OSError(found, os.strerror(found))
            self._fd = self._sock.fileno()
            self._writing = True
            loop.add_writer(self._fd, self._connected)
        except BaseException:
            self._sock.close()
            raise

    def add(self, job: Job) -> None:
        """Ask for all it wants, in turn with the others."""
        if self.idle_since() is not None:
            self.moved_at = self._loop.time()
        self._all[job] = None
        self._jobs.append(job)
        self._ask()

    def remove(self, job: Job) -> None:
        """It ends: what is on its way for it goes nowhere."""
        job.detach()
        self._all.pop(job, None)
        with contextlib.suppress(ValueError):
            self._jobs.remove(job)

    def idle_since(self) -> float | None:
        """Since when nothing is wanted from it; None: something is."""
        return None if self._all or self._asked else self.moved_at

    def stuck(self, now: float, stuck_s: float) -> bool:
        """Something is owed and nothing came for too long."""
        return bool(self._all or self._asked) and now - self.moved_at > stuck_s

    def drop(self, outcome: Outcome = FORGOTTEN) -> None:
        """Close; calls that are not through end like this. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        for job in list(self._all):
            job.detach()
            job.call.end(outcome)
        for held in (self._all, self._jobs, self._asked):
            held.clear()

    def _fail(self, problem: object) -> None:
        self.drop(broken(f"the connection to {self._address} broke: {problem}"))

    # -- asking ---------------------------------------------------------------------------------------

    def _connected(self) -> None:
        found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if found:
            self._fail(os.strerror(found))
            return
        self._writing = False
        self._loop.remove_writer(self._fd)
        self._loop.add_reader(self._fd, self._read)
        self.moved_at = self._loop.time()
        self._write()

    def _ask(self) -> None:
        """Fill the window: each job in turn asks for one run."""
        while self._jobs and len(self._asked) < MAX_REQUESTS and self._asked_nbytes < _WINDOW_NBYTES:
            job = self._jobs[0]
            run = next(job.runs, None)
            if run is None:
                self._jobs.popleft()
                continue
            self._jobs.rotate(-1)
            self._unsent += pack_request(job.request(self._number + len(self._asked), run))
            self._asked.append(run)
            self._asked_nbytes += run.length
        if self._unsent and not self._writing:
            self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(error)
            return
        writing = bool(self._unsent)
        if writing != self._writing:
            self._writing = writing
            if writing:
                self._loop.add_writer(self._fd, self._write)
            else:
                self._loop.remove_writer(self._fd)

    # -- answers --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what is there, a slice at most: the kernel's own work on its way to us is in it."""
        budget = SLICE_NBYTES
        try:
            while budget > 0 and not self.closed:
                limit = min(budget, SLICE_NBYTES, self._left)
                got = self._read_bytes(limit) if self._left else self._read_head()
                if not got:
                    self._fail("the sender closed it")
                    return
                budget -= got
                if self._head_got == REPLY_NBYTES:
                    self._answer()
                elif got < limit:
                    # that was all there is
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ProtocolError) as error:
            self._fail(error)
            return
        if budget < SLICE_NBYTES:
            self.moved_at = self._loop.time()
        if not self.closed:
            self._ask()
        if not self.closed:
            self._wake_for(min(max(self._left, 1), _AT_ONCE_NBYTES))

    def _wake_for(self, nbytes: int) -> None:
        """Only bytes of a run whose head has come are sure to: a run may be refused instead."""
        if nbytes != self._at_once:
            self._at_once = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _read_head(self) -> int:
        with memoryview(self._head)[self._head_got :] as room:
            got = self._sock.recv_into(room)
        self._head_got += got
        return got

    def _read_bytes(self, limit: int) -> int:
        """Bytes of the first run, and the head behind them with the same call."""
        run = self._asked[0]
        at = run.length - self._left
        want = min(self._left, limit)
        view = run.job.view(run, at, want)
        with view if view is not None else self._nowhere(want) as room:
            last = want == self._left
            got = self._sock.recvmsg_into([room, self._head])[0] if last else self._sock.recv_into(room)
            came = min(got, want)
            if view is not None and came:
                with room[:came] as new:
                    run.job.took(run, at, new)
        self._left -= came
        self._head_got = got - came
        if not self._left:
            self._done(run)
            run.job.arrived(run)
        return got

    def _nowhere(self, nbytes: int) -> memoryview:
        if self._scratch is None:
            self._scratch = bytearray(SLICE_NBYTES)
        return memoryview(self._scratch)[:nbytes]

    def _answer(self) -> None:
        """A whole head was read. Raises ProtocolError if it answers nothing."""
        self._head_got = 0
        if not self._asked:
            raise ProtocolError("an answer that nobody asked for")
        run = self._asked[0]
        if read_reply(self._head, self._number, run.length):
            self._left = run.length
        else:
            self._done(run)
            run.job.refuse(run)

    def _done(self, run: Run) -> None:
        """Nothing more of the first request comes."""
        self._asked.popleft()
        self._asked_nbytes -= run.length
        self._number += 1
