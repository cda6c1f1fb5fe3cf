"""Answers scrapes: GET /metrics over HTTP on the loopback, on the engine's loop, without a thread.

Connections at a time, bytes of a request and seconds of a connection are bounded. The server speaks as much HTTP as a
scraper needs and closes after each answer. It listens on the loopback only, because it neither encrypts nor
authenticates. Knows no metrics. Called by `prometheus.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync.ipc.deadlines import Within, wait_within

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MAX_REQUEST_NBYTES = 8192
_MAX_CONNECTIONS = 16
_BACKLOG = 16
_END = b"\r\n\r\n"


class ScrapeServer:
    """Answers scrapes with `content()`, called once for each.

    Args:
        content: returns the body; an error that it raises becomes a 500 with the error's name.
        connection_s: seconds that a client has to send its request and to take the answer.

    Attributes:
        answered: answers so far, by status.
    """

    def __init__(self, content: Callable[[], bytes], *, connection_s: float = 5.0) -> None:
        self.answered: dict[int, int] = {}
        self._content = content
        self._connection_s = connection_s
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError for an address that is not the loopback's."""
        sock = _bound(address, port)
        try:
            self._server = await asyncio.start_server(
                self._connected, sock=sock, limit=_MAX_REQUEST_NBYTES, backlog=_BACKLOG
            )
        except BaseException:
            sock.close()
            raise
        return int(sock.getsockname()[1])

    async def aclose(self) -> None:
        """Stop listening and abort open connections; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        if clients:
            # a cancelled client only aborts its connection
            await wait_within(clients, self._connection_s)
        async with Within(self._connection_s):
            await server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= _MAX_CONNECTIONS or self._server is None:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="fdasync-scrape")
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # a client that is too slow, or gone, is no error of the engine
            with contextlib.suppress(OSError):
                async with Within(self._connection_s):
                    answer = await self._answer(reader)
                    if answer:
                        writer.write(answer)
                        await writer.drain()
                        writer.close()
                        await writer.wait_closed()
        finally:
            # does nothing to a connection that is closed
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """The whole response; b"" for a client that left."""
        try:
            head = await reader.readuntil(_END)
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError:
            return self._response(431, "Request Header Fields Too Large")
        line = head.split(b"\r\n", 1)[0].split(b" ")
        if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
            return self._response(400, "Bad Request")
        method, target = line[0], line[1].split(b"?", 1)[0]
        if target != PATH.encode():
            return self._response(404, "Not Found")
        if method not in (b"GET", b"HEAD"):
            return self._response(405, "Method Not Allowed", extra="Allow: GET, HEAD\r\n")
        try:
            body = self._content()
        except Exception as error:
            return self._response(500, f"Internal Server Error: {type(error).__name__}")
        return self._response(200, "OK", body, CONTENT_TYPE, head_only=method == b"HEAD")

    def _response(
        self,
        status: int,
        reason: str,
        body: bytes | None = None,
        kind: str = "text/plain; charset=utf-8",
        extra: str = "",
        *,
        head_only: bool = False,
    ) -> bytes:
        self.answered[status] = self.answered.get(status, 0) + 1
        body = f"{status} {reason}\n".encode() if body is None else body
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{extra}Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if head_only else body)


def _bound(address: str, port: int) -> socket.socket:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError("address", f"{address!r} is not an IP address", hint="127.0.0.1 or ::1") from None
    if not parsed.is_loopback:
        raise ConfigError(
            "address", f"{address} is not the loopback", hint="metrics are served on 127.0.0.1 or ::1 only"
        )
    if not 0 <= port < 1 << 16:
        raise ConfigError("port", f"{port!r} is no port", limit="0 to 65535")
    sock = socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise ConfigError("port", f"cannot listen on {address}:{port}: {error.strerror or error}") from None
    return sock
