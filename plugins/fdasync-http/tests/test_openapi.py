"""The description of the app is of the app: every path, its body, and no status that it does not name."""

from __future__ import annotations

import html
from html.parser import HTMLParser

import httpx2
import pytest
from fdasync_http import app
from fdasync_http.openapi import description
from fdasync_http.paths import CONTROL, USE
from fdasync_http.refused import REASONS
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


def references(value):
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_every_path_is_described_with_its_body(scene_of):
    async with scene_of() as scene:
        told = (await scene.client.get("/openapi.json")).json()
    assert told["openapi"].startswith("3.1")
    described = {(path, method) for path, methods in told["paths"].items() for method in methods}
    listed = {
        (path.path.replace(":path}", "}"), method.lower()) for path in (*USE, *CONTROL) for method in path.methods
    }
    assert described == listed | {("/openapi.json", "get"), ("/docs", "get")}
    components = told["components"]["schemas"]
    for reference in references(told):
        assert reference.removeprefix("#/components/schemas/") in components
    body = told["paths"]["/v1/rollout"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "sampling" in components[body["$ref"].rpartition("/")[2]]["properties"]
    for path, methods in told["paths"].items():
        for operation in methods.values():
            assert len(operation["summary"]) > 10, path
            assert operation["summary"] != operation["responses"].get("200", {}).get("description")


def test_each_path_has_its_own_statuses_media_and_parameters():
    told = description(USE, CONTROL)["paths"]

    def of(path, method="post"):
        return told[path][method]["responses"]

    # where an engine's memory cannot be released; a call that is none of those that need nothing; weights to be spoilt;
    # a transfer of vLLM's own
    in_part = {
        "/sleep", "/release_memory_occupation", "/collective_rpc", "/weights_checker", "/init_weight_transfer_engine",
    }  # fmt: skip
    assert {path for path in told if "501" in of(path, next(iter(told[path])))} == set(REASONS) | in_part
    assert all("200" not in of(path) for path in REASONS)
    assert "403" in of("/pause")
    assert "403" not in of("/generate")
    assert "503" not in of("/ping", "get")
    assert "413" not in of("/health", "get")
    assert set(of("/generate")["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "application/vnd.fdasync.rollout+safetensors" in of("/v1/rollout")["200"]["content"]
    assert "content" not in of("/abort_request")["200"]
    assert "retry-after" in of("/generate")["429"]["headers"]
    assert [one["name"] for one in told["/pause"]["post"]["parameters"]] == ["mode", "clear_cache"]
    assert told["/pause"]["post"]["parameters"][0]["schema"]["enum"] == ["abort", "keep", "wait"]
    assert told["/inference/v1/generate"]["post"]["requestBody"]["required"]
    assert not told["/pause_generation"]["post"]["requestBody"]["required"]


def test_fields_have_the_words_of_their_docstrings():
    components = description(USE, CONTROL)["components"]["schemas"]
    pause = components["PauseGeneration"]
    assert pause["description"].startswith("`POST /pause_generation`: no step runs when it answers;")
    assert pause["properties"]["mode"]["description"] == "what becomes of requests that run."
    rollout = components["RolloutBody"]["properties"]
    assert rollout["token_ids"]["description"] == rollout["text"]["description"] == "the prompt; one of the two."
    # a description that goes on in a second line
    reset = components["ResetPrefixCache"]["properties"]["reset_running_requests"]["description"]
    assert reset.startswith("requests that run go back to the queue first")
    assert reset.endswith("forgotten too.")
    assert not [name for name, one in components.items() if "Attributes:" in one["description"]]


class Links(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self):
        super().__init__()
        self.hosts, self.anchors, self.ids, self.tags = [], [], set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "action"):
                (self.anchors if value.startswith("#") else self.hosts).append(value)
            if name == "id":
                self.ids.add(value)


async def test_docs_show_every_path_and_load_nothing(scene_of):
    async with scene_of() as scene:
        told = (await scene.client.get("/openapi.json")).json()
        response = await scene.client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    links = Links()
    links.feed(response.text)
    assert links.hosts == ["openapi.json"]
    assert not links.tags & {"script", "link", "img", "iframe"}
    assert {anchor[1:] for anchor in links.anchors} <= links.ids
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()}{path}" in links.ids
            assert html.escape(operation["description"]) in response.text
    for schema in told["components"]["schemas"].values():
        assert all(f"<code>{name}</code>" in response.text for name in schema.get("properties", ()))


async def test_docs_ask_for_the_key_and_are_found_behind_a_mount(scene_of, tmp_path):
    key = "sk-0123456789abcdef"
    async with scene_of(api_key=key) as scene:
        assert (await scene.client.get("/docs")).status_code == 401
        assert (await scene.client.get("/openapi.json")).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert (await scene.client.get("/docs", headers=headers)).status_code == 200
        mounted = Starlette(routes=[Mount("/llm", app(scene.generator))])
        transport = httpx2.ASGITransport(mounted)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            page = await client.get("/llm/docs")
            assert page.status_code == 200
            # relative: it leads to the same mount
            assert 'href="openapi.json"' in page.text
            assert (await client.get("/llm/openapi.json")).status_code == 200


async def test_a_method_that_is_not_there_is_told_which_are(scene_of):
    async with scene_of() as scene:
        response = await scene.client.delete("/generate")
        assert response.status_code == 405
        assert {one.strip() for one in response.headers["allow"].split(",")} == {"POST", "PUT"}


def test_two_bodies_of_one_name_are_two():
    told = description(USE)["paths"]
    schemas = [
        told[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path in ("/generate", "/inference/v1/generate")
    ]
    assert schemas[0] != schemas[1]


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("body", [b"{}", b"[]", b"\xff", b'{"model": 3}'])
async def test_no_path_answers_with_a_status_that_it_does_not_name(scene_of, body):
    async with scene_of() as scene:
        told = (await scene.client.get("/openapi.json")).json()["paths"]
        for path, methods in told.items():
            for method, operation in methods.items():
                response = await scene.client.request(method, path.replace("{model}", "m"), content=body)
                assert str(response.status_code) in operation["responses"], (method, path, response.text)
                if "pause" in path:
                    await scene.client.post("/resume")
        assert (await scene.client.post("/generate", json=BODY)).status_code == 200


async def test_metrics_count_answers_and_tell_how_busy_it_is(scene):
    await scene.client.post("/generate", json=BODY)
    await scene.client.post("/generate", json={})
    response = await scene.client.get("/metrics")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found["fdasync_http_answers_total", "/generate", "200"] == 1
    assert found["fdasync_http_answers_total", "/generate", "400"] == 1
    assert found["fdasync_http_engine_up",] == 1
    assert found["fdasync_http_live_requests",] == 0
    engines = [key[1] for key, value in found.items() if key[0] == "fdasync_weight_version" and value]
    assert engines
    assert sum(found["fdasync_kv_blocks", engine, "free", "device"] for engine in engines) > 0
