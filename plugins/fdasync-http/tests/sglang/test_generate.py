"""`/generate` as slime, Miles and AReaL send it and read its answers."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from fdasync_http.sglang.meta import meta_of
from fdasync_trainer.rows import RoutingLayout, from_sglang

from fdasync import SamplingParams
from fdasync.drafting import Speculation
from fdasync.testing import expected, synthetic_config, synthetic_engine, until

PROMPT = [5, 6, 7, 8, 9, 10, 11]
# what slime sends for a rollout
SLIME = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 7,
}  # fmt: skip


def layout_of(scene):
    facts = scene.generator.facts()
    return RoutingLayout(layer_ids=facts.moe_layer_ids, num_experts=facts.num_experts, top_k=facts.top_k), facts


def ids_of(answer):
    # these clients take the ids from the log-probs
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


def rows_of(scene, answer, prompt):
    layout, facts = layout_of(scene)
    start = answer["meta_info"]["routed_experts_start_len"]
    total = len(prompt) + len(ids_of(answer))
    return from_sglang(
        answer["meta_info"]["routed_experts"], layout, facts.num_hidden_layers, start=start, num_tokens=total
    )


async def generate(scene, **body):
    response = await scene.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def want(scene, prompt=PROMPT, **params):
    return expected(prompt, SamplingParams(**{"max_tokens": 12, "seed": 7, **params}), 0, scene.oracle)


async def test_a_rollout_of_slime_has_tokens_logprobs_and_every_row(scene):
    answer = await generate(
        scene, input_ids=PROMPT, sampling_params=SLIME, return_logprob=True, return_routed_experts=True
    )
    meta = answer["meta_info"]
    right = want(scene)
    assert ids_of(answer) == answer["output_ids"] == list(right.token_ids)
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(right.token_ids)
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"]["type"] in ("stop", "length")
    rows = rows_of(scene, answer, PROMPT)
    assert len(rows.array) == len(PROMPT) + len(right.token_ids) - 1
    result = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=12, seed=7))
    np.testing.assert_array_equal(rows.array, result.routing.array)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(right.token_ids)}]


async def test_no_rows_no_key(scene):
    answer = await generate(scene, input_ids=PROMPT, sampling_params=SLIME, return_logprob=True)
    assert "routed_experts" not in answer["meta_info"]
    # Miles names the position behind the prompt: rows of the output alone, and none for one token
    body = {"input_ids": PROMPT, "return_logprob": True, "return_routed_experts": True}
    for count in (4, 1):
        answer = await generate(
            scene, **body, sampling_params={**SLIME, "max_new_tokens": count}, routed_experts_start_len=len(PROMPT)
        )
        assert answer["meta_info"]["routed_experts_start_len"] == len(PROMPT)
        if count == 1:
            assert answer["meta_info"]["routed_experts"] == ""
        else:
            assert len(rows_of(scene, answer, PROMPT).array) == 3
    # rows from the last position of a prompt on, and one token: there is one row
    start = len(PROMPT) - 1
    body = {"input_ids": PROMPT, "return_logprob": True, "return_routed_experts": True}
    answer = await generate(
        scene, **body, sampling_params={**SLIME, "max_new_tokens": 1}, routed_experts_start_len=start
    )
    assert answer["meta_info"]["routed_experts_start_len"] == start
    assert len(rows_of(scene, answer, PROMPT).array) == 1


async def test_a_conversation_asks_for_new_rows_only(scene):
    first = await generate(
        scene, input_ids=PROMPT, sampling_params=SLIME, return_logprob=True, return_routed_experts=True
    )
    longer = [*PROMPT, *ids_of(first), 3]
    start = len(PROMPT) + len(ids_of(first)) - 1
    second = await generate(
        scene, input_ids=longer, sampling_params=SLIME, return_logprob=True, return_routed_experts=True,
        routed_experts_start_len=start,
    )  # fmt: skip
    rows = rows_of(scene, second, longer)
    assert (rows.start, len(rows.array)) == (start, len(longer) + len(ids_of(second)) - 1 - start)


async def events(scene, **body):
    """The events of a stream, one after the other as they come."""
    async with scene.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = ""
        async for some in response.aiter_text():
            *whole, text = (text + some).split("\n\n")
            for event in whole:
                assert event.startswith("data: ")
                yield event.removeprefix("data: ")
        assert text == ""


async def events_of(scene, **body):
    return [event async for event in events(scene, **body)]


async def test_events_are_cumulative_and_the_last_alone_has_rows(kind, scene_of):
    async with scene_of(kind, held=True) as scene:
        right = list(want(scene).token_ids)
        scene.steps.hold()
        stream = events(scene, input_ids=PROMPT, sampling_params=SLIME, return_logprob=True, return_routed_experts=True)
        chunks = [json.loads(event) async for event in scene.steps.each(stream, len(right))]
        for count, chunk in enumerate(chunks, start=1):
            assert ids_of(chunk) == right[:count] == chunk["output_ids"]
            assert chunk["meta_info"]["completion_tokens"] == count
        assert [event async for event in stream] == ["[DONE]"]
        for chunk in chunks[:-1]:
            assert chunk["meta_info"]["finish_reason"] is None
            assert "routed_experts" not in chunk["meta_info"]
        assert len(rows_of(scene, chunks[-1], PROMPT).array) == len(PROMPT) + len(right) - 1
        scene.steps.release()
        whole = await generate(scene, input_ids=PROMPT, sampling_params=SLIME, return_logprob=True)
        assert chunks[-1]["text"] == whole["text"]
        assert chunks[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


async def test_every_event_tells_the_tokens_of_a_text(scene):
    params = {**SLIME, "n": 2, "no_stop_trim": False}
    *told, _done = await events_of(scene, text="letters", sampling_params=params)
    chunks = [json.loads(event) for event in told]
    assert {chunk["index"] for chunk in chunks} == {0, 1}
    assert {chunk["meta_info"]["prompt_tokens"] for chunk in chunks} == {len("letters")}


async def test_an_abort_is_an_answer_and_never_an_error(scene):
    long = {**SLIME, "max_new_tokens": 200, "ignore_eos": True}
    calls = [
        asyncio.ensure_future(
            generate(
                scene, input_ids=[number, *PROMPT], rid=f"r{number}", sampling_params=long, return_logprob=True,
                return_routed_experts=True,
            )
        )
        for number in range(4)
    ]  # fmt: skip
    await until(lambda: scene.generator.load().live == 4)
    response = await scene.client.post("/abort_request", json={"rid": "", "abort_all": True})
    assert (response.status_code, response.content) == (200, b"")
    for number, answer in enumerate(await asyncio.gather(*calls)):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(answer["output_ids"])
        if answer["output_ids"]:
            rows = rows_of(scene, answer, [number, *PROMPT])
            assert len(rows.array) == 1 + len(PROMPT) + len(answer["output_ids"]) - 1
        else:
            assert meta["finish_reason"]["message"].startswith("Abort before prefill")
    await until(lambda: not scene.generator.load().live)
    loads = (await scene.client.get("/v1/loads?include=core")).json()["loads"]
    assert [entry["num_reqs"] for entry in loads] == [0]
    assert (await scene.client.get("/flush_cache")).status_code == 200


async def test_a_client_that_goes_away_aborts_its_request(scene):
    long = {**SLIME, "max_new_tokens": 200, "ignore_eos": True}
    for stream in (False, True):
        body = {"input_ids": PROMPT, "sampling_params": long, "stream": stream}
        call = asyncio.ensure_future(scene.client.post("/generate", json=body))
        await until(lambda: scene.generator.load().live == 1)
        call.cancel()
        await until(lambda: not scene.generator.load().live)


async def test_a_list_of_prompts_and_several_samples(scene):
    prompts = [PROMPT, PROMPT[:3]]
    answers = await generate(scene, input_ids=prompts, sampling_params=SLIME, rid=["a", "b"], return_logprob=True)
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert ids_of(answer) == list(want(scene, prompt).token_ids)
    answers = await generate(scene, input_ids=PROMPT, sampling_params={**SLIME, "n": 3}, return_logprob=True)
    assert len(answers) == 3
    assert len({tuple(ids_of(answer)) for answer in answers}) == 3


async def test_a_prompt_is_scored_without_new_tokens(scene):
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answer = await generate(scene, **body, sampling_params={"max_new_tokens": 0, "temperature": 0})
    meta = answer["meta_info"]
    assert answer["output_ids"] == [] == meta["output_token_logprobs"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
    assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPT
    values = [value for value, _, _ in meta["input_token_logprobs"]]
    assert values[0] is None
    assert all(value < 0 for value in values[1:])
    assert [top and len(top) for top in meta["input_top_logprobs"]] == [None] + [2] * (len(PROMPT) - 1)


@pytest.mark.ci
@pytest.mark.parametrize("prompt", [{"text": "hello"}, {"input_ids": [7, 4, 11, 11, 14]}])
async def test_without_a_number_of_new_tokens_the_context_is_the_limit(scene, prompt):
    answer = await generate(scene, **prompt, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["meta_info"]["prompt_tokens"] == 5
    assert answer["meta_info"]["completion_tokens"] == scene.generator.facts().max_context_tokens - 5


async def test_text_is_cut_before_a_stop_string_unless_it_is_kept(scene):
    plain = await generate(scene, text="letters", sampling_params={**SLIME, "no_stop_trim": False})
    text = plain["text"]
    assert len(text) == 12
    stop = text[4:6]
    at = text.index(stop)
    cut = await generate(scene, text="letters", sampling_params={**SLIME, "no_stop_trim": False, "stop": [stop]})
    assert cut["text"] == text[:at]
    assert cut["meta_info"]["finish_reason"]["type"] == "stop"
    kept = await generate(scene, text="letters", sampling_params={**SLIME, "stop": stop})
    assert kept["text"] == text[: at + 2]
    chunks = await events_of(scene, text="letters", sampling_params={**SLIME, "stop": stop})
    assert json.loads(chunks[-2])["text"] == kept["text"]


# a body, and words of its refusal
BAD = [
    ({}, "one of text and input_ids is needed"),
    ({"input_ids": []}, "input_ids: is empty"),
    ({"input_ids": [1, [2]]}, "no token id"),
    ({"input_ids": [[1], 2]}, "mixes ids and lists"),
    ({"input_ids": [-1]}, "token"),
    ({"input_ids": ["a"]}, "input_ids[0]"),
    ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    (
        {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
        "sampling_params.max_new_tokens: -1 is too small",
    ),
    ({"input_ids": [1], "sampling_params": {"structural_tag": "{}"}}, "structural_tag: is not served"),
    ({"input_ids": [1], "image_data": "x"}, "image_data: is not served"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path: is not served"),
    ({"input_ids": [1] * 100_000}, "tokens"),
]


async def test_bad_input_is_400_and_named(scene_of, subtests):
    async with scene_of() as scene:
        for body, told in BAD:
            with subtests.test(told=told):
                response = await scene.client.post("/generate", json=body)
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert told in error["message"]


async def test_fields_of_other_engines_that_ask_for_nothing_are_taken(scene):
    answer = await generate(
        scene, input_ids=PROMPT, sampling_params=SLIME, image_data=None, lora_path=None, routed_dp_rank=None,
        bootstrap_host="x", return_indexer_topk=False, extra_key="salt", priority=1, session_id="s",
    )  # fmt: skip
    assert answer["output_ids"] == list(want(scene).token_ids)


async def test_what_the_gateway_makes_of_a_request_is_taken(scene):
    """SGLang's gateway (smg 1.13) reads bodies into types of its own and sends all that these have."""
    added = {
        "model": "unknown", "return_text_in_logprobs": False, "stream": False, "log_metrics": True,
        "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
    }  # fmt: skip
    body = {"input_ids": PROMPT, "sampling_params": SLIME, "return_logprob": True}
    answer = await generate(scene, **body, **added)
    assert answer["output_ids"] == list(want(scene).token_ids)
    refused = await scene.client.post("/generate", json={**body, **added, "return_bytes": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_bytes")


@pytest.mark.parametrize("drafter", ["ngram", ""])
async def test_drafts_have_the_names_that_trainers_read(drafter):
    """An engine without a drafter says nothing of drafts, so that no trainer takes 0 for a rate."""
    names = {"spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num", "spec_num_correct_drafts",
             "spec_num_proposed_drafts"}  # fmt: skip
    speculation = Speculation(drafter=drafter, budget=False) if drafter else None
    async with synthetic_engine(synthetic_config(speculation=speculation)) as engine:
        for _ in range(2):
            # the second time, what followed is known
            result = await engine.complete(PROMPT, SamplingParams(max_tokens=40, temperature=0.0, n=2))
            meta = [
                meta_of(sample, request_id="r", prompt_tokens=7, version="0", max_tokens=40, total_s=1.0)
                for sample in result.samples
            ]
        counters = engine.stats().scheduler
    if not drafter:
        assert not names & meta[0].keys()
        return
    assert names <= meta[0].keys()
    for sample, one in zip(result.samples, meta, strict=True):
        assert one["spec_verify_ct"] + one["spec_accept_token_num"] >= len(sample.token_ids) - 1
        assert one["spec_accept_token_num"] == one["spec_num_correct_drafts"]
        assert one["spec_draft_token_num"] == one["spec_num_proposed_drafts"] <= counters.drafted_tokens
