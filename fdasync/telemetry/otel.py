"""OpenTelemetry spans of requests: one for each engine that a request crosses, under the caller's span.

A caller names its span by `trace` (W3C's `traceparent`), or in the header of a request to the HTTP front. A prefill and
a decode instance each make a span of their part. The tap makes spans when requests end, of the times that their events
tell: a request that nobody traces costs nothing but a look, and an engine without this tap imports nothing.

    from opentelemetry.sdk.trace import TracerProvider
    engine = Engine(config)                       # with taps={"otel": {}}: the program's own tracer provider
    [taps.otel]                                   # of a command's configuration file: spans as JSON lines
    path = "/var/log/spans.jsonl"

Needs `fdasync[otel]`. An engine's process has no threads, so batches of an exporter's thread are for programs that
embed engines; a command's instance writes lines, without waiting, which a collector reads. Called by
`engine/runtime.py` as any tap (entry point `otel`), and by the HTTP front for the names of spans.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fdasync.errors import ConfigError
from fdasync.events.catalog import Event, RequestEnded
from fdasync.events.tap import Tap
from fdasync.telemetry.line_writer import LineWriter

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from fdasync.events.bus import Subscription

_MAX_WAITING_NBYTES = 1 << 20
_CLOSE_S = 1.0
_NEEDS = "pip install 'opentelemetry-sdk>=1.40'"


class OtelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the tap.

    Attributes:
        path: file that spans are appended to, one line of the SDK's JSON for each; "": spans go to the program's own
            tracer provider.
        name: of the engine, in its spans.
    """

    path: str = ""
    name: str = ""


class OtelTap(Tap):
    """See the module. Raises ConfigError without OpenTelemetry, or for a path that cannot be written."""

    config_type: ClassVar[type[msgspec.Struct]] = OtelConfig
    kinds: ClassVar[tuple[type[Event], ...]] = (RequestEnded,)
    limit: ClassVar[int] = 4096

    def __init__(self, config: OtelConfig) -> None:
        super().__init__(config)
        self._name = config.name
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError("taps.otel", "OpenTelemetry is not installed", hint=_NEEDS) from None
        self._trace = trace
        self._file = SpanLines(config.path, config.name) if config.path else None

    async def run(self, events: Subscription) -> None:
        """Make a span of each request that is traced. Raises ConfigError for a path that cannot be opened."""
        if self._file is None:
            await self._read(events, self._trace.get_tracer("fdasync"))
            return
        async with self._file as tracer:
            await self._read(events, tracer)

    async def _read(self, events: Subscription, tracer: Tracer) -> None:
        loop = asyncio.get_running_loop()
        async for event in events:
            assert isinstance(event, RequestEnded)
            if event.trace and is_sampled(event.trace):
                now_ns = time.time_ns() - round((loop.time() - event.at) * 1e9)
                self._tell(event, tracer, now_ns)

    def _tell(self, event: RequestEnded, tracer: Tracer, ended_ns: int) -> None:
        trace = self._trace
        began_ns = ended_ns - round(event.total_s * 1e9)
        reasons = ["error" if event.error else reason for reason in event.reasons]
        attributes: dict[str, Any] = {
            "gen_ai.request.id": event.request_id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.output_tokens": event.output_tokens,
            "fdasync.part": event.part,
            "fdasync.hit_tokens.device": event.cached[0],
            "fdasync.hit_tokens.host": event.cached[1],
            "fdasync.hit_tokens.store": event.cached[2],
        }
        if self._name:
            attributes["fdasync.engine"] = self._name
        span = tracer.start_span(
            f"fdasync {event.part}",
            context_of(event.trace),
            kind=trace.SpanKind.SERVER,
            start_time=began_ns,
            attributes=attributes,
        )
        if event.ttft_s is not None:
            span.add_event("first token", timestamp=began_ns + round(event.ttft_s * 1e9))
        if event.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, event.error))
        span.end(ended_ns)


def is_sampled(traceparent: str) -> bool:
    """Whether the caller's own span is recorded."""
    return bool(int(traceparent[-2:], 16) & 1)


def context_of(traceparent: str) -> Context:
    """The caller's span as a parent. Needs OpenTelemetry."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def traceparent_of(context: Context) -> str:
    """The span of a context, for `trace`; "" where there is none. Needs OpenTelemetry."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent", "")


class SpanLines:
    """A file that spans are appended to as they end, one line of the SDK's JSON each: `async with` gives the tracer.

    No thread, and nothing waits for the file. Made before there is a loop, since the SDK's imports take a while.

    Args:
        path: of the file.
        name: of the service, in each span.

    Raises ConfigError without OpenTelemetry's SDK; entering it, for a path that cannot be opened.
    """

    def __init__(self, path: str, name: str = "") -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
        except ImportError:
            raise ConfigError("traces", "OpenTelemetry's SDK is not installed", hint=_NEEDS) from None

        def line(span: ReadableSpan) -> str:
            told: str = span.to_json(indent=None)
            return told + "\n"

        self._path = path
        self._writer: LineWriter | None = None
        # named in full: the SDK would look for the rest in threads
        provider = TracerProvider(resource=Resource({"service.name": name or "fdasync"}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=_Lines(self), formatter=line)))
        self._tracer: Tracer = provider.get_tracer("fdasync")

    async def __aenter__(self) -> Tracer:
        self._writer = LineWriter(self._path, _MAX_WAITING_NBYTES, lambda _count, _why: b"")
        return self._tracer

    async def __aexit__(self, *_: object) -> None:
        """Write what waits, for a second at most."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.aclose(_CLOSE_S)

    def offer(self, text: str) -> None:
        """Write a line; a line that comes after the end is lost."""
        if self._writer is not None:
            self._writer.offer(text.encode())


class _Lines:
    """`SpanLines` as the file that an exporter writes to."""

    def __init__(self, lines: SpanLines) -> None:
        self._lines = lines

    def write(self, text: str) -> None:
        self._lines.offer(text)

    def flush(self) -> None:
        """Lines go out by themselves."""
