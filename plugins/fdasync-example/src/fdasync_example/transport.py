"""The smallest useful transport: blocks of the same machine over a Unix stream socket.

The sender listens under a name made of its token; nothing lies in the file system, and the name ends with the process.
For each `receive` the receiver connects, asks for one part after another, and hashes the bytes of each. A request is a
part; the answer is slices, each behind a byte that says whether the part is still on offer. Knows no requests and no
leases. Made by an instance from its configuration. See `docs/write-a-transport.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, ClassVar

import xxhash
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import SLICE_NBYTES, Transport, Turns
from fdasync_fleet.transfer.transfers import Transfer, Transfers
from fdasync_fleet.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    TOKEN_NBYTES,
    Offers,
    boot_id,
    broken,
    check_copy_specs,
    check_source,
    damaged,
    refused,
)

from fdasync.cache.store import DONE
from fdasync.errors import InvariantBroken
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.ipc.shared_memory import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.transfer.base import CopySpec

    from fdasync.cache.store import Outcome
    from fdasync.ipc.shared_memory import SharedRegion

_REQUEST = struct.Struct("<QQQ")  # region, offset, bytes
_HERE, _GONE = b"\1", b"\0"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
# how long the sender waits for a receiver to ask, or to take an answer
_PATIENCE_S = 60.0
# pause before the next try where there is no room now
_AGAIN_S = 0.01
_BACKLOG = 128


class UnixTransport(Transport):
    """See the module."""

    name: ClassVar[str] = "unix"

    def __init__(self) -> None:
        self._source: Source | None = None
        self._closed = False
        self._regions: Sequence[SharedRegion] = ()
        self._offers = Offers()
        self._calls = Transfers()
        # sockets of our calls as a receiver, and tasks that serve other receivers
        self._sockets: dict[Transfer, socket.socket] = {}
        self._served: dict[asyncio.Task[None], socket.socket] = {}
        self._listener: socket.socket | None = None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._source is not None or self._closed:
            raise InvariantBroken("a transport is opened once")
        token = os.urandom(TOKEN_NBYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(_name(token))
        self._listener.listen(_BACKLOG)
        self._regions = regions
        self._offers.open(regions)
        sizes = tuple([(region.fd, region.nbytes) for region in regions])
        self._source = Source(machine=boot_id(), pid=os.getpid(), regions=sizes, token=token, address="")
        self._listen()

    def source(self) -> Source:
        if self._source is None or self._closed:
            raise InvariantBroken("only an open transport has a source")
        return self._source

    def offer(self, parts: Sequence[Part]) -> None:
        self._offers.add(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        self._offers.remove(parts)

    def forget(self, source: Source) -> None:
        if not check_source(source):
            self._end(FORGOTTEN, source.token)

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for task in self._served:
            task.cancel()
        if self._served:
            await wait_within(list(self._served), _PATIENCE_S)
        self._end(CLOSED)
        await self._calls.idle()
        self._regions = ()

    def _end(self, outcome: Outcome, token: bytes | None = None) -> None:
        """End our receives, or only those from this source, and wake the calls that wait for its bytes."""
        self._calls.end(outcome, token)
        for call, sock in self._sockets.items():
            if call.over is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # -- the receiver ---------------------------------------------------------------------------------

    async def receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        if self._source is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._source is None or self._closed:
            return [CLOSED] * len(copy_specs)
        problem = check_source(source)
        if not problem and source.machine != self._source.machine:
            problem = "the sender is on another machine: its socket cannot be reached from here"
        if problem:
            return [refused(problem)] * len(copy_specs)
        call = self._calls.start(source.token, deadline)
        try:
            outcomes = await check_copy_specs(source, copy_specs, self._regions)
            if None in outcomes and not call.check():
                await self._copy(call, copy_specs, outcomes)
            return [outcome or call.over or LATE for outcome in outcomes]
        finally:
            self._calls.finish(call)

    async def _copy(self, call: Transfer, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]) -> None:
        """Fill in the outcomes that are still None, until the call is over."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            self._sockets[call] = sock
            try:
                async with Within(call.deadline - call.now()):
                    await _connect(call, sock)
                    turns = Turns()
                    for place, copy_spec in enumerate(copy_specs):
                        if outcomes[place] is None and not call.check():
                            outcomes[place] = await self._take(sock, copy_spec, turns)
            except TimeoutError:
                call.end(LATE)
            except OSError as error:
                call.end(broken(f"the sender cannot be read: {error}"))
            finally:
                del self._sockets[call]

    async def _take(self, sock: socket.socket, copy_spec: CopySpec, turns: Turns) -> Outcome:
        """Copy and check one block. Raises OSError if the sender hangs up."""
        loop = asyncio.get_running_loop()
        for place, (theirs, part) in enumerate(zip(copy_spec.ref_parts, copy_spec.parts, strict=True)):
            whole = xxhash.xxh3_64()
            if part.nbytes:
                await loop.sock_sendall(sock, _REQUEST.pack(theirs.region, theirs.offset, theirs.nbytes))
            for at in range(0, part.nbytes, SLICE_NBYTES):
                nbytes = min(SLICE_NBYTES, part.nbytes - at)
                if await _read(sock, 1) != _HERE:
                    return refused("a part of the sender's is not on offer")
                with self._regions[part.region].view(part.offset + at, nbytes) as ours:
                    await _fill(sock, ours)
                    # over our own copy, while the caches hold it
                    whole.update(ours)
                await turns.spend(nbytes)
            if whole.intdigest() != copy_spec.checksums[place]:
                # no other part of this block was asked for, so the next block can follow
                return damaged(place)
        return DONE

    # -- the sender -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # no descriptors are left just now
            loop.remove_reader(self._listener)
            # bare timer: listen again
            loop.call_later(_AGAIN_S, self._listen)
            return
        sock.setblocking(False)
        task = loop.create_task(self._serve(sock))
        self._served[task] = sock
        # a callback also closes the socket of a task that is cancelled before it began
        task.add_done_callback(lambda task: self._served.pop(task).close())

    async def _serve(self, sock: socket.socket) -> None:
        """Answer one receiver until it hangs up."""
        if not _is_ours(sock):
            return
        turns = Turns()
        # TimeoutError is an OSError too
        with contextlib.suppress(OSError):
            while True:
                async with Within(_PATIENCE_S):
                    request = await _read(sock, _REQUEST.size)
                await self._send(sock, Part(*_REQUEST.unpack(request)), turns)

    async def _send(self, sock: socket.socket, part: Part, turns: Turns) -> None:
        loop = asyncio.get_running_loop()
        for at in range(0, part.nbytes, SLICE_NBYTES):
            answer = _GONE
            if part in self._offers:
                nbytes = min(SLICE_NBYTES, part.nbytes - at)
                with self._regions[part.region].view(part.offset + at, nbytes) as view:
                    # a copy: the socket must not read our memory after a withdrawal
                    answer = b"".join((_HERE, view))
            async with Within(_PATIENCE_S):
                await loop.sock_sendall(sock, answer)
            if answer is _GONE:
                return
            await turns.spend(len(answer))


def _name(token: bytes) -> str:
    """A name in the abstract namespace: it is no file and needs no folder."""
    return f"\0fdasync-blocks-{token.hex()}"


def _is_ours(sock: socket.socket) -> bool:
    """Whether our own user runs the other end: any process can connect to an abstract name, or take it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())


async def _connect(call: Transfer, sock: socket.socket) -> None:
    """Connect to the sender. Raises OSError where no process of our user listens."""
    while not call.check():
        try:
            sock.connect(_name(call.token))
            break
        except BlockingIOError:
            # the sender's queue is full
            await call.wait(call.now() + _AGAIN_S)
    if not _is_ours(sock):
        raise PermissionError("another user's process listens there")


async def _fill(sock: socket.socket, view: memoryview) -> None:
    """Read until the view is full. Raises OSError if the other end hangs up."""
    loop, at = asyncio.get_running_loop(), 0
    while at < len(view):
        with view[at:] as rest:
            count = await loop.sock_recv_into(sock, rest)
        if not count:
            raise ConnectionResetError("it hung up")
        at += count


async def _read(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    with memoryview(data) as view:
        await _fill(sock, view)
    return bytes(data)
