"""Spans of requests, read from the SDK's own exporter."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import BadInput, EngineFailed
from fdasync.events.catalog import RequestEnded
from fdasync.telemetry.otel import OtelConfig, OtelTap
from fdasync.testing import held_engine, synthetic_engine, until

pytest.importorskip("opentelemetry.sdk", reason="fdasync[otel] is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID = 0x00F067AA0BA902B7
CALLER = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
PROMPT = list(range(20))


class Spans:
    """A provider whose spans go to the SDK's exporter in memory."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def ended(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """The program's own provider."""
    from opentelemetry import trace

    made = Spans()
    monkeypatch.setattr(trace, "get_tracer", made.provider.get_tracer)
    return made


def tapped(engine: Engine, **config: Any) -> asyncio.Task[None]:
    """The tap beside a running engine."""
    return asyncio.ensure_future(OtelTap(OtelConfig(**config)).run(engine.bus.subscribe(RequestEnded)))


async def test_a_request_is_a_span_under_the_callers(spans: Spans) -> None:
    async with synthetic_engine() as engine:
        tap = tapped(engine, name="e0")
        async with engine.generate(PROMPT, SamplingParams(max_tokens=5), request_id="mine", trace=CALLER) as stream:
            async for _ in stream:
                pass
        result = stream.result
        await engine.complete(PROMPT, SamplingParams(max_tokens=2))
        not_recorded = CALLER[:-2] + "00"
        await engine.complete(PROMPT, SamplingParams(max_tokens=2), trace=not_recorded)
        await until(lambda: len(spans.ended) == 1)
    await tap
    (span,) = spans.ended
    assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (TRACE_ID, SPAN_ID, True)
    assert span.name == "fdasync whole"
    told = dict(span.attributes)
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (20, 5)
    assert told["fdasync.engine"] == "e0"
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(result.total_s, abs=1e-6)
    (first,) = span.events
    assert (first.timestamp - span.start_time) / 1e9 == pytest.approx(result.ttft_s, abs=1e-6)
    assert threading.active_count() == 1


async def test_a_request_that_failed_says_so(spans: Spans) -> None:
    engine, faults = held_engine()
    async with engine:
        tap = tapped(engine)
        faults.hold()
        call = asyncio.ensure_future(engine.complete(PROMPT, SamplingParams(max_tokens=5), trace=CALLER))
        await until(lambda: engine.stats().steps_in_flight > 0)
        engine.fail(OSError("the end"))
        faults.release()
        with pytest.raises(EngineFailed):
            await call
    await tap
    (span,) = spans.ended
    assert not span.status.is_ok
    assert span.status.description == "OSError"


def test_a_commands_engine_writes_lines(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    # made before there is a loop, as a command's is
    tap = OtelTap(OtelConfig(path=str(path), name="e0"))

    async def play() -> None:
        async with synthetic_engine() as engine:
            running = asyncio.ensure_future(tap.run(engine.bus.subscribe(RequestEnded)))
            for _ in range(3):
                await engine.complete(PROMPT, SamplingParams(max_tokens=2), trace=CALLER)
            assert threading.active_count() == 1
        await running

    asyncio.run(play())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["fdasync whole"] * 3
    assert {line["context"]["trace_id"] for line in lines} == {f"0x{TRACE_ID:032x}"}
    assert len({line["context"]["span_id"] for line in lines}) == 3
    assert lines[0]["resource"]["attributes"] == {"service.name": "e0"}


@pytest.mark.parametrize("trace", [
    "x", CALLER + "0", CALLER.upper(), "01" + CALLER[2:], f"00-{0:032x}-{SPAN_ID:016x}-01",
    f"00-{TRACE_ID:032x}-{0:016x}-01", 7, None,
])  # fmt: skip
async def test_what_is_no_traceparent_is_refused(trace: Any) -> None:
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput) as refused:
            await engine.complete(PROMPT, SamplingParams(max_tokens=2), trace=trace)
    assert refused.value.field == "trace"


@pytest.mark.ci
def test_an_engine_without_the_tap_imports_nothing_of_it() -> None:
    program = """
import asyncio, sys
from fdasync import SamplingParams
from fdasync.testing import synthetic_engine

async def main():
    async with synthetic_engine() as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=2), trace=sys.argv[1])

asyncio.run(main())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    done = subprocess.run([sys.executable, "-c", program, CALLER], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
