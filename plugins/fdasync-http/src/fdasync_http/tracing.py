"""Spans of requests at the front, and the caller's span on its way to the engines.

A caller names its span in the header `traceparent` (W3C Trace Context). Without a tracer the front hands it on as it
is, and nothing of OpenTelemetry is imported. With one the front makes a span of its own below the caller's, from the
request to the last byte of the answer, and hands that on. A header that is malformed is left out, as the standard says.
Called by `application.py`; `front.py` gives the span to the generator.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fdasync.request import is_trace

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: the span under which this request's engines make theirs; "": none
current: ContextVar[str] = ContextVar("fdasync_http_trace", default="")


def given(scope: Scope) -> str:
    """The caller's `traceparent`; "" where there is none, or a malformed one."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            trace = value.decode("latin-1").strip().lower()
            return trace if is_trace(trace) else ""
    return ""


class Traced:
    """Makes a span around each request to `inner`, and hands it on.

    Args:
        path: of `inner`, with the names of its parameters.
        tracer: makes spans; None: nothing does.
    """

    def __init__(self, inner: ASGIApp, path: str, tracer: Tracer | None) -> None:
        self._inner = inner
        self._path = path
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = given(scope)
        if self._tracer is None:
            if not trace:
                await self._inner(scope, receive, send)
                return
            token = current.set(trace)
            try:
                await self._inner(scope, receive, send)
            finally:
                current.reset(token)
            return
        await self._traced(self._tracer, trace, scope, receive, send)

    async def _traced(self, tracer: Tracer, trace: str, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        from fdasync.telemetry.otel import context_of, traceparent_of

        parent = context_of(trace) if trace else None
        attributes: dict[str, Any] = {"http.request.method": scope["method"], "http.route": self._path}
        name = f"{scope['method']} {self._path}"
        span = tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        token = current.set(traceparent_of(set_span_in_context(span)))
        try:
            await self._inner(scope, receive, seen)
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            current.reset(token)
            span.end()
