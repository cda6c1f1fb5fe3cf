"""`GET /v1/sight`, `GET /` and vLLM's names at `GET /metrics`."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx2
import msgspec
import pytest
from fdasync_http import app
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from fdasync import SamplingParams
from fdasync.errors import EngineFailed
from fdasync.telemetry.sight.summary import Summary

KEY = "sk-0123456789abcdef"
PROMPT = list(range(12))


async def generate(scene, count: int = 2) -> None:
    for _ in range(count):
        async with scene.generator.generate(PROMPT, SamplingParams(max_tokens=5)) as stream:
            async for _ in stream:
                pass


async def test_it_tells_of_every_engine_and_expert(scene):
    await generate(scene)
    response = await scene.client.get("/v1/sight")
    assert response.status_code == 200
    told = msgspec.json.decode(response.content, type=Summary)
    assert {one.state for one in told.engines} == {"running"}
    assert sum(one.stats.tokens for one in told.engines if one.role != "prefill") == 10
    (experts,) = told.experts
    facts = scene.generator.facts()
    assert (experts.layers, experts.num_experts) == (facts.moe_layer_ids, facts.num_experts)
    # the second request found two blocks of the first; the last token of each is sampled, and not computed
    assert experts.rows == experts.counted == 2 * (12 + 4) - 8
    assert [sum(row) for row in experts.table] == [experts.rows * facts.top_k] * len(facts.moe_layer_ids)
    less = (await scene.client.get("/v1/sight?experts=false&history=0&window_s=5")).json()
    assert (less["experts"], less["history"]) == ([], [])


@pytest.mark.parametrize(("query", "field"), [
    ("window_s=4", "window_s"), ("window_s=601", "window_s"), ("window_s=nan", "window_s"), ("window_s=x", "window_s"),
    ("history=maybe", "history"), ("experts=", "experts"),
])  # fmt: skip
async def test_a_query_that_means_nothing_is_refused_by_its_name(scene_of, query: str, field: str):
    async with scene_of() as scene:
        response = await scene.client.get(f"/v1/sight?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_the_page_needs_no_key_and_what_it_shows_does(scene_of):
    async with scene_of(api_key=KEY) as scene:
        page = await scene.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert (await scene.client.post("/")).status_code == 405
        assert (await scene.client.get("/index.html")).status_code == 401
        assert (await scene.client.get("/v1/sight")).status_code == 401
        keyed = await scene.client.get("/v1/sight", headers={"authorization": f"Bearer {KEY}"})
        assert keyed.status_code == 200
        # nothing of the model or of the server is in it
        assert keyed.json()["model"] not in page.text
    async with scene_of() as scene:
        cross = {"sec-fetch-site": "cross-site"}
        assert (await scene.client.get("/v1/sight", headers=cross)).status_code == 403


async def test_the_page_is_one_file_whose_policy_lets_it_run_its_own_script_alone(scene_of):
    async with scene_of() as scene:
        page = await scene.client.get("/")
    text = page.text
    policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (own,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    # the one name of another host is that of a namespace, which nothing asks for
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""\s(?:src|href|on\w+|style)\s*=\s*["']""", text), "loads, or runs, something inline"
    assert "innerHTML" not in text


async def test_it_works_where_the_app_is_mounted(scene_of):
    async with scene_of() as scene:
        service = Starlette(routes=[Mount("/llm", app(scene.generator))])
        transport = httpx2.ASGITransport(app=service)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/llm/")).text == (await scene.client.get("/")).text
            assert (await client.get("/llm/v1/sight")).status_code == 200


async def test_metrics_have_vllms_names(scene):
    await generate(scene)
    text = (await scene.client.get("/metrics")).text
    values: dict[str, float] = {}
    model = scene.generator.facts().model
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] in (model, "synthetic")
                assert sample.labels["engine"]
            name = sample.name + "".join(
                f",{sample.labels[at]}" for at in ("le", "finished_reason") if at in sample.labels
            )
            values[name] = values.get(name, 0.0) + sample.value
    tokens = sum(one.sight.stats.tokens for one in await scene.generator.watch())
    assert values["vllm:generation_tokens_total"] == tokens
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:request_success_total,length"] == 2
    assert values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:e2e_request_latency_seconds_bucket,+Inf"] == 2
    assert 0 < values["vllm:prefix_cache_hits_total"] < values["vllm:prefix_cache_queries_total"]
    assert 0 <= values["vllm:kv_cache_usage_perc"] <= 1


async def test_metrics_are_there_when_the_engine_has_failed(scene_of):
    answers = []

    async def play() -> None:
        async with scene_of() as scene:
            scene.generator.fail(RuntimeError("the end"))
            answers.extend([await scene.client.get(path) for path in ("/metrics", "/v1/sight")])

    # nobody else has got the failure, so it does not end in silence
    with pytest.raises(EngineFailed):
        await play()
    assert [answer.status_code for answer in answers] == [200, 503]
    assert "fdasync_http_engine_up 0.0" in answers[0].text
    assert "vllm:num_requests_running{" not in answers[0].text
