"""`/v1/chat/completions` by OpenAI's client: whole, streamed, and as Miles' sessions send it."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from fdasync_http import HttpConfig
from fdasync_http.front import Front
from fdasync_http.openai.answers import finish_of
from fdasync_http.openai.asked import Asked
from fdasync_http.openai.types import CompletionBody

from fdasync import SamplingParams
from fdasync.testing import expected, until

USER = {"role": "user", "content": "hi"}
BODY = {"model": "any", "messages": [USER], "max_tokens": 12, "seed": 7}


def prompt_of(tokenizer, messages=(USER,), **kwargs):
    return tokenizer.apply_chat_template(list(messages), **kwargs)


def want(scene, prompt, index=0, **params):
    made = SamplingParams(**{"max_tokens": 12, "seed": 7, **params})
    return list(expected(prompt, made, index, scene.oracle).token_ids)


async def raw(scene, **body):
    response = await scene.client.post("/v1/chat/completions", json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.ci(after=1)
async def test_a_whole_chat(chat, scripted):
    scene, openai = chat
    tokenizer = scripted(["x"]).tokenizer
    prompt = prompt_of(tokenizer)
    right = want(scene, prompt)
    made = await openai.chat.completions.create(
        **BODY, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
    )
    assert made.object == "chat.completion"
    assert made.id.startswith("chatcmpl-")
    assert made.model == "any"
    (choice,) = made.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
    assert len(choice.message.content) == 12
    assert (choice.token_ids, made.prompt_token_ids) == (right, prompt)
    assert [entry.token for entry in choice.logprobs.content] == list(choice.message.content)
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), 12)
    # a chat without a limit goes on to the end of the context
    body = {"model": "any", "messages": [USER], "seed": 7}
    made = await openai.chat.completions.create(**body)
    assert made.usage.total_tokens == 256
    named = await openai.chat.completions.create(**body, max_completion_tokens=3)
    assert named.usage.completion_tokens == 3


async def chunks_of(openai, **body):
    return [chunk async for chunk in await openai.chat.completions.create(**{**BODY, **body}, stream=True)]


async def test_a_streamed_chat(chat):
    scene, openai = chat
    whole = (await raw(scene, logprobs=True))["choices"][0]
    chunks = await chunks_of(
        openai, logprobs=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.prompt_token_ids
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole["message"]["content"]
    assert [chunk.choices[0].finish_reason for chunk in (first, *middle)] == [None] * (len(chunks) - 2)
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert (usage.choices, usage.usage.completion_tokens) == ([], 12)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    told = [entry.token for chunk in middle if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert told == [entry["token"] for entry in whole["logprobs"]["content"]]
    ids = [token for chunk in middle for token in getattr(chunk.choices[0], "token_ids", [])]
    assert len(ids) == 12
    assert len({chunk.id for chunk in chunks}) == 1


async def test_samples_are_told_apart_by_index(chat_of):
    async with chat_of() as (_, openai):
        made = await openai.chat.completions.create(**BODY, n=3)
        texts = [choice.message.content for choice in made.choices]
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        grown = ["", "", ""]
        roles = []
        for chunk in await chunks_of(openai, n=3):
            (choice,) = chunk.choices
            grown[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
        assert (grown, roles) == (texts, [0, 1, 2])
        stop = texts[0][3:5]
        cut = await openai.chat.completions.create(**BODY, stop=stop)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (texts[0][:3], "stop")


async def test_a_conversation_reaches_the_template_as_templates_read_it(chat_of, scripted):
    tokenizer = scripted(["x"]).tokenizer
    async with chat_of(tokenizer=tokenizer) as (_, openai):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await openai.chat.completions.create(
            model="any", max_tokens=1, reasoning_effort="low",
            messages=[
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "there"},
            ],
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        asked = tokenizer.asked[-1]
        first, second, third = asked["messages"]
        assert first["content"] == "a\nb"
        assert second["content"] == ""
        assert second["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
        assert third["tool_call_id"] == "1"
        assert asked["variables"] == {"enable_thinking": False, "reasoning_effort": "low"}
        assert asked["tools"] is None


async def test_a_session_of_miles(chat, scripted):
    """`input_ids` are the prompt; tokens, log-probs and rows stand in `meta_info`."""
    scene, _ = chat
    prompt = [5, 6, 7, 8, 9, 10, 11]
    right = want(scene, prompt)
    result = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, seed=7))
    session = {
        "input_ids": prompt, "logprobs": True, "return_meta_info": True, "return_routed_experts": True,
        "no_stop_trim": False, "chat_template_kwargs": {}, "lora_path": None,
    }  # fmt: skip
    for start in (0, 4):
        choice = (await raw(scene, **session, routed_experts_start_len=start))["choices"][0]
        meta = choice["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == right
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 12
        assert (meta["prompt_tokens"], meta["finish_reason"]) == (7, {"type": "length", "length": 12})
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        np.testing.assert_array_equal(rows.reshape(-1, *result.routing.array.shape[1:]), result.routing.array[start:])
        assert meta["routed_experts_start_len"] == start
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
        assert meta["weight_version"] == (await scene.client.get("/get_weight_version")).json()["weight_version"]
        assert isinstance(choice["message"]["content"], str)
    # a record of one token, asked for from behind its prompt on, has no row of its own
    behind = {"routed_experts_start_len": len(prompt)}
    meta = (await raw(scene, **session, **behind, max_tokens=1))["choices"][0]["meta_info"]
    assert (meta["routed_experts"], meta["routed_experts_start_len"]) == ("", len(prompt))
    choice = (await raw(scene, input_ids=prompt, return_meta_info=True))["choices"][0]
    assert "routed_experts" not in choice["meta_info"]


async def test_no_rows_no_key_unless_the_session_names_a_start(chat_of):
    async with chat_of() as (scene, _):
        await scene.client.post("/pause_generation", json={"mode": "in_place"})
        body = {"input_ids": [1, 2, 3], "logprobs": True, "return_meta_info": True, "return_routed_experts": True}
        calls = [asyncio.ensure_future(raw(scene, **body, **start)) for start in ({}, {"routed_experts_start_len": 2})]
        await until(lambda: scene.generator.load().live == 2)
        await scene.client.post("/abort_request", json={"abort_all": True})
        plain, named = [(await call)["choices"][0] for call in calls]
        assert "routed_experts" not in plain["meta_info"]
        assert named["meta_info"]["routed_experts"] == ""
        for choice in (plain, named):
            meta = choice["meta_info"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "")
            assert meta["finish_reason"]["type"] == "abort"
            assert meta["finish_reason"]["message"].startswith("Abort before prefill")
            assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 0


@pytest.mark.parametrize(("dialect", "priority"), [("sglang", 3), ("vllm", -3)])
async def test_priorities_are_of_the_dialect(scene_of, dialect, priority):
    async with scene_of() as scene:
        front = Front(scene.generator, HttpConfig(dialect=dialect), None)
        body = CompletionBody(prompt="a", priority=3)
        asked = Asked(front, body, "a", prefix="cmpl", max_tokens=1, with_logprobs=False, top_logprobs=0)
        assert asked.options["priority"] == priority


async def test_rows_are_in_the_last_chunk_alone(chat_of):
    async with chat_of() as (scene, openai):
        whole = (await raw(scene, routed_experts_prompt_start=2))["choices"][0]
        chunks = await chunks_of(openai, extra_body={"routed_experts_prompt_start": 2})
        rows = [getattr(chunk.choices[0], "routed_experts", None) for chunk in chunks]
        assert rows == [None] * (len(chunks) - 1) + [whole["routed_experts"]]


async def test_a_deadline_is_an_abort(scene_of):
    async with scene_of() as scene:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        result = await scene.generator.complete([1, 2], params, deadline_s=0.01)
        assert (result.finish_reason, finish_of(result.samples[0], calls_tools=True)) == ("deadline", "abort")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_and_a_pause_are_answers(chat_of, stream):
    async with chat_of() as (scene, openai):
        long = {"model": "any", "messages": [USER], "stream": stream, "extra_body": {"ignore_eos": True, "rid": "mine"}}

        async def reason():
            made = await openai.chat.completions.create(**long)
            if not stream:
                return made.choices[0].finish_reason
            return [chunk async for chunk in made][-1].choices[0].finish_reason

        call = asyncio.ensure_future(reason())
        await until(lambda: scene.generator.load().running == 1)
        await scene.client.post("/abort_request", json={"rid": "mine"})
        assert await call == "abort"
        await scene.client.post("/pause_generation", json={"mode": "in_place"})
        waits = asyncio.ensure_future(reason())
        await until(lambda: scene.generator.load().live == 1)
        assert not waits.done()
        await scene.client.post("/pause_generation", json={"mode": "abort"})
        assert await waits == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(chat_of, stream):
    async with chat_of() as (scene, openai):
        body = {"model": "any", "messages": [USER], "extra_body": {"ignore_eos": True}}

        async def read():
            made = await openai.chat.completions.create(**body, stream=stream)
            async for _ in made:
                pass

        call = asyncio.ensure_future(read())
        await until(lambda: scene.generator.load().running == 1)
        call.cancel()
        await until(lambda: not scene.generator.load().live)
        if stream:
            made = await openai.chat.completions.create(**body, stream=True)
            await anext(aiter(made))
            await made.close()
            await until(lambda: not scene.generator.load().live)
