"""The receiver's side of `tcp.py`: one connection to a sender, and the receives that share it.

Receives (`TcpTransfer`) take turns to request runs of bytes. Replies come in the order of the requests; their bytes go
straight into the parts, and are hashed slice by slice while the caches hold them. The connection reads and drops the
replies to requests of a receive that has ended, a window's worth at most. It is dropped if it owes bytes and does not
move for too long, or breaks the protocol. A sender whose address says so is spoken to by TLS (`tcp_tls.py`). Knows no
deadlines of receives. Made by `tcp.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from fdasync.cache.store.base import DONE, Outcome
from fdasync.errors import ProtocolError
from fdasync_fleet.transfer.base import SLICE_NBYTES
from fdasync_fleet.transfer.tcp_tls import AGAIN, DIGEST_NBYTES, check_certificate, dial_tls, shake
from fdasync_fleet.transfer.tcp_wire import (
    ANSWER_NBYTES,
    MAX_REQUESTS,
    NONCE_NBYTES,
    REPLY_NBYTES,
    Request,
    check_answer,
    is_tls,
    knock,
    pack_request,
    parse_address,
    proof,
    read_reply,
)
from fdasync_fleet.transfer.validation import FORGOTTEN, broken, damaged, refused

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Iterator, Sequence

    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer

#: bytes of one request
RUN_NBYTES = 512 << 10

# bytes requested ahead: more than the kernel's buffers hold, few enough to be thrown away
_WINDOW_NBYTES = 8 << 20
# the kernel wakes the reader after so many bytes of a run, since a wakeup for each packet would cost more
_AT_ONCE_NBYTES = 256 << 10
# TLS may have read so many of these with the record before, so that the kernel has fewer left to wait for
_RECORDS_NBYTES = 32 << 10


def unreached(address: str, own_host: str, problem: object) -> Outcome:
    """A sender is not where it says: a translated address, or one of another network. The reader has to know what both
    sides see."""
    return broken(
        f"the sender says that its blocks are at {address}, and from {own_host} they cannot be reached there: {problem}"
        "; it must listen (--listen), or say that it is reached (--host), at an address that is reached from here"
    )


class TcpTransfer:
    """The requests and copies of one receive.

    Attributes:
        entry: the receive's entry in the transport's `Transfers`.
        outcomes: outcome of each copy; None: not known yet.
        runs: the runs that are not requested yet.
    """

    def __init__(
        self,
        entry: Transfer,
        copy_specs: Sequence[CopySpec],
        outcomes: list[Outcome | None],
        regions: Sequence[SharedRegion],
    ) -> None:
        self.entry = entry
        self.outcomes = outcomes
        self._copy_specs = copy_specs
        self._regions: Sequence[SharedRegion] | None = regions
        self._missing = outcomes.count(None)
        self._hash = xxhash.xxh3_64()
        self.runs = self._all_runs()

    @property
    def finished(self) -> bool:
        """Whether every outcome is known."""
        return not self._missing

    def detach(self) -> None:
        """The receive ends: write no more bytes, and request none."""
        self._regions = None

    def _all_runs(self) -> Iterator[Run]:
        for place, copy_spec in enumerate(self._copy_specs):
            for number, part in enumerate(copy_spec.parts if self.outcomes[place] is None else ()):
                for start in range(0, part.nbytes, RUN_NBYTES):
                    if self._regions is None:
                        return
                    if self.outcomes[place] is None:
                        yield Run(self, place, number, start, min(RUN_NBYTES, part.nbytes - start))

    def request(self, number: int, run: Run) -> Request:
        return Request(number, self._copy_specs[run.place].ref_parts[run.part], run.start, run.length)

    def view(self, run: Run, at: int, nbytes: int) -> memoryview | None:
        """The memory for bytes of a run; None if they are not needed any more. Release it at once."""
        if self._regions is None or self.outcomes[run.place] is not None:
            return None
        part = self._copy_specs[run.place].parts[run.part]
        return self._regions[part.region].view(part.offset + run.start + at, nbytes)

    def took(self, run: Run, at: int, view: memoryview) -> None:
        """Bytes of a run are in place: hash them."""
        if run.start + at == 0:
            self._hash = xxhash.xxh3_64()
        self._hash.update(view)

    def arrived(self, run: Run) -> None:
        """All bytes of a run are in place: check a part that is complete."""
        if self._regions is None or self.outcomes[run.place] is not None:
            return
        copy_spec = self._copy_specs[run.place]
        if run.start + run.length < copy_spec.parts[run.part].nbytes:
            return
        if self._hash.intdigest() != copy_spec.checksums[run.part]:
            self._settle(run.place, damaged(run.part))
        elif not any(part.nbytes for part in copy_spec.parts[run.part + 1 :]):
            self._settle(run.place, DONE)

    def refuse(self, run: Run) -> None:
        """The sender refused a run."""
        self._settle(run.place, refused("a part of the sender's is not on offer"))

    def _settle(self, place: int, outcome: Outcome) -> None:
        if self.outcomes[place] is None:
            self.outcomes[place] = outcome
            self._missing -= 1
            if not self._missing:
                self.entry.wake()


class Run(NamedTuple):
    """The bytes of one request: `length` bytes from `start` of part number `part` of copy number `place`."""

    transfer: TcpTransfer
    place: int
    part: int
    start: int
    length: int


class Connection:
    """See the module. Dials at once; when it closes, it ends its transfers.

    Attributes:
        closed: it has been closed.
        moved_at: time at which bytes last arrived.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, token: bytes, *, keyed: bool = False) -> None:
        """`keyed`: it may be beyond the loopback. Raises ProtocolError for the address, OSError."""
        self.closed = False
        self._loop = loop
        self._address = address
        self._queue: deque[TcpTransfer] = deque()  # that have something to ask for, in turn
        self._all: dict[TcpTransfer, None] = {}
        self._asked: deque[Run] = deque()
        self._asked_nbytes = 0
        self._number = 0  # of the next request
        self._token = token
        self._nonce = os.urandom(NONCE_NBYTES)
        self._is_tls = is_tls(address)
        self._unsent = bytearray(knock(token, self._nonce, tls=self._is_tls))
        self._greeted = False
        self._answer_got = bytearray()
        # TLS above the socket, once the sender has answered; what the answer says of its certificate, and the proof
        self._over: ssl.SSLSocket | None = None
        self._digest = self._proof = b""
        self._held = bytearray()  # requests, until the sender has answered
        self._head = bytearray(REPLY_NBYTES)
        self._head_got = 0
        self._left = 0  # bytes of the first requested run that are still to come, once its head was read
        self._at_once = 1  # bytes after which the kernel wakes us
        self._scratch: bytearray | None = None
        self.moved_at = loop.time()
        host, port = parse_address(address, keyed=keyed)
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = self._sock.connect_ex((host, port))
            if found not in (0, errno.EINPROGRESS):
                raise OSError(found, os.strerror(found))
            # the kernel chose it by the route
            self._own_host = str(self._sock.getsockname()[0])
            self._fd = self._sock.fileno()
            self._writing = True
            loop.add_writer(self._fd, self._connected)
        except BaseException:
            self._sock.close()
            raise

    def add(self, transfer: TcpTransfer) -> None:
        """Request all runs of a transfer, in turn with the other transfers."""
        if self.idle_since() is not None:
            self.moved_at = self._loop.time()
        self._all[transfer] = None
        self._queue.append(transfer)
        self._ask()

    def remove(self, transfer: TcpTransfer) -> None:
        """A transfer ends: bytes that still arrive for it are dropped."""
        transfer.detach()
        self._all.pop(transfer, None)
        with contextlib.suppress(ValueError):
            self._queue.remove(transfer)

    def idle_since(self) -> float | None:
        """The time since which it has no transfers and no requests; None while it has."""
        return None if self._all or self._asked else self.moved_at

    def stuck(self, now: float, stuck_s: float) -> bool:
        """Whether it has owed bytes for too long and none came."""
        return bool(self._all or self._asked) and now - self.moved_at > stuck_s

    def drop(self, outcome: Outcome = FORGOTTEN) -> None:
        """Close; unfinished transfers end with this outcome. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        for transfer in list(self._all):
            transfer.detach()
            transfer.entry.end(outcome)
        for held in (self._all, self._queue, self._asked):
            held.clear()

    def drop_stuck(self, stuck_s: float) -> None:
        """Close it because it owes something, and sent nothing for so long."""
        if self._greeted:
            self.drop(broken(f"{self._address} owes bytes and sent none for {stuck_s:g} s"))
        else:
            self._fail(f"no answer for {stuck_s:g} s")

    def _fail(self, problem: object) -> None:
        if self._greeted:
            self.drop(broken(f"the connection to {self._address} broke: {problem}"))
            return
        self.drop(unreached(self._address, self._own_host, problem))

    # -- requests -------------------------------------------------------------------------------------

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
        """Fill the window: each transfer in turn requests one run."""
        while self._queue and len(self._asked) < MAX_REQUESTS and self._asked_nbytes < _WINDOW_NBYTES:
            transfer = self._queue[0]
            run = next(transfer.runs, None)
            if run is None:
                self._queue.popleft()
                continue
            self._queue.rotate(-1)
            waiting = self._unsent if self._greeted else self._held
            waiting += pack_request(transfer.request(self._number + len(self._asked), run))
            self._asked.append(run)
            self._asked_nbytes += run.length
        if self._unsent and not self._writing:
            self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except AGAIN:
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

    # -- replies --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the bytes that are there, at most a slice, so that a callback stays short."""
        if self._greeted:
            if not self.closed:
                self._read_replies()
        elif self._over is None:
            self._read_answer()
        else:
            self._shake(self._over)

    def _read_replies(self) -> None:
        budget = SLICE_NBYTES
        try:
            while not self.closed and (budget > 0 or self._has_record()):
                limit = min(budget if budget > 0 else SLICE_NBYTES, self._left)
                got = self._read_bytes(limit) if self._left else self._read_head()
                if not got:
                    self._fail("the sender closed it")
                    return
                budget -= got
                if self._head_got == REPLY_NBYTES:
                    self._answer()
                elif got < limit and self._over is None:
                    # the socket is empty
                    break
        except AGAIN:
            pass
        except (OSError, ProtocolError) as error:
            self._fail(error)
            return
        if budget < SLICE_NBYTES:
            self.moved_at = self._loop.time()
        if not self.closed:
            self._ask()
        if not self.closed:
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        ahead = 0 if self._over is None else _RECORDS_NBYTES
        self._wake_for(max(min(self._left, _AT_ONCE_NBYTES) - ahead, 1))

    def _has_record(self) -> bool:
        """Whether TLS holds bytes of a record that it has read whole, for which the socket calls no reader."""
        return self._over is not None and self._over.pending() > 0

    def _read_answer(self) -> None:
        """Read the sender's answer to our knock; then prove who we are, and send the requests that wait."""
        answer_nbytes = ANSWER_NBYTES + (DIGEST_NBYTES if self._is_tls else 0)
        try:
            data = self._sock.recv(answer_nbytes - len(self._answer_got))
        except AGAIN:
            return
        except OSError as error:
            self._fail(error)
            return
        if not data:
            self._fail("the sender closed it")
            return
        self._answer_got += data
        self.moved_at = self._loop.time()
        if len(self._answer_got) < answer_nbytes:
            return
        try:
            theirs, self._digest = check_answer(bytes(self._answer_got), self._token, self._nonce)
            self._proof = proof(self._token, self._nonce, theirs)
            if self._is_tls:
                self._sock = self._over = dial_tls(self._sock)
        except (ProtocolError, OSError) as error:
            self._fail(error)
            return
        if self._over is None:
            self._prove()
        else:
            self._shake(self._over)

    def _shake(self, over: ssl.SSLSocket) -> None:
        """Go on with the handshake; a new connection has room for all that we say."""
        try:
            if not shake(over):
                return
            check_certificate(over, self._digest)
        except (ProtocolError, OSError) as error:
            self._fail(error)
            return
        self.moved_at = self._loop.time()
        self._prove()

    def _prove(self) -> None:
        """The sender is who we mean: say that we are, and send the requests that wait."""
        self._greeted = True
        self._unsent += self._proof + self._held
        self._held.clear()
        self._write()

    def _wake_for(self, nbytes: int) -> None:
        """Wake us after so many bytes. Only a run whose head was read is sure to have bytes."""
        if nbytes != self._at_once:
            self._at_once = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _read_head(self) -> int:
        with memoryview(self._head)[self._head_got :] as room:
            got = self._sock.recv_into(room)
        self._head_got += got
        return got

    def _read_bytes(self, limit: int) -> int:
        """Read bytes of the first run, and the head behind them with the same call of the kernel."""
        run = self._asked[0]
        at = run.length - self._left
        want = min(self._left, limit)
        view = run.transfer.view(run, at, want)
        with view if view is not None else self._nowhere(want) as room:
            # TLS reads into one buffer at a time
            last = want == self._left and self._over is None
            got = self._sock.recvmsg_into([room, self._head])[0] if last else self._sock.recv_into(room)
            came = min(got, want)
            if view is not None and came:
                with room[:came] as new:
                    run.transfer.took(run, at, new)
        self._left -= came
        self._head_got = got - came
        if not self._left:
            self._done(run)
            run.transfer.arrived(run)
        return got

    def _nowhere(self, nbytes: int) -> memoryview:
        if self._scratch is None:
            self._scratch = bytearray(SLICE_NBYTES)
        return memoryview(self._scratch)[:nbytes]

    def _answer(self) -> None:
        """A whole head was read. Raises ProtocolError if it replies to no request."""
        self._head_got = 0
        if not self._asked:
            raise ProtocolError("a reply without a request")
        run = self._asked[0]
        if read_reply(self._head, self._number, run.length):
            self._left = run.length
        else:
            self._done(run)
            run.transfer.refuse(run)

    def _done(self, run: Run) -> None:
        """The first request has its whole reply."""
        self._asked.popleft()
        self._asked_nbytes -= run.length
        self._number += 1
