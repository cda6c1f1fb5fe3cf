"""`/v1/rollout`: the library of the format reads it, and every array is that of the engine."""

from __future__ import annotations

import asyncio
import json
import re

import httpx2
import numpy as np
import pytest
import safetensors.numpy
from fdasync_http.rollout.generate import MANY, ONE
from safetensors import safe_open

from fdasync import SamplingParams
from fdasync.testing import check_sample, until

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLING = {"max_tokens": 9, "seed": 3, "logprobs": "both"}
# its samples end after 200, 6, 65 and 114 tokens
GROUP = {"max_tokens": 200, "seed": 3, "n": 4, "stop_token_ids": [36], "logprobs": "raw"}


def read(tmp_path, content):
    file = tmp_path / "sample.safetensors"
    file.write_bytes(content)
    with safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


async def test_a_sample_is_a_file_that_says_everything(scene, tmp_path):
    response = await scene.client.post(
        "/v1/rollout", json={"token_ids": PROMPT, "sampling": SAMPLING, "start": 2, "request_id": "mine"}
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == ONE
    arrays, meta = read(tmp_path, response.content)
    result = await scene.generator.complete(PROMPT, SamplingParams(**SAMPLING), start=2)
    assert arrays["token_ids"].tolist() == list(result.token_ids)
    assert arrays["prompt_token_ids"].tolist() == PROMPT
    np.testing.assert_array_equal(arrays["raw_logprobs"], result.raw_logprobs)
    np.testing.assert_array_equal(arrays["processed_logprobs"], result.samples[0].processed_logprobs)
    np.testing.assert_array_equal(arrays["routing"], result.routing.array)
    assert arrays["routing"].dtype == result.routing.array.dtype
    assert (meta["start"], meta["routing.complete"], meta["request_id"]) == ("2", "true", "mine")
    assert json.loads(meta["routing.layer_ids"]) == list(result.routing.layer_ids)
    assert meta["finish_reason"] == result.finish_reason
    assert json.loads(meta["weight_versions"]) == [
        {"start": 0, "stop": len(result.token_ids), "version": "0", "weights_id": result.weight_version[0].weights_id}
    ]
    assert re.fullmatch("[0-9a-f]{32}", result.weight_version[0].weights_id)


async def files_of(response):
    """The files of a body as they come."""
    content = b""
    async for some in response.aiter_bytes():
        content += some
        while len(content) >= 8 and len(content) >= (end := 8 + int.from_bytes(content[:8], "little")):
            yield content[8:end]
            content = content[end:]
    assert not content


@pytest.mark.ci
async def test_samples_come_in_the_order_in_which_they_end(kind, scene_of, tmp_path):
    body = {"token_ids": PROMPT, "sampling": GROUP, "start": 1, "request_id": "mine"}
    found = {}
    async with scene_of(kind, held=True) as scene:
        scene.steps.hold()
        # the others have ended by then, and the longest has not
        let = asyncio.ensure_future(scene.steps.let(140))
        async with scene.client.stream("POST", "/v1/rollout", json=body) as response:
            assert (response.status_code, response.headers["content-type"]) == (200, MANY)
            async for file in files_of(response):
                arrays, meta = read(tmp_path, file)
                found[int(meta["index"])] = arrays
                assert (meta["request_id"], meta["start"], meta["routing.complete"]) == ("mine", "1", "true")
                np.testing.assert_array_equal(arrays["prompt_token_ids"], PROMPT)
                # the longest one still runs when the others are here
                assert scene.generator.load().live or meta["index"] == "0"
                if len(found) == 3:
                    await let
                    scene.steps.release()
        assert list(found) == [1, 2, 3, 0]
        # and it ends behind its file
        await until(lambda: not scene.generator.load().live)
        result = await scene.generator.complete(PROMPT, SamplingParams.from_mapping(GROUP), start=1)
        for sample in result.samples:
            check_sample(sample, PROMPT, SamplingParams.from_mapping(GROUP), scene.oracle, start=1)
            arrays = found[sample.index]
            np.testing.assert_array_equal(arrays["token_ids"], sample.token_ids)
            np.testing.assert_array_equal(arrays["raw_logprobs"], sample.raw_logprobs)
            np.testing.assert_array_equal(arrays["routing"], sample.routing.array)


async def test_a_prompt_that_is_text_comes_as_tokens_with_every_sample(scene):
    response = await scene.client.post("/v1/rollout", json={"text": "letters", "sampling": {**SAMPLING, "n": 3}})
    result = await scene.generator.complete("letters", SamplingParams(**SAMPLING, n=3))
    found = {}
    async for file in files_of(response):
        arrays = safetensors.numpy.load(file)
        assert arrays["prompt_token_ids"].tolist() == list(result.prompt_token_ids)
        found[len(found)] = arrays["token_ids"].tolist()
    assert sorted(found.values()) == sorted(list(sample.token_ids) for sample in result.samples)


async def test_a_client_that_has_enough_aborts_the_rest(kind, scene_of):
    async with scene_of(kind, held=True) as scene:
        scene.steps.hold()
        let = asyncio.ensure_future(scene.steps.let(35))
        body = {"token_ids": PROMPT, "sampling": GROUP}
        async with scene.client.stream("POST", "/v1/rollout", json=body) as response:
            files = files_of(response)
            await anext(files)
            assert scene.generator.load().live == 1
            await let
            await files.aclose()
        await until(lambda: not scene.generator.load().live)


async def test_a_failure_between_samples_breaks_the_body_off(scene_of):
    """No client may take what came for all of it."""
    async with scene_of(held=True) as scene:
        scene.steps.hold()
        let = asyncio.ensure_future(scene.steps.let(35))
        body = {"token_ids": PROMPT, "sampling": GROUP}
        async with scene.client.stream("POST", "/v1/rollout", json=body) as response:
            files = files_of(response)
            await anext(files)
            await let
            scene.generator._runtime.driver._fail(RuntimeError("made up"))
            with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
                await anext(files)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "one of token_ids and text"),
        ({"token_ids": [1], "sampling": {"max_token": 1}}, "max_token"),
        ({"token_ids": [1], "start": 1, "sampling": {"max_tokens": 1}}, "start"),
        ({"token_ids": [1], "aux": ["nonsense"], "sampling": {"max_tokens": 1}}, "nonsense"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"token_ids": [1], "start": 1, "sampling": {"max_tokens": 1, "n": 2}}, "start"),
    ],
)
async def test_bad_input_is_400(scene_of, body, told):
    async with scene_of() as scene:
        response = await scene.client.post("/v1/rollout", json=body)
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]
