"""`/v1/rollout`: the library of the format reads it, and every array is that of the engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from fdasync_http.rollout.generate import MANY, ONE
from safetensors import safe_open

from fdasync import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLING = {"max_tokens": 9, "seed": 3, "logprobs": "both"}


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
    assert json.loads(meta["weight_versions"]) == [{"start": 0, "stop": len(result.token_ids), "version": "0"}]


async def test_several_samples_come_one_behind_the_other(scene):
    response = await scene.client.post("/v1/rollout", json={"token_ids": PROMPT, "sampling": {**SAMPLING, "n": 3}})
    assert response.headers["content-type"] == MANY
    content, found = response.content, []
    while content:
        nbytes = int.from_bytes(content[:8], "little")
        found.append(safetensors.numpy.load(content[8 : 8 + nbytes])["token_ids"].tolist())
        content = content[8 + nbytes :]
    result = await scene.generator.complete(PROMPT, SamplingParams(**SAMPLING, n=3))
    assert found == [list(sample.token_ids) for sample in result.samples]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "one of token_ids and text"),
        ({"token_ids": [1], "sampling": {"max_token": 1}}, "max_token"),
        ({"token_ids": [1], "start": 1, "sampling": {"max_tokens": 1}}, "start"),
        ({"token_ids": [1], "aux": ["nonsense"], "sampling": {"max_tokens": 1}}, "nonsense"),
        ({"token_ids": [1], "stream": True}, "stream"),
    ],
)
async def test_bad_input_is_400(scene_of, body, told):
    async with scene_of() as scene:
        response = await scene.client.post("/v1/rollout", json=body)
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]
