"""Errors as OpenAI's client raises them, what it repeats, and what is refused by name."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai as library
import pytest

from fdasync.testing import until

USER = {"role": "user", "content": "hi"}
KEY = "sk-0123456789abcdef"
LONG = {"model": "any", "prompt": [1, 2, 3], "max_tokens": 200, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_a_bad_request(chat_of, stream):
    async with chat_of(client={"max_retries": 5}) as (scene, openai):
        for call in (
            openai.completions.create(model="any", prompt=[1] * 300, stream=stream),
            openai.completions.create(model="any", prompt=[1, 2], max_tokens=300, stream=stream),
            openai.completions.create(model="any", prompt="a" * 300, stream=stream),
            openai.chat.completions.create(model="any", messages=[{**USER, "content": "a" * 300}], stream=stream),
            openai.chat.completions.create(model="any", messages=[{**USER, "content": "a" * 30_000}], stream=stream),
        ):
            with pytest.raises(library.BadRequestError) as refused:
                await call
            assert refused.value.code == "context_length_exceeded"
            assert set(refused.value.body) == {"message", "type", "param", "code"}
            assert refused.value.type == "invalid_request_error"
        assert not scene.generator.load().live


async def test_a_wrong_key_and_a_wrong_model(chat_of):
    async with chat_of(api_key=KEY, dialect="vllm") as (_, openai):
        with pytest.raises(library.AuthenticationError):
            await openai.with_options(api_key="sk-wrong-0123456789").models.list()
        for name in ("gpt-9", "a/b"):
            with pytest.raises(library.NotFoundError) as refused:
                await openai.models.retrieve(name)
            assert refused.value.code == "model_not_found"
            with pytest.raises(library.NotFoundError):
                await openai.chat.completions.create(model=name, messages=[USER])
        with pytest.raises(library.NotFoundError):
            await openai.embeddings.create(model="synthetic", input="hi")
        made = await openai.chat.completions.create(model="synthetic", messages=[USER], max_tokens=1)
        assert made.model == "synthetic"


@pytest.mark.parametrize(
    ("dialect", "unknown", "served"),
    [("sglang", "auto", True), ("vllm", "auto", False), ("sglang", "refuse", False), ("vllm", "serve", True)],
)
async def test_the_settings_say_whether_an_unknown_model_is_served(chat_of, dialect, unknown, served):
    async with chat_of(dialect=dialect, unknown_models=unknown) as (_, openai):
        asking = openai.chat.completions.create(model="gpt-9", messages=[USER], max_tokens=1)
        if served:
            assert (await asking).choices
            return
        with pytest.raises(library.NotFoundError) as refused:
            await asking
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_server_is_asked_again(chat_of, stream):
    """429 with `retry-after`, which the client waits for; it gives up without retries."""
    met = []

    async def on_response(response):
        if response.status_code == 429:
            met.append(response.headers["retry-after"])
            scene.generator.abort_all()
            await until(lambda: not scene.generator.load().live)

    async with (
        httpx2.AsyncClient(event_hooks={"response": [on_response]}) as http,
        chat_of(max_live=1, client={"http_client": http}) as (scene, openai),
    ):
        for retries in (0, 2):
            held = asyncio.ensure_future(scene.client.post("/v1/completions", json=plain(LONG)))
            await until(lambda: scene.generator.load().running == 1)
            call = openai.with_options(max_retries=retries).completions.create(
                model="any", prompt=[1], max_tokens=2, stream=stream
            )
            if not retries:
                with pytest.raises(library.RateLimitError):
                    await call
            else:
                made = await call
                if stream:
                    assert [chunk.choices[0].finish_reason async for chunk in made][-1] == "length"
                else:
                    assert made.usage.completion_tokens == 2
            assert (await held).json()["choices"][0]["finish_reason"] == "abort"
        assert met == ["1", "1"]


def plain(body):
    return {**{name: value for name, value in body.items() if name != "extra_body"}, **body["extra_body"]}


async def test_a_name_that_is_live_is_a_conflict(chat_of):
    async with chat_of() as (scene, openai):
        body = {**LONG, "extra_body": {"ignore_eos": True, "request_id": "mine"}}
        held = asyncio.ensure_future(openai.completions.create(**body))
        await until(lambda: scene.generator.load().running == 1)
        with pytest.raises(library.ConflictError):
            await openai.completions.create(**body)
        scene.generator.abort("mine")
        assert (await held).id == "mine"


async def test_an_error_inside_a_stream_is_raised(chat_of):
    async with chat_of(tokenizer=Broken()) as (scene, openai):
        stream = await openai.completions.create(model="any", prompt=[1, 2], max_tokens=9, stream=True, logprobs=0)
        with pytest.raises(library.APIError, match="a defect"):
            async for _ in stream:
                pass
        await until(lambda: not scene.generator.load().live)


class Broken:
    """Cannot decode a token on its own, after the first."""

    def __init__(self):
        self.singles = 0

    def encode(self, text):
        return [1]

    def decode(self, token_ids):
        if len(token_ids) == 1 and token_ids[0] == -1:
            raise ValueError
        return "x" * len(token_ids)

    def with_specials(self):
        return Fragile()


class Fragile(Broken):
    """What names tokens."""

    def decode(self, token_ids):
        self.singles += 1
        if self.singles > 2:
            raise ValueError("no such token")
        return "x"


CHAT = {"messages": [USER], "max_tokens": 1}


# a path, what is sent there, and the field that the refusal names
REFUSED = [
    ("chat/completions", {"temprature": 1}, "temprature"),
    ("chat/completions", {"temperature": "hot"}, "temperature"),
    ("chat/completions", {"temperature": -1}, "temperature"),
    ("chat/completions", {"n": 0}, "n"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 65}, "top_logprobs"),
    ("chat/completions", {"response_format": {"type": "poem"}}, "response_format"),
    ("chat/completions", {"structured_outputs": {"poem": "a"}}, "structured_outputs.poem"),
    ("chat/completions", {"guided_json": 3}, "guided_json"),
    ("chat/completions", {"lora_path": "x"}, "lora_path"),
    ("chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ("chat/completions", {"messages": ["x"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]"),
    ("chat/completions", {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f",
     "arguments": "{"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
    ("chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ("chat/completions", {"tools": [{"type": "web", "function": {"name": "x"}}]}, "tools[0].type"),
    ("chat/completions", {"routed_experts_prompt_start": 0, "return_routed_experts": True},
     "routed_experts_prompt_start"),
    ("chat/completions", {"echo": True}, "echo"),
    ("chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
    ("completions", {"prompt": "a", "suffix": "x"}, "suffix"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {}, ""),
]  # fmt: skip


async def test_what_is_not_served_is_refused_by_name(chat_of, subtests):
    async with chat_of() as (scene, _):
        for path, body, param in REFUSED:
            with subtests.test(path=path, body=body):
                start = CHAT if path.startswith("chat") else {}
                response = await scene.client.post(f"/v1/{path}", json={**start, **body})
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert (error["param"] or "").startswith(param), error
                assert param.split(".")[-1].split("[")[0] in error["message"], error


async def test_fields_that_ask_for_nothing_are_taken(chat_of):
    async with chat_of() as (scene, openai):
        made = await openai.chat.completions.create(
            model="any", messages=[USER], max_tokens=1, user="u", metadata={"a": "b"}, store=False,
            service_tier="auto", parallel_tool_calls=True, response_format={"type": "text"}, tools=[],
            extra_body={"lora_path": None, "structured_outputs": None, "guided_json": None, "echo": None,
                        "session_id": "s", "stop": None, "temperature": None, "best_of": 1},
        )  # fmt: skip
        assert made.usage.completion_tokens == 1
        response = await scene.client.post("/v1/chat/completions", content=json.dumps({"messages": [USER], "n": None}))
        assert response.status_code == 200
