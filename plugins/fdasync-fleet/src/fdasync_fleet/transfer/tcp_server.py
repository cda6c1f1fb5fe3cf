"""The sender's side of `tcp.py`: listens on loopback and replies to requests for parts that are on offer.

Bytes go from the regions into the kernel, at most a turn's bytes in one callback, so that receivers take turns. Only
parts that are on offer at that moment are read. A connection that does not greet, sends half a request or does not take
its bytes is dropped at a deadline. Every process of the machine can connect: *strangers*, which have not greeted with
the token yet, have few places and little time, and take no place of others. Knows no copies and no transfers. Made by
`tcp.py`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import ProtocolError
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync_fleet.transfer.base import TURN_NBYTES
from fdasync_fleet.transfer.tcp_tls import AGAIN, shake
from fdasync_fleet.transfer.tcp_wire import (
    KNOCK_NBYTES,
    MAX_REQUESTS,
    NONCE_NBYTES,
    NOT_OFFERED,
    OK,
    PROOF_NBYTES,
    REQUEST_NBYTES,
    Request,
    answer,
    check_knock,
    pack_reply,
    proof,
    read_requests,
    socket_name,
)

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync_fleet.transfer.tcp_tls import ServerTls
    from fdasync_fleet.transfer.validation import Offers

#: most connections that have greeted
MAX_CONNECTIONS = 64
#: most connections that have not greeted yet; the oldest makes room for a new one
MAX_STRANGERS = 64
_GREET_S = 1.0
_BACKLOG = 64
_ACCEPTS_PER_TURN = 8
# replaces bytes of a run that was withdrawn in the middle of its reply; the receiver's checksum will be wrong
_FILL = bytes(64 << 10)


class Server:
    """All connections of receivers that read from us.

    Attributes:
        loop, token, regions, offers, stuck_s, tls: the arguments; its connections read them.
        port: that it listens on.
        drops: number of connections that were dropped, by reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        token: bytes,
        regions: Sequence[SharedRegion],
        offers: Offers,
        stuck_s: float,
        tls: ServerTls | None = None,
        port: int = 0,
    ) -> None:
        """Listens from now on; `host` is a number, port 0 any free one. Raises OSError."""
        self.loop = loop
        self.token = token
        self.regions = regions
        self.offers = offers
        self.stuck_s = stuck_s
        self.tls = tls
        self.drops = {"full": 0, "protocol": 0, "stranger": 0, "stuck": 0}
        self._connections: dict[ServerConnection, None] = {}
        # the time by which each must greet, in the order in which they came
        self._strangers: dict[ServerConnection, float] = {}
        self._timer: DeadlineTimer | None = None
        self._paused = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            if port:
                # connections of a process that is gone do not matter
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(_BACKLOG)
            self.port: int = self._sock.getsockname()[1]
            loop.add_reader(self._sock.fileno(), self._accept)
        except BaseException:
            self._sock.close()
            raise

    def address_at(self, host: str) -> str:
        """What receivers dial where they reach us at this host."""
        address = socket_name(host, self.port)
        return address if self.tls is None else f"tls:{address}"

    def __len__(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # no fd is left: to accept again at once would keep the loop busy, so `sweep` does
                self.loop.remove_reader(self._sock.fileno())
                self._paused = True
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self.drop(next(iter(self._strangers)), "stranger")
            connection = ServerConnection(self, sock)
            self._connections[connection] = None
            self._strangers[connection] = self.loop.time() + _GREET_S
            if self._timer is None:
                self._time_strangers()

    def _time_strangers(self) -> None:
        """Set the timer to the first stranger's deadline. A loop that was blocked reads its sockets first."""
        self._timer = DeadlineTimer(self.loop, next(iter(self._strangers.values())), self._drop_strangers)

    def _drop_strangers(self) -> None:
        """Drop strangers whose time is over."""
        self._timer = None
        now = self.loop.time()
        for connection in [each for each, until in self._strangers.items() if until <= now]:
            self.drop(connection, "stranger")
        if self._strangers:
            self._time_strangers()

    def knocked(self, connection: ServerConnection) -> None:
        """A connection was answered: its proof has as much time again, since this loop may have been blocked."""
        del self._strangers[connection]
        self._strangers[connection] = self.loop.time() + _GREET_S

    def greeted(self, connection: ServerConnection) -> bool:
        """A connection has shown that it knows the token. False: there are too many such, and it was dropped."""
        del self._strangers[connection]
        if len(self._connections) - len(self._strangers) <= MAX_CONNECTIONS:
            return True
        self.drop(connection, "full")
        return False

    def drop(self, connection: ServerConnection, why: str = "") -> None:
        """End a connection; count it under `why` unless it ended in order."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._strangers.pop(connection, None)
        connection.close()
        if why:
            self.drops[why] += 1

    def sweep(self, now: float) -> None:
        """Drop connections that are stuck, accept again; called by a timer."""
        if self._paused and self._sock.fileno() >= 0:
            self._paused = False
            self.loop.add_reader(self._sock.fileno(), self._accept)
        for connection in [each for each in self._connections if each.stuck(now)]:
            self.drop(connection, "stuck")

    def close(self) -> None:
        """Stop listening, drop all connections; idempotent."""
        if self._sock.fileno() >= 0:
            self.loop.remove_reader(self._sock.fileno())
            self._sock.close()
        for connection in list(self._connections):
            self.drop(connection)
        if self._timer is not None:
            self._timer.cancel()


class ServerConnection:
    """The connection of one receiver. Owns its socket."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fd = sock.fileno()
        self._greeted = False
        # above the socket, from the answer on; its handshake has not ended
        self._shaking: ssl.SSLSocket | None = None
        # the proof that is awaited; b"": no knock came
        self._proof = b""
        self._unread = bytearray()
        # requests whose replies are not sent whole; of the first reply the unsent rest of its head, and the number of
        # its bytes that were sent
        self._replies: deque[Request] = deque()
        self._head = b""
        self._sent = -1
        self._moved_at = server.loop.time()
        self._reading = self._writing = False
        self._watch()

    def stuck(self, now: float) -> bool:
        """Whether it has owed a greeting or a request's rest, or has not taken its bytes, for too long."""
        waits = bool(self._replies or self._unread or not self._greeted)
        return waits and now - self._moved_at > self._server.stuck_s

    def close(self) -> None:
        """Close the connection; called by `Server.drop`."""
        loop = self._server.loop
        loop.remove_reader(self._fd)
        loop.remove_writer(self._fd)
        self._sock.close()
        self._replies.clear()

    def _watch(self) -> None:
        """Read while few replies wait, write while any does."""
        reading, writing = len(self._replies) < MAX_REQUESTS, bool(self._replies)
        loop = self._server.loop
        if reading != self._reading:
            self._reading = reading
            loop.add_reader(self._fd, self._read) if reading else loop.remove_reader(self._fd)
        if writing != self._writing:
            self._writing = writing
            loop.add_writer(self._fd, self._write) if writing else loop.remove_writer(self._fd)

    def _read(self) -> None:
        room = KNOCK_NBYTES + MAX_REQUESTS * REQUEST_NBYTES - len(self._unread)
        if self._shaking is not None:
            self._shake(self._shaking)
            return
        try:
            data = self._sock.recv(room)
        except AGAIN:
            return
        except OSError:
            data = b""
        if not data:
            self._server.drop(self)
            return
        self._unread += data
        self._moved_at = self._server.loop.time()
        self._take()

    def _take(self) -> None:
        """Take requests out of the bytes read."""
        try:
            if not self._proof and len(self._unread) >= KNOCK_NBYTES:
                self._answer()
            if not self._greeted:
                if not self._proof or len(self._unread) < PROOF_NBYTES:
                    return
                if not hmac.compare_digest(bytes(self._unread[:PROOF_NBYTES]), self._proof):
                    raise ProtocolError("the process that dialled repeats what another one said")
                del self._unread[:PROOF_NBYTES]
                self._greeted = True
                if not self._server.greeted(self):
                    return
            self._replies.extend(read_requests(self._unread, MAX_REQUESTS - len(self._replies)))
        except ProtocolError:
            self._server.drop(self, "protocol")
            return
        self._watch()

    def _answer(self) -> None:
        """Answer a knock. Raises ProtocolError if it does not know the token."""
        token = self._server.token
        tls = self._server.tls
        theirs = check_knock(bytes(self._unread[:KNOCK_NBYTES]), token, tls=tls is not None)
        del self._unread[:KNOCK_NBYTES]
        nonce = os.urandom(NONCE_NBYTES)
        digest = b"" if tls is None else tls.digest
        self._proof = proof(token, theirs, nonce)
        words = answer(token, theirs, nonce, digest)
        try:
            whole = self._sock.send(words) == len(words)
        except OSError:
            whole = False
        if not whole:
            # a new connection has room for so few bytes
            raise ProtocolError("the process that dialled went away")
        if tls is not None:
            if self._unread:
                raise ProtocolError("the process that dialled did not wait for the answer")
            try:
                self._sock = self._shaking = tls.wrap(self._sock)
            except OSError:
                raise ProtocolError("the process that dialled went away") from None
        self._server.knocked(self)

    def _shake(self, sock: ssl.SSLSocket) -> None:
        """Go on with the handshake."""
        try:
            is_done = shake(sock)
        except OSError:
            self._server.drop(self, "protocol")
            return
        self._moved_at = self._server.loop.time()
        if is_done:
            self._shaking = None
            # TLS may have read what came behind the handshake with it
            self._read()

    def _write(self) -> None:
        """Send bytes of the first reply: one call of the kernel, at most a turn's bytes."""
        if self._sent < 0:
            self._begin()
        request = self._replies[0]
        pieces: list[bytes | memoryview] = [self._head] if self._head else []
        if self._sent < request.length:
            # with TLS a call that had no room is made again with as many bytes, whatever is on offer then
            nbytes = min(request.length - self._sent, TURN_NBYTES if self._server.tls is None else len(_FILL))
            if request.part in self._server.offers:
                offset = request.part.offset + request.start + self._sent
                pieces.append(self._server.regions[request.part.region].view(offset, nbytes))
            else:
                pieces.append(memoryview(_FILL)[:nbytes])
        try:
            sent = self._sock.sendmsg(pieces) if self._server.tls is None else self._sock.send(pieces[0])
        except AGAIN:
            return
        except OSError:
            self._server.drop(self)
            return
        finally:
            # the regions may be unmapped once this connection is gone
            for piece in pieces:
                if isinstance(piece, memoryview):
                    piece.release()
        self._moved_at = self._server.loop.time()
        of_head = min(sent, len(self._head))
        self._head = self._head[of_head:]
        self._sent += sent - of_head
        if not self._head and self._sent == request.length:
            self._replies.popleft()
            self._sent = -1
            # requests that were read and had no place may have one now
            if len(self._unread) >= REQUEST_NBYTES:
                self._take()
            else:
                self._watch()

    def _begin(self) -> None:
        """Begin the first reply: its verdict depends on the offers now."""
        request = self._replies[0]
        self._sent = 0
        if request.part in self._server.offers:
            self._head = pack_reply(request.number, OK, request.length)
        else:
            self._head = pack_reply(request.number, NOT_OFFERED, 0)
            self._sent = request.length
