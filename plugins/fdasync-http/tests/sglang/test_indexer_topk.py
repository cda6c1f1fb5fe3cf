"""Positions that indexers chose, as Miles asks for them and reads them: on `/generate`, in a session's chats, and in
files of `/v1/rollout`."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import safetensors.numpy
from fdasync_http import rows

from fdasync import ChosenPositions

PROMPT = [5, 6, 7, 8, 9, 10, 11]
RUNNER = {"chosen_top_k": 5}
SAMPLING = {"temperature": 1.0, "max_new_tokens": 12, "sampling_seed": 7}


@pytest.fixture
async def scene(scene_of):
    async with scene_of("engine", runner=RUNNER) as made:
        yield made


def positions_of(meta, tokens):
    """As Miles reads them: the number of positions follows from the length of the text."""
    flat = np.frombuffer(base64.b64decode(meta["indexer_topk"].encode("ascii")), np.int32)
    count, layers = len(tokens) - 1, meta["indexer_topk_num_layers"]
    return flat.reshape(count, layers, len(flat) // (count * layers))


def want(scene, tokens):
    return scene.oracle.chosen(scene.oracle.digests(tokens)[:-1], np.arange(len(tokens) - 1))


async def post(scene, path, body):
    response = await scene.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


async def test_a_rollout_has_the_positions_of_all_its_tokens(scene):
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "return_indexer_topk": True}
    for _ in range(2):
        # the second time the prompt is cached
        meta = (await post(scene, "/generate", body)).json()["meta_info"]
        tokens = [*PROMPT, *[token for _, token, _ in meta["output_token_logprobs"]]]
        assert len(tokens) == 19
        np.testing.assert_array_equal(positions_of(meta, tokens), want(scene, tokens))
    plain = (await post(scene, "/generate", {**body, "return_indexer_topk": False})).json()["meta_info"]
    assert not {"indexer_topk", "indexer_topk_num_layers"} & set(plain)


async def test_the_last_event_of_a_stream_has_them(scene):
    sampling = {**SAMPLING, "n": 2}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_indexer_topk": True, "stream": True}
    text = (await post(scene, "/generate", body)).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
    ends = [event for event in events if event["meta_info"]["finish_reason"] is not None]
    assert sorted(event["index"] for event in ends) == [0, 1]
    for event in ends:
        tokens = [*PROMPT, *event["output_ids"]]
        np.testing.assert_array_equal(positions_of(event["meta_info"], tokens), want(scene, tokens))
    assert not any("indexer_topk" in event["meta_info"] for event in events if event not in ends)


async def test_a_prompt_without_new_tokens_has_the_positions_of_its_own(scene):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_indexer_topk": True}
    answer = (await post(scene, "/generate", body)).json()
    assert answer["output_ids"] == []
    np.testing.assert_array_equal(positions_of(answer["meta_info"], PROMPT), want(scene, PROMPT))


async def test_a_session_reads_them_in_its_chats(scene):
    body = {
        "model": "default", "messages": [{"role": "user", "content": "hi"}], "input_ids": PROMPT, "seed": 3,
        "logprobs": True, "return_meta_info": True, "return_indexer_topk": True, "max_tokens": 6,
    }  # fmt: skip
    (choice,) = (await post(scene, "/v1/chat/completions", body)).json()["choices"]
    meta = choice["meta_info"]
    tokens = [*PROMPT, *[token for _, token, _ in meta["output_token_logprobs"]]]
    np.testing.assert_array_equal(positions_of(meta, tokens), want(scene, tokens))
    response = await scene.client.post("/v1/chat/completions", json={**body, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "return_indexer_topk")


async def test_a_file_has_them_as_they_are(scene):
    body = {"token_ids": PROMPT, "sampling": {"max_tokens": 9, "seed": 3, "chosen_positions_start": 2}}
    content = (await post(scene, "/v1/rollout", body)).content
    arrays = safetensors.numpy.load(content)
    tokens = [*PROMPT, *arrays["token_ids"].tolist()]
    np.testing.assert_array_equal(arrays["chosen_positions"], want(scene, tokens)[2:])
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert header["chosen_positions.start"] == "2"
    assert json.loads(header["chosen_positions.layer_ids"]) == [0, 2]
    many = (await post(scene, "/v1/rollout", {**body, "sampling": {**body["sampling"], "n": 3}})).content
    found = 0
    while many:
        end = 8 + int.from_bytes(many[:8], "little")
        arrays, many, found = safetensors.numpy.load(many[8:end]), many[end:], found + 1
        tokens = [*PROMPT, *arrays["token_ids"].tolist()]
        np.testing.assert_array_equal(arrays["chosen_positions"], want(scene, tokens)[2:])
    assert found == 3


@pytest.mark.parametrize(("kind", "words"), [("engine", "has no indexers"), ("router", "between instances")])
async def test_who_has_none_to_tell_says_so(scene_of, kind, words):
    async with scene_of(kind, runner=RUNNER if kind == "router" else {}) as scene:
        for path, body in (
            ("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
        ):
            response = await scene.client.post(path, json={**body, "return_indexer_topk": True})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "return_indexer_topk"
            assert words in error["message"]


async def test_more_than_the_engine_takes_is_refused_by_the_clients_own_field(scene_of):
    # 2 layers x 1,000,000 x 4 bytes: 134 tokens have a gigabyte
    async with scene_of("engine", runner={"chosen_top_k": 1_000_000}) as scene:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200}, "return_indexer_topk": True}
        response = await scene.client.post("/generate", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "return_indexer_topk")
        assert f"limit: {1 << 30}" in response.json()["error"]["message"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 700])
async def test_pieces_are_the_text_of_the_whole(count):
    array = np.arange(count * 2 * 601, dtype=np.int32).reshape(count, 2, 601)
    part = rows.chosen(ChosenPositions(array=array, start=0, layer_ids=(0, 1)))
    text = b"".join([piece async for piece in part.pieces()])
    assert text == base64.b64encode(array.astype("<i4").tobytes())
    assert len(text) == part.nbytes
