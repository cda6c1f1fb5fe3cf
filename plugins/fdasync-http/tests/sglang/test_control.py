"""SGLang's control paths, in the order in which slime, Miles and AReaL call them in a training step."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from fdasync_http.application import app
from fdasync_http.config import HttpConfig
from fdasync_http.front import Front

from fdasync import Engine, SamplingParams
from fdasync.testing import synthetic_config, until

PROMPT = [5, 6, 7, 8, 9]


async def post(scene, path, body=None):
    return await scene.client.post(path, json={} if body is None else body)


async def versions_of(scene):
    """Every place that tells the version."""
    answer = await post(scene, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    told = [(await scene.client.get(path)).json()["weight_version"] for path in ("/get_weight_version", "/model_info")]
    told.append((await scene.client.get("/weight_info")).json()["weight_version"])
    return {answer.json()["meta_info"]["weight_version"], *told}


async def test_a_training_step_pauses_updates_flushes_and_goes_on(scene):
    new = scene.new_weights("step-1", 77)
    for _ in range(2):
        response = await post(scene, "/pause_generation")
        assert (response.status_code, response.json()["status"]) == (200, "ok")
    waiting = asyncio.ensure_future(
        post(scene, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}})
    )
    await until(lambda: scene.generator.load().live == 1)
    response = await post(scene, "/update_weights_from_disk", {"model_path": str(new), "weight_version": "step-1"})
    assert response.status_code == 200
    assert response.json()["success"] is True
    assert not waiting.done()
    for _ in range(2):
        assert (await post(scene, "/continue_generation")).status_code == 200
    assert (await waiting).json()["meta_info"]["weight_version"] == "step-1"
    assert await versions_of(scene) == {"step-1"}
    assert (await scene.client.get("/flush_cache")).status_code == 200
    assert (await scene.client.post("/flush_cache?timeout=5")).status_code == 200


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights"])
async def test_weights_that_are_not_the_expected_ones_are_told_and_not_used(scene, path):
    new = scene.new_weights("step-1", 77)
    field = "model_path" if path == "/update_weights_from_disk" else "weight_dir"
    body = {field: str(new), "weight_version": "step-1"}
    response = await post(scene, path, {**body, "expected_weights_id": f"{78:032x}"})
    assert response.status_code == 503
    assert all(f"{number:032x}" in response.text for number in (77, 78))
    await until(lambda: scene.generator.load().paused)
    assert (await post(scene, path, {**body, "expected_weights_id": "77"})).status_code == 400
    assert (await post(scene, path, {**body, "expected_weights_id": f"{77:032x}"})).status_code == 200
    assert await versions_of(scene) == {"step-1"}


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_what_runs_at_a_pause_ends_or_goes_on(scene, mode):
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    call = asyncio.ensure_future(post(scene, "/generate", body))
    await until(lambda: scene.generator.load().live == 1)
    assert (await post(scene, "/pause_generation", {"mode": mode})).status_code == 200
    assert (await scene.client.get("/is_paused")).json()["is_paused"] is True
    assert (await scene.client.get("/health_generate")).status_code == 200
    assert (await post(scene, "/continue_generation")).status_code == 200
    answer = (await call).json()
    assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")


async def test_a_flush_is_refused_while_a_request_is_live(scene):
    body = {"input_ids": PROMPT, "rid": "mine-1", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    call = asyncio.ensure_future(post(scene, "/generate", body))
    await until(lambda: scene.generator.load().live == 1)
    response = await scene.client.get("/flush_cache")
    assert response.status_code == 400
    assert "1 requests are live" in response.json()["error"]["message"]
    assert (await post(scene, "/abort_request", {"rid": "mi", "prefix": True})).status_code == 200
    assert (await call).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await post(scene, "/abort_request", {"rid": "unknown"})).status_code == 200
    assert (await post(scene, "/abort_request")).status_code == 400


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_in_a_pause_a_flush_is_refused_while_a_request_has_blocks(scene_of, kind, mode):
    """Miles flushes under requests that it had retracted; slime, while new ones may wait."""
    # a router is told what runs with a heartbeat: the request must not end before the next one
    async with scene_of(kind, runner={"step_s": 0.02}) as scene:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        calls = [asyncio.ensure_future(post(scene, "/generate", body))]
        await until(lambda: scene.generator.load().running == 1)
        await post(scene, "/pause_generation", {"mode": mode})
        calls.append(asyncio.ensure_future(post(scene, "/generate", body)))
        await until(lambda: scene.generator.load().live == 2)
        if mode == "retract":
            await until(lambda: scene.generator.load().running == 0)
            assert (await scene.client.get("/flush_cache")).status_code == 200
        else:
            response = await scene.client.get("/flush_cache")
            assert (response.status_code, response.json()["error"]["code"]) == (400, "busy")
        assert not any(call.done() for call in calls)
        await post(scene, "/abort_request", {"abort_all": True})
        await asyncio.gather(*calls)
        assert (await scene.client.get("/flush_cache")).status_code == 200


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"model_path": "/nowhere"}, "outside of the folder"),
        ({"model_path": "{weights}/../other"}, "outside of the folder"),
        ({"model_path": "{weights}/link"}, "outside of the folder"),
        ({"model_path": "{weights}/missing"}, "no folder"),
        ({"model_path": "{weights}/empty"}, ""),
        ({"model_path": "{weights}/a", "load_format": "dummy"}, "load_format"),
        ({"model_path": ""}, "no folder"),
        ({}, "model_path"),
    ],
)
async def test_weights_that_are_not_taken_leave_the_old_ones_and_their_version(scene, body, told):
    (scene.weights / "link").symlink_to("/")
    (scene.weights / "empty").mkdir()
    (scene.weights.parent / "other").mkdir()
    before = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
    sent = {name: value.replace("{weights}", str(scene.weights)) for name, value in body.items()}
    response = await post(scene, "/update_weights_from_disk", sent)
    assert response.status_code == 400, response.text
    if "model_path" in body:
        assert response.json()["success"] is False
    assert told in response.text
    assert await versions_of(scene) == {"0"}
    after = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
    assert after.token_ids == before.token_ids


async def test_a_version_is_counted_up_and_given_without_a_load(scene):
    new = scene.new_weights("a", 5)
    assert (await post(scene, "/update_weights_from_disk", {"model_path": str(new)})).status_code == 200
    assert await versions_of(scene) == {"1"}
    response = await post(scene, "/update_weight_version", {"new_version": "best", "abort_all_requests": False})
    assert response.json()["new_version"] == "best"
    await until(lambda: scene.generator.facts().weight_version == "best")
    assert await versions_of(scene) == {"best"}
    # the same weights under the same name: nothing to do
    again = {"model_path": str(new), "weight_version": "best"}
    assert (await post(scene, "/update_weights_from_disk", again)).status_code == 200


async def test_a_label_that_is_refused_ends_no_request(scene):
    # so that the request waits
    assert (await post(scene, "/pause_generation")).status_code == 200
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    waiting = asyncio.ensure_future(post(scene, "/generate", body))
    await until(lambda: scene.generator.load().live == 1)
    assert (await post(scene, "/update_weight_version", {"new_version": "x" * 700})).status_code == 400
    assert scene.generator.load().live == 1
    assert (await post(scene, "/update_weight_version", {"new_version": "best"})).status_code == 200
    assert (await waiting).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_without_a_folder_of_weights_none_are_taken(scene_of):
    async with scene_of(weights_root="") as scene:
        response = await post(scene, "/update_weights_from_disk", {"model_path": "/tmp"})
        assert response.status_code == 400
        assert "--weights-root" in response.json()["message"]


async def test_a_server_tells_what_it_is(scene):
    for twin in ("", "get_"):
        info = (await scene.client.get(f"/{twin}server_info")).json()
        assert (info["host"], info["port"]) == ("127.0.0.1", scene.port)
        assert (info["tp_size"], info["disaggregation_mode"], info["enable_return_routed_experts"]) == (1, "null", True)
        assert (await scene.client.get(f"/{twin}model_info")).json()["is_generation"] is True
    assert (await scene.client.get("/health")).status_code == 200
    assert (await scene.client.get("/health_generate")).status_code == 200
    loads = (await scene.client.get("/get_load")).json()
    assert loads[0]["num_reqs"] == 0


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/update_weights_from_tensor", "pickle"),
        ("/update_weights_from_ipc", "pickle"),
        ("/collective_rpc", "not served"),
        ("/load_lora_adapter", "LoRA"),
        ("/init_broadcaster", "pickle"),
        ("/get_weights_by_name", "expected_weights_id"),
    ],
)
async def test_what_is_not_served_names_the_safe_path(scene_of, path, told):
    async with scene_of() as scene:
        # the body is never read
        response = await scene.client.post(path, content=b"\x80\x04pickle")
        assert response.status_code == 501
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert told in error["message"]
        assert error["code"] == "not_served"


async def test_a_router_without_an_instance_is_not_healthy(scene_of):
    async with scene_of("fleet") as scene:
        assert (await scene.client.get("/health")).status_code == 200
        for instance in scene.generator.load().instances:
            scene.generator.remove(instance.address)
        for path in ("/health", "/health_generate"):
            assert (await scene.client.get(path)).status_code == 503


async def test_ready_is_narrower_than_live(scene):
    """An engine or router that is paused or updated is not ready, and is alive: nothing restarts it."""

    async def statuses():
        return tuple([(await scene.client.get(path)).status_code for path in ("/live", "/ready")])

    assert await statuses() == (200, 200)
    await scene.generator.pause("in_place")
    # a router reads of it in the next heartbeat
    await until(lambda: scene.generator.load().paused)
    assert await statuses() == (200, 503)
    await scene.generator.resume()
    await until(lambda: not scene.generator.load().paused)
    assert await statuses() == (200, 200)


async def test_a_front_whose_instances_are_away_is_alive_and_not_ready(scene_of):
    async with scene_of("fleet") as scene:
        for instance in scene.generator.load().instances:
            scene.generator.remove(instance.address)
        assert (await scene.client.get("/live")).status_code == 200
        assert (await scene.client.get("/ready")).status_code == 503


async def test_the_engine_that_failed_is_503(scene_of):
    async with scene_of() as scene:
        scene.generator.fail(RuntimeError("the disk is on fire"))
        for path in ("/health", "/health_generate", "/ready", "/live"):
            assert (await scene.client.get(path)).status_code == 503
        response = await post(scene, "/generate", {"input_ids": PROMPT})
        assert response.status_code == 503
        assert "on fire" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("named", "host", "port"),
    [
        ("node-7.cluster:30000", "node-7.cluster", 30000), ("10.0.0.7:30000", "10.0.0.7", 30000),
        ("[fd00::7]:30000", "[fd00::7]", 30000), ("node-7", "node-7", None), ("[fd00::7]", "[fd00::7]", None),
    ],
)  # fmt: skip
async def test_the_host_and_port_are_those_that_the_client_called(scene_of, named, host, port):
    """Miles compares them with its own view of the server, which has an address of IPv6 in brackets."""
    async with scene_of() as scene:
        info = (await scene.client.get("/get_server_info", headers={"host": named})).json()
        # without a port in it: where the server listens
        assert (info["host"], info["port"]) == (host, port or scene.port)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_the_ranks_that_a_trainer_counts_are_the_engine_s(ranks, forked_children):
    process = "inline" if ranks == 1 else "worker"
    async with Engine(synthetic_config(tensor_parallel=ranks, process=process)) as engine:
        transport = httpx2.ASGITransport(app(engine, HttpConfig()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front") as client:
            info = (await client.get("/server_info")).json()
    assert (info["tp_size"], info["num_gpus"], info["enable_metrics"]) == (ranks, ranks, True)


async def test_a_name_ends_its_own_requests_and_no_others(scene):
    long = {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    texts = {"max_tokens": 200, "ignore_eos": True}
    calls = {
        "other": scene.client.post("/generate", json={"input_ids": PROMPT, "rid": "job_7", **long}),
        "samples": scene.client.post("/generate", json={"input_ids": PROMPT, "rid": "job-1", "sampling_params": {
            **long["sampling_params"], "n": 2}}),
        "list": scene.client.post("/generate", json={"input_ids": [PROMPT, PROMPT], "rid": "job", **long}),
        "prompts": scene.client.post("/v1/completions", json={"prompt": [PROMPT] * 2, "request_id": "texts", **texts}),
        "stream": scene.client.post("/v1/completions", json={"prompt": [PROMPT] * 2, "rid": "streamed", "stream": True,
                                                             **texts}),
    }  # fmt: skip
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    await until(lambda: scene.generator.load().live == 8)
    await post(scene, "/abort_request", {"rid": "job"})
    ended = (await tasks["list"]).json()
    assert [one["meta_info"]["finish_reason"]["type"] for one in ended] == ["abort", "abort"]
    assert scene.generator.load().live == 6
    # vLLM's path knows the names, too
    response = await scene.client.post("/abort_requests", json={"request_ids": ["texts", "unknown"]})
    assert response.json()["aborted"] == 2
    assert {one["finish_reason"] for one in (await tasks["prompts"]).json()["choices"]} == {"abort"}
    await post(scene, "/abort_request", {"rid": "streamed"})
    assert (await tasks["stream"]).text.count('"finish_reason":"abort"') == 2
    await post(scene, "/abort_request", {"rid": "job-1"})
    assert len((await tasks["samples"]).json()) == 2
    assert scene.generator.load().live == 1
    await post(scene, "/abort_request", {"rid": "job_", "prefix": True})
    assert (await tasks["other"]).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_the_name_of_a_list_is_forgotten_with_its_last_list():
    front = Front(None, HttpConfig(), None)

    def named():
        return {name: sorted(names) for name, names in front.groups.items()}

    with front.group("job", ["job_0", None, "job_1"]):
        with front.group("job", ["job_0"]), front.group(None, ["other"]):
            assert named() == {"job": ["job_0", "job_0", "job_1"]}
        assert named() == {"job": ["job_0", "job_1"]}
        with pytest.raises(ZeroDivisionError), front.group("job", ["job_2"]):
            raise ZeroDivisionError
        assert named() == {"job": ["job_0", "job_1"]}
    assert front.groups == {}
