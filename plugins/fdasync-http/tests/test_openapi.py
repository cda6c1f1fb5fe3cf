"""The description of the app is of the app: every path, its body, and no status that it does not name."""

from __future__ import annotations

import pytest
from fdasync_http.openapi import description
from fdasync_http.paths import CONTROL, USE
from prometheus_client.parser import text_string_to_metric_families

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
    assert described == {
        (path.path.replace(":path}", "}"), method.lower()) for path in (*USE, *CONTROL) for method in path.methods
    }
    components = told["components"]["schemas"]
    for reference in references(told):
        assert reference.removeprefix("#/components/schemas/") in components
    body = told["paths"]["/v1/rollout"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "sampling" in components[body["$ref"].rpartition("/")[2]]["properties"]
    assert all(operation["summary"] for methods in told["paths"].values() for operation in methods.values())


def test_two_bodies_of_one_name_are_two():
    told = description(USE)["paths"]
    schemas = [
        told[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path in ("/generate", "/inference/v1/generate")
    ]
    assert schemas[0] != schemas[1]


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
    assert found["fdasync_http_weight_version", "0"] == 1
    # a router learns this with the first heartbeat
    assert found["fdasync_http_capacity_tokens",] >= 0
