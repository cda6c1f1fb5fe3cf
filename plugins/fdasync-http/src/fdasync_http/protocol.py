"""uvicorn's HTTP protocol with the bounds that it lacks: of connections, of headers, and of half-sent requests.

uvicorn answers 503 at its own limit, where clients need a 429; it waits for ever for headers that do not end, and with
httptools takes headers of any length. The app bounds bodies (`bodies.py`). Knows no paths. Made by uvicorn, as
`server.py` tells it to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fdasync_http.failures import RETRY_AFTER_S, Refused, body_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of connections.

    Attributes:
        max_connections: open at a time; the next one is answered with 429 and closed.
        max_header_nbytes: the first line and all headers of a request.
        header_s: longest from the first byte of a connection, or of its next request, to the end of the headers; a
            connection that sends nothing has as long.
        write_s: longest that a client may read nothing while an answer waits.
    """

    max_connections: int = 16384
    max_header_nbytes: int = 64 << 10
    header_s: float = 20.0
    write_s: float = 120.0


def protocol_with(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn's configuration."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})


class _LimitedProtocol(HttpToolsProtocol):
    """See the module.

    Attributes:
        limits: of every connection.
    """

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_nbytes = 0
        self._in_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            told = f"{self.limits.max_connections} connections are open, the most there may be"
            self._refuse(Refused(429, told, code="overloaded", retry_after_s=RETRY_AFTER_S), "429 Too Many Requests")
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_header_timer()
        self._end_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            # counted before they are parsed, with what comes behind them in this piece: the bound is no exact one
            self._header_nbytes += len(data)
            if self._header_timer is None:
                self._await_headers()
        super().data_received(data)
        if self._in_headers and self._header_nbytes > self.limits.max_header_nbytes and not self.transport.is_closing():
            told = f"the headers are longer than {self.limits.max_header_nbytes} bytes"
            self._refuse(Refused(400, told, code="headers_too_long"), "431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_nbytes = 0
        self._end_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # what comes next is another request's; its time begins with its first byte
        self._in_headers = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._after(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_write_timer()
        super().resume_writing()

    def _await_headers(self) -> None:
        self._header_timer = self._after(self.limits.header_s, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._in_headers and not self.transport.is_closing():
            self._refuse(Refused(408, "the headers did not arrive in time"), "408 Request Timeout")

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _after(self, delay_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        # bare timer: a client is no process of ours
        return self.loop.call_later(delay_s, call)

    def _refuse(self, refused: Refused, status: str) -> None:
        body = body_of(refused)
        retry = f"retry-after: {refused.retry_after_s}\r\n" if refused.retry_after_s else ""
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
