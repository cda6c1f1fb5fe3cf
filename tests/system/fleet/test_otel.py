"""Each instance of a request makes a span."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import BadInput
from fdasync.testing import synthetic_config, until

if TYPE_CHECKING:
    from pathlib import Path
from tests.telemetry.test_otel import CALLER, PROMPT, SPAN_ID, TRACE_ID, Spans, spans, tapped

__all__ = ["spans"]


def instance(role: Literal["prefill", "decode"], path: Path) -> Instance:
    config = synthetic_config(role=role, host_blocks=64, leases=LEASES)
    return Instance(config, listen=f"ipc://{path}", links=LINKS, transport="shm", transfer_process=False)


async def test_prefill_and_decode_each_make_a_span_under_the_callers(spans: Spans, tmp_path: Path) -> None:
    async with (
        instance("prefill", tmp_path / "p") as prefill,
        instance("decode", tmp_path / "d") as decode,
        fdasync.connect([f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/d"], links=LINKS) as router,
    ):
        taps = [tapped(one.engine, name=name) for name, one in (("p", prefill), ("d", decode))]
        async with router.generate(PROMPT, SamplingParams(max_tokens=5), trace=CALLER) as stream:
            async for _ in stream:
                pass
        await until(lambda: len(spans.ended) == 2)
        # on a router it is checked before anything is sent
        with pytest.raises(BadInput) as refused:
            await router.complete(PROMPT, trace="00-xyz")
    await asyncio.gather(*taps)
    assert refused.value.field == "trace"
    by_part = {span.attributes["fdasync.part"]: span for span in spans.ended}
    assert by_part.keys() == {"prefill", "decode"}
    assert {part: span.attributes["fdasync.engine"] for part, span in by_part.items()} == {
        "prefill": "p",
        "decode": "d",
    }
    assert all(span.parent.span_id == SPAN_ID and span.context.trace_id == TRACE_ID for span in by_part.values())
    assert by_part["prefill"].attributes["gen_ai.response.finish_reasons"] == ("handed_over",)
    assert by_part["decode"].attributes["gen_ai.usage.output_tokens"] == 5
