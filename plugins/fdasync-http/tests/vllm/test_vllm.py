"""vLLM's token-in-token-out path and its control paths, as prime-rl, SkyRL, vime and TRL call them."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from fdasync_trainer.rows import RoutingLayout, from_prime_rl, from_skyrl

from fdasync import SamplingParams
from fdasync.testing import expected, until

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLING = {"max_tokens": 10, "seed": 3, "logprobs": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}


def want(scene, **params):
    return list(expected(PROMPT, SamplingParams(**{"max_tokens": 10, "seed": 3, **params}), 0, scene.oracle).token_ids)


async def generate(scene, path="/inference/v1/generate", **body):
    sent = {"token_ids": PROMPT, "sampling_params": SAMPLING, **body}
    response = await scene.client.post(path, json=sent)
    assert response.status_code == 200, response.text
    return response


async def right_rows(scene):
    result = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=10, seed=3))
    return result.routing.array


async def test_tokens_logprobs_and_rows_as_a_npy(scene):
    answer = (await generate(scene, request_id="mine", return_token_ids=True)).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == want(scene)
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == want(scene)
    assert content[0]["token"] == f"token_id:{want(scene)[0]}"
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 1 for entry in content)
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    assert rows.dtype == np.uint8
    np.testing.assert_array_equal(rows, await right_rows(scene))
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("mine", PROMPT)
    assert answer["usage"]["completion_tokens"] == len(want(scene))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(want(scene))}]
    later = (await generate(scene, sampling_params={**SAMPLING, "routed_experts_prompt_start": 4})).json()
    rows = np.load(io.BytesIO(base64.b64decode(later["choices"][0]["routed_experts"])), allow_pickle=False)
    np.testing.assert_array_equal(rows, (await right_rows(scene))[4:])


async def test_the_forms_of_prime_rl_and_of_skyrl(scene_of):
    async with scene_of(rows="prime_rl") as scene:
        facts = scene.generator.facts()
        layout = RoutingLayout(layer_ids=facts.moe_layer_ids, num_experts=facts.num_experts, top_k=facts.top_k)
        layers = facts.num_hidden_layers
        response = await generate(scene)
        # verifiers look for these bytes
        assert b'"routed_experts":{"data":"' in response.content
        rows = response.json()["choices"][0]["routed_experts"]
        total = len(PROMPT) + len(want(scene))
        read = from_prime_rl(rows, layout, num_hidden_layers=layers, num_tokens=total)
        np.testing.assert_array_equal(read.array, await right_rows(scene))
        rows = (await generate(scene, "/skyrl/v1/generate")).json()["choices"][0]["routed_experts"]
        read = from_skyrl(rows, layout, num_hidden_layers=layers, num_tokens=total)
        np.testing.assert_array_equal(read.array, await right_rows(scene))


async def test_a_stream_has_deltas_and_the_rows_at_its_end(scene):
    text = ""
    body = {
        "token_ids": PROMPT, "sampling_params": {**SAMPLING, "n": 2}, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with scene.client.stream("POST", "/inference/v1/generate", json=body) as response:
        async for some in response.aiter_text():
            text += some
    *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    *chunks, usage = [json.loads(event) for event in events]
    assert usage["choices"] == []
    tokens = [[], []]
    ended = [None, None]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert ended[choice["index"]] is None
        tokens[choice["index"]] += choice["token_ids"]
        ended[choice["index"]] = choice["finish_reason"]
        assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
    assert tokens[0] == want(scene)
    assert usage["usage"]["completion_tokens"] == sum(map(len, tokens))
    assert None not in ended


async def test_fields_of_renderers_that_change_no_answer_are_taken(scene):
    """prime-rl's client reads JSON where the binary form of log-probs is not known, and never asks for text."""
    sampling = {**SAMPLING, "logprobs": 3, "flat_logprobs": True, "detokenize": False, "skip_special_tokens": False}
    answer = (await generate(scene, sampling_params={**sampling, "extra_args": {"prl_compact_logprobs": True}})).json()
    assert answer["choices"][0]["token_ids"] == want(scene)
    assert all(len(entry["top_logprobs"]) == 3 for entry in answer["choices"][0]["logprobs"]["content"])
    body = {"token_ids": PROMPT, "sampling_params": {"extra_args": {"other": 1}}}
    response = await scene.client.post("/inference/v1/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "sampling_params.extra_args")
    # this tokenizer has no text of special tokens
    body = {"token_ids": PROMPT, "sampling_params": {"skip_special_tokens": False}, "output_mode": "text"}
    assert (await scene.client.post("/inference/v1/generate", json=body)).status_code == 400


async def test_a_prompt_is_scored(scene):
    answer = (await generate(scene, sampling_params={**SAMPLING, "prompt_logprobs": 1})).json()
    told = answer["prompt_logprobs"]
    assert told[0] is None
    assert [str(token) in entry for token, entry in zip(PROMPT[1:], told[1:], strict=True)] == [True] * 5


@pytest.mark.ci
async def test_no_max_tokens_means_what_the_context_leaves(scene_of):
    async with scene_of(runner={"eos_id": -1}) as scene:
        answer = (await generate(scene, sampling_params={"temperature": 0, "stop": None})).json()
        total = scene.generator.facts().max_context_tokens
        assert len(answer["choices"][0]["token_ids"]) == total - len(PROMPT)
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"token_ids": []}, 400, "token_ids: is empty"),
        ({"sampling_params": {"max_token": 3}}, 400, "max_token"),
        ({"sampling_params": {"structured_outputs": {"prose": "x"}}}, 400, "not served"),
        ({"sampling_params": {"max_tokens": "x"}}, 400, "sampling_params.max_tokens"),
        ({"features": {"a": 1}}, 400, "features"),
        ({"model": "other"}, 404, "other"),
    ],
)
async def test_bad_input_is_named(scene_of, body, status, told):
    async with scene_of() as scene:
        response = await scene.client.post("/inference/v1/generate", json={"token_ids": [1], **body})
        assert response.status_code == status, response.text
        assert told in response.json()["error"]["message"]


@pytest.mark.ci(after=1)
async def test_skyrl_and_trl_pause_keep_update_and_resume(scene):
    new = scene.new_weights("one", 9)
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200, "ignore_eos": True}}
    call = asyncio.ensure_future(scene.client.post("/inference/v1/generate", json=body))
    await until(lambda: scene.generator.load().live == 1)
    for _ in range(2):
        response = await scene.client.post("/pause?mode=keep&clear_cache=false")
        assert (response.status_code, response.json()) == (200, {"status": "paused"})
    response = await scene.client.post("/update_weights", json={"weight_dir": str(new)})
    assert response.json() == {"status": "ok", "weight_version": "1"}
    for _ in range(2):
        assert (await scene.client.post("/resume")).status_code == 200
    choice = (await call).json()["choices"][0]
    assert len(choice["token_ids"]) == 200
    assert [span["version"] for span in choice["weight_versions"]] in (["0", "1"], ["1"])
    assert (await scene.client.post("/pause?mode=gently")).status_code == 400
    assert (await scene.client.post("/reset_prefix_cache", json={"reset_running_requests": True})).status_code == 200
    assert (await scene.client.get("/is_paused")).json() == {"is_paused": False, "doing": "running"}
    response = await scene.client.post("/update_weights", json={"update_info": {"names": ["a"]}})
    assert response.status_code == 400
    assert "weight_dir" in response.json()["error"]["message"]


async def test_vime_aborts_by_name_or_all(scene):
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200, "ignore_eos": True}}
    calls = [
        asyncio.ensure_future(scene.client.post("/inference/v1/generate", json={**body, "request_id": name}))
        for name in "abc"
    ]
    await until(lambda: scene.generator.load().live == 3)
    response = await scene.client.post("/abort_requests", json={"request_ids": ["a", "no"]})
    assert response.json() == {"status": "aborted", "aborted": 1}
    assert (await calls[0]).json()["choices"][0]["finish_reason"] == "abort"
    response = await scene.client.post("/abort_requests", json={})
    assert response.json()["aborted"] == 2
    for call in calls[1:]:
        assert (await call).json()["choices"][0]["finish_reason"] == "abort"


async def test_small_paths(scene):
    assert (await scene.client.get("/get_world_size")).json()["world_size"] in (1, 2)
    assert (await scene.client.get("/version")).json()["version"].startswith("fdasync")
    assert (await scene.client.get("/ping")).status_code == 200
    assert (await scene.client.get("/liveness")).status_code == 200
    (worker,) = (await scene.client.get("/workers")).json()["workers"]
    assert worker["url"] == scene.url


@pytest.mark.ci(after=1)
async def test_text_in_a_stream_is_the_whole_text_up_to_a_stop(scene):
    whole = (await generate(scene, output_mode="text")).json()["choices"][0]["text"]
    stop = whole[5:7]
    for sampling, want_text in (
        (SAMPLING, whole),
        ({**SAMPLING, "stop": [stop]}, whole[: whole.index(stop)]),
        ({**SAMPLING, "stop": [stop], "include_stop_str_in_output": True}, whole[: whole.index(stop) + 2]),
    ):
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True, "output_mode": "text"}
        response = await scene.client.post("/inference/v1/generate", json=body)
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == want_text
        answer = (await generate(scene, sampling_params=sampling, output_mode="text")).json()
        assert answer["choices"][0]["text"] == want_text


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/skyrl/v1/generate"])
async def test_errors_have_a_number_as_code(scene_of, path):
    """vLLM's models of answers ask for an integer."""
    async with scene_of(max_live=1, held=True) as scene:
        for body, status in (
            ({"token_ids": []}, 400), ({"token_ids": [1], "model": "other"}, 404), ({"token_ids": "a"}, 400),
            ({"token_ids": [1], "stream": True, "sampling_params": {"max_tokens": 10**6}}, 400), (b"\xff", 400),
        ):  # fmt: skip
            content = body if isinstance(body, bytes) else json.dumps(body)
            response = await scene.client.post(path, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (status, status), response.text
        scene.steps.hold()
        call = asyncio.ensure_future(scene.client.post(path, json={"token_ids": [1]}))
        await until(lambda: scene.generator.load().running == 1)
        response = await scene.client.post(path, json={"token_ids": [1]})
        assert (response.status_code, response.json()["error"]["code"]) == (429, 429)
        scene.steps.release()
        assert (await call).status_code == 200


async def test_the_model_s_name_is_as_it_was_asked_for(scene_of):
    async with scene_of(model="org/name") as scene:
        facts = scene.generator.facts()
        for asked, told in ((None, "org/name"), ("", "org/name"), ("org/name", "org/name"), (facts.model, facts.model)):
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "model": asked}
            assert (await scene.client.post("/inference/v1/generate", json=body)).json()["model"] == told
            stream = await scene.client.post("/inference/v1/generate", json={**body, "stream": True})
            assert json.loads(stream.text.partition("\n\n")[0].removeprefix("data: "))["model"] == told


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_a_reset_that_pauses_ends_no_pause_of_another_client(scene_of, mode):
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200, "ignore_eos": True}}
    async with scene_of(held=True) as scene:
        scene.steps.hold()
        call = asyncio.ensure_future(scene.client.post("/inference/v1/generate", json=body))
        await until(lambda: scene.generator.load().running == 1)
        reset = asyncio.ensure_future(scene.client.post("/reset_prefix_cache?reset_running_requests=true"))
        # the reset waits for its step, and the pause for the reset
        await until(lambda: scene.generator.stats().scheduler.paused)
        pause = asyncio.ensure_future(scene.client.post(f"/pause?mode={mode}&clear_cache=false"))
        scene.steps.release()
        assert (await reset).status_code == (await pause).status_code == 200
        if mode == "keep":
            assert (await scene.client.get("/is_paused")).json()["is_paused"]
            steps = scene.generator.stats().scheduler.steps
            # within a pause it is left as it is
            assert (await scene.client.post("/reset_prefix_cache?reset_running_requests=true")).status_code == 200
            assert (await scene.client.get("/is_paused")).json()["is_paused"]
            assert scene.generator.stats().scheduler.steps == steps
        await scene.client.post("/resume")
        choice = (await call).json()["choices"][0]
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_reset_ends_no_pause_that_is_on_its_way(scene_of, mode):
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200, "ignore_eos": True}}
    async with scene_of(held=True) as scene:
        scene.steps.hold()
        call = asyncio.ensure_future(scene.client.post("/inference/v1/generate", json=body))
        await until(lambda: scene.generator.load().running == 1)
        pause = asyncio.ensure_future(scene.client.post(f"/pause?mode={mode}&clear_cache=false"))
        # the pause waits for a step, and the reset for nothing
        await until(lambda: scene.generator.stats().scheduler.paused)
        assert not scene.generator.load().paused
        reset = asyncio.ensure_future(scene.client.post("/reset_prefix_cache?reset_running_requests=true"))
        await until(reset.done)
        assert not pause.done()
        scene.steps.release()
        assert (await reset).status_code == (await pause).status_code == 200
        assert (await scene.client.get("/is_paused")).json()["is_paused"]
        await scene.client.post("/resume")
        assert (await call).json()["choices"][0]["finish_reason"] == ("abort" if mode == "abort" else "length")
