"""Spans at the front, and callers' spans on their way to engines."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import httpx2
import pytest
from fdasync_http import app

from fdasync.events.catalog import RequestEnded
from fdasync.testing import until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
CALLER = f"00-{TRACE_ID}-{SPAN_ID}-01"
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/rollout": {"token_ids": [1, 2, 3], "sampling": {"max_tokens": 2}},
}


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(("headers", "trace"), [
    ({}, ""),
    ({"traceparent": CALLER}, CALLER),
    ({"traceparent": CALLER.upper()}, CALLER),
    # what is malformed is left out, and refuses nothing
    ({"traceparent": "00-0-0-0"}, ""),
    ({"traceparent": "ff" + CALLER[2:]}, ""),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_the_callers_span_reaches_the_engine(scene_of, headers: dict[str, str], trace: str, stream: bool):
    async with scene_of() as scene:
        with closing(scene.generator.bus.subscribe(RequestEnded)) as ends:
            for path, body in BODIES.items():
                own = {**body, "stream": True} if stream and path != "/v1/rollout" else body
                assert (await scene.client.post(path, json=own, headers=headers)).status_code == 200
            await until(lambda: ends.pending == len(BODIES))
            assert [(await anext(ends)).trace for _ in BODIES] == [trace] * len(BODIES)


async def test_with_a_tracer_the_front_has_a_span_between_the_callers_and_the_engines(scene_of):
    pytest.importorskip("opentelemetry.sdk", reason="fdasync[otel] is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with scene_of() as scene:
        transport = httpx2.ASGITransport(app=app(scene.generator, tracer=provider.get_tracer("test")))
        with closing(scene.generator.bus.subscribe(RequestEnded)) as ends:
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {"traceparent": CALLER}
                assert (await client.post("/generate", json=BODIES["/generate"], headers=headers)).status_code == 200
                assert (await client.post("/generate", json={"input_ids": [-1]}, headers=headers)).status_code == 400
                assert (await client.post("/generate", json=BODIES["/generate"])).status_code == 200
            await until(lambda: ends.pending == 2)
            first, alone = [(await anext(ends)).trace for _ in range(2)]
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /generate"] * 3
    assert [span.attributes["http.response.status_code"] for span in spans] == [200, 400, 200]
    assert [f"{span.context.trace_id:032x}" == TRACE_ID for span in spans] == [True, True, False]
    assert f"{spans[0].parent.span_id:016x}" == SPAN_ID
    # the engine's span is under the front's
    assert first == f"00-{TRACE_ID}-{spans[0].context.span_id:016x}-01"
    # the flags of a trace that begins here also say that its number is random
    assert alone[:-2] == f"00-{spans[2].context.trace_id:032x}-{spans[2].context.span_id:016x}-"
    assert spans[2].parent is None
