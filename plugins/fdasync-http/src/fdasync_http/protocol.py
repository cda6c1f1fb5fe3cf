"""uvicorn's HTTP protocol with the bounds that it lacks: of connections, of headers, and of half-sent requests.

uvicorn answers 503 at its own limit, where clients need a 429. It waits for ever for headers that do not end, and for
the rest of a body whose request was answered already; with httptools it takes headers and trailers of any length, any
number of requests behind the current one, requests for no host or for two, and bodies with other codings than chunks. A
request that offers an upgrade (Java's client offers HTTP/2 with each first one) loses its body there. The app bounds
bodies (`bodies.py`). Knows no paths. Made by uvicorn, as `server.py` tells it to.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fdasync_http.config import ConnectionLimits
from fdasync_http.failures import RETRY_AFTER_S, Refused, body_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


# a name or an address, with or without a port; or nothing
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")
_OF_UPGRADE = (b"connection", b"upgrade", b"http2-settings")
# chunks of one byte have six bytes for each
_FRAME_NBYTES = 8
# how long bytes of a refused client are dropped, and of how many clients above the limit: a connection that is closed
# over unread bytes is reset, and the answer is lost
_LINGER_S = 1.0
_MAX_LINGERING = 1024


class _Unwanted(ValueError):
    """Ends the parsing of a piece; its words are for the client."""


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
        # of the request that arrives: bytes behind its headers, and how many of these are body
        self._behind_nbytes = self._body_nbytes = 0
        self._running: RequestResponseCycle | None = None
        self._is_refused = False
        self._rest_timer: asyncio.TimerHandle | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            told = f"{self.limits.max_connections} connections are open, the most there may be"
            self._refuse(Refused(429, told, code="overloaded", retry_after_s=RETRY_AFTER_S), "429 Too Many Requests")
            return
        self._await_headers()

    def shutdown(self) -> None:
        """The server ends. Nothing has begun of a request that is half sent, and the rest of it may never come."""
        if self._is_answering() and self._running is self.cycle and self.cycle.more_body:
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_header_timer()
        self._end_write_timer()
        self._end_rest_timer()
        self.pipeline.clear()
        # uvicorn tells the latest request alone, and another one may be under way
        self._end_running()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over():
            return
        if self._in_headers:
            # counted before they are parsed, with all that follows them in this piece: the bound is no exact one
            self._header_nbytes += len(data)
            if self._header_timer is None:
                self._await_headers()
        else:
            self._behind_nbytes += len(data)
        self._feed(data)
        if self._is_over():
            return
        limit = self.limits.max_header_nbytes
        if self._in_headers and self._header_nbytes > limit:
            told = f"the headers are longer than {limit} bytes"
            self._refuse(Refused(400, told, code="headers_too_long"), "431 Request Header Fields Too Large")
        elif self._behind_nbytes > limit + (1 + _FRAME_NBYTES) * self._body_nbytes:
            told = f"the body has more than {limit} bytes of trailers and chunk extensions"
            self._refuse(Refused(400, told, code="headers_too_long"), "431 Request Header Fields Too Large")

    def _is_over(self) -> bool:
        return self._is_refused or self.transport.is_closing()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # no upgrade is taken: the same request once more, without the offer
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            # as uvicorn sets it: bytes behind a last request are no error
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(head + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            why = error.__context__
            self.send_400_response(str(why) if isinstance(why, _Unwanted) else "this is no HTTP request")

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in _OF_UPGRADE]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, msg, code="bad_http"), "400 Bad Request")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self.limits.max_pipelined:
            # ends the parsing of this piece, which may hold thousands more
            raise _Unwanted(f"more than {self.limits.max_pipelined} requests wait behind another")
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_nbytes = self._behind_nbytes = self._body_nbytes = 0
        self._end_header_timer()
        if not self.parser.should_upgrade():
            self._check_framing()
            super().on_headers_complete()
        elif self.parser.get_method() == b"CONNECT":
            raise _Unwanted("this is no proxy")

    def _check_framing(self) -> None:
        """Raise for a request whose host or end a proxy before this server could read otherwise (RFC 9112, 3.2 and
        6.1)."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise _Unwanted(f"one host header is needed, and there are {len(hosts)}")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise _Unwanted("the host header names no host")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (version != "1.1" or [value.strip().lower() for value in codings] != [b"chunked"]):
            raise _Unwanted("a body comes as it is, or in chunks: transfer-encoding is chunked, and nothing else")

    def on_body(self, body: bytes) -> None:
        self._body_nbytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            # its body, if it has one, is not read yet
            return
        super().on_message_complete()
        # the next bytes are another request's; its time begins with the first of them
        self._in_headers = True
        self._behind_nbytes = self._body_nbytes = 0
        self._end_rest_timer()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # the bytes of this body ended the time that an idle connection has
            self.timeout_keep_alive_task = self._after(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._in_headers and not self.transport.is_closing():
            # the client still sends the body, which nothing reads; an answer is lost where it is cut off at once
            self._rest_timer = self._after(self.limits.header_s, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _end_running(self) -> None:
        """The request under way finds its client gone."""
        if self._is_answering() and self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

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
        if self._is_answering():
            # a stray byte behind a request does not end its answer; another request waits for that anyway
            self._await_headers()
        elif self._in_headers and not self._is_over():
            self._refuse(Refused(408, "the headers did not arrive in time"), "408 Request Timeout")

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _end_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _after(self, delay_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        # bare timer: a client is no process of ours
        return self.loop.call_later(delay_s, call)

    def _refuse(self, refused: Refused, status: str) -> None:
        if self._is_answering() and self._running is not None and self._running.response_started:
            # no answer within another
            self.transport.close()
            return
        self._end_running()
        body = body_of(refused)
        retry = f"retry-after: {refused.retry_after_s}\r\n" if refused.retry_after_s else ""
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._is_refused = True
        self._end_header_timer()
        self._unset_keepalive_if_required()
        if len(self.connections) > self.limits.max_connections + _MAX_LINGERING:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._rest_timer = self._after(_LINGER_S, self.transport.close)
