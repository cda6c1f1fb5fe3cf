"""A kept load tool, `guidellm`, at 256 streams: every request ends well, with as many tokens as it asked for."""

from __future__ import annotations

import asyncio
import json

import pytest

pytestmark = pytest.mark.nightly
STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512, 48, 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_256_streams_end_well(front_of, program, run_program, checkpoint, tmp_path, path):
    report = tmp_path / "report.json"
    async with front_of("--max-running", str(STREAMS), step_s=0.02, num_blocks=8192) as front:
        command = [
            program("guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={front.url},model=tiny-moe,request_format={path}",
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={checkpoint}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        async with run_program(*command) as (process, said):
            async with asyncio.timeout(300):
                await process.wait()
            assert process.returncode == 0, said.read_text()
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[name]) for name in ("successful", "errored", "incomplete")] == [REQUESTS, 0, 0], [
        one["info"]["error"] for one in requests["errored"][:3]
    ]
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {OUTPUT_TOKENS}
    metrics = benchmark["metrics"]
    figures = {
        name: round(metrics[name]["successful"]["median"], 1)
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_concurrency")
    }
    print(f"{path}: medians {figures}, {metrics['output_tokens_per_second']['successful']['mean']:.0f} output tokens/s")
