"""Answers that are held to a format: OpenAI's client on a server over a checkpoint, and every dialect's own words."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from fdasync_http import HttpConfig, app
from fdasync_http.server import Listen, serving
from fdasync_transformers import make_random_checkpoint
from openai import AsyncOpenAI, BadRequestError

from fdasync import Engine, EngineConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }} call as <tool_call>{"name": <name>, "arguments": <object>}</tool_call>'
    "{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "deep": {"$ref": "#/$defs/deep"}},
    "$defs": {"deep": {"type": "object", "properties": {"n": {"const": 5}}, "required": ["n"]}},
    "required": ["kind", "deep"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SCHEMA["$defs"]["deep"]["additionalProperties"] = False
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
GO = {"type": "function", "function": {"name": "go", "parameters": {"const": {}}}}
USER = {"role": "user", "content": "hi"}

WRONG = {"type": "function", "function": {"name": "go", "parameters": {"type": "nonsense"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(path, "qwen3_moe", size="tiny")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, AsyncOpenAI]]:
    runner = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
    sizes = {"max_context_tokens": 2048, "num_blocks": 400, "max_running": 4, "max_step_tokens": 256}
    config = EngineConfig(model=str(folder), runner_config=runner, process="inline", **sizes)
    async with Engine(config) as engine:
        service = app(engine, HttpConfig())
        async with (
            serving(service, Listen(port=0, drain_s=1.0)) as served,
            httpx2.AsyncClient(base_url=served.url, timeout=300) as client,
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300) as openai,
        ):
            yield client, openai


def right(value: Any) -> bool:
    return set(value) == {"kind", "deep"} and value["kind"] in ("a", "bc") and value["deep"] == {"n": 5}


@pytest.mark.ci
async def test_formats_of_chats_and_completions(folder: Path) -> None:
    async with server(folder) as (_, openai):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        chat = await openai.chat.completions.create(
            model="x", messages=[USER], response_format=form, n=2, seed=1, logprobs=True, max_tokens=100
        )
        for choice in chat.choices:
            assert choice.finish_reason == "stop"
            assert right(json.loads(choice.message.content))
        stream = await openai.chat.completions.create(
            model="x", messages=[USER], response_format=form, seed=1, stream=True, max_tokens=100
        )
        text = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        assert text == chat.choices[0].message.content
        for more, texts in (
            ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
            ({"regex": "[ab]c"}, ("ac", "bc")),
            ({"ebnf": 'root ::= "x" | "y"'}, ("x", "y")),
        ):
            completion = await openai.completions.create(model="x", prompt="hi", extra_body=more)
            assert completion.choices[0].text in texts
            assert completion.choices[0].finish_reason == "stop"


@pytest.mark.ci
async def test_calls_are_forced(folder: Path) -> None:
    async with server(folder) as (_, openai):

        async def call(choice: Any, **more: Any) -> Any:
            return await openai.chat.completions.create(
                model="x", messages=[USER], tools=[LOOK, GO], tool_choice=choice, seed=2, max_tokens=600, **more
            )

        for choice, names in (
            ({"type": "function", "function": {"name": "look"}}, {"look"}),
            ({"type": "function", "function": {"name": "go"}}, {"go"}),
            ("required", {"look", "go"}),
        ):
            answer = (await call(choice, parallel_tool_calls=False)).choices[0]
            (made,) = answer.message.tool_calls
            assert made.function.name in names
            arguments = json.loads(made.function.arguments)
            assert right(arguments) if made.function.name == "look" else arguments == {}
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", "")
        many = (await call("required")).choices[0]
        assert many.message.tool_calls
        stream = await call("required", parallel_tool_calls=False, stream=True)
        deltas = [event.choices[0].delta async for event in stream if event.choices]
        (streamed,) = [one for delta in deltas for one in delta.tool_calls or ()]
        assert (streamed.function.name, json.loads(streamed.function.arguments)) == (made.function.name, arguments)
        for choice, words in (
            ("king", "none of auto"),
            ({"type": "function", "function": {"name": "fly"}}, "look, go"),
        ):
            with pytest.raises(BadRequestError, match=words) as refused:
                await call(choice)
            assert refused.value.param == "tool_choice"
        with pytest.raises(BadRequestError, match="no other format"):
            await call("required", response_format={"type": "json_object"})
        with pytest.raises(BadRequestError, match="needs tools"):
            await openai.chat.completions.create(model="x", messages=[USER], tool_choice="required")


async def test_native_dialects_have_their_own_words(folder: Path) -> None:
    async with server(folder) as (client, _):
        sampling = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 100}
        answer = await client.post("/generate", json={"text": "hi", "sampling_params": sampling})
        assert right(json.loads(answer.json()["text"]))
        sampling = {"structured_outputs": {"regex": "[ab]c"}, "max_tokens": 10}
        body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
        answer = await client.post("/inference/v1/generate", json=body)
        assert bytes(answer.json()["choices"][0]["token_ids"][:2]).decode() in ("ac", "bc")
        sampling = {"grammar": {"kind": "regex", "text": "[ab]c"}, "max_tokens": 10}
        answer = await client.post("/v1/rollout", json={"token_ids": [1, 2, 3], "sampling": sampling})
        assert answer.status_code == 200
        # errors name what the client sent
        regex = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a"}}}
        for path, bad, param in (
            ("/generate", {"text": "hi", "sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
            ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"ebnf": "x"}]}, "sampling_params[1].ebnf"),
            ("/generate", {"text": "hi", "sampling_params": {"json_schema": "x"}}, "sampling_params.json_schema"),
            ("/generate", {"text": "hi", "stream": True, "sampling_params": {"ebnf": "x"}}, "sampling_params.ebnf"),
            (
                "/inference/v1/generate",
                {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "(a"}}},
                "sampling_params.structured_outputs.regex",
            ),
            (
                "/v1/rollout",
                {"token_ids": [1], "sampling": {"grammar": {"kind": "regex", "text": "("}}},
                "sampling.grammar",
            ),
            ("/v1/completions", {"prompt": "hi", "regex": "(a"}, "regex"),
            ("/v1/completions", {"prompt": "hi", "regex": ""}, "regex"),
            ("/v1/completions", {"prompt": "hi", "guided_json": {"if": {}}}, "guided_json"),
            ("/v1/completions", {"prompt": "hi", "regex": "a", "ignore_eos": True}, "regex"),
            ("/v1/completions", {"prompt": "hi", "regex": "(a", "stream": True}, "regex"),
            ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
            ("/v1/chat/completions", {"messages": [USER], "response_format": regex}, "response_format"),
            ("/v1/chat/completions", {"messages": [USER], "response_format": regex, "stream": True}, "response_format"),
            ("/v1/chat/completions", {"messages": [USER], "tools": [WRONG], "tool_choice": "required"}, "tool_choice"),
        ):
            answer = await client.post(path, json=bad)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert error["message"].startswith(f"{param}: ")


@pytest.mark.ci
async def test_formats_and_forced_calls_of_responses(folder: Path) -> None:
    async with server(folder) as (_, openai):
        look = {"type": "function", **LOOK["function"]}
        form = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}
        sent: dict[str, Any] = {"model": "x", "input": "hi", "max_output_tokens": 600, "extra_body": {"seed": 1}}
        made = await openai.responses.create(**sent, text=form)
        assert right(json.loads(made.output_text))
        assert made.status == "completed"
        made = await openai.responses.create(**sent, text={"format": {"type": "json_object"}})
        assert made.text.format.type == "json_object"
        for choice in ("required", {"type": "function", "name": "look"}):
            async with openai.responses.stream(**sent, tools=[look], tool_choice=choice) as stream:
                streamed = await stream.get_final_response()
            made = await openai.responses.create(**sent, tools=[look], tool_choice=choice, parallel_tool_calls=False)
            for response in (made, streamed):
                assert {item.type for item in response.output} == {"function_call"}
                assert right(json.loads(response.output[0].arguments))
        with pytest.raises(BadRequestError) as refused:
            await openai.responses.create(**sent, tools=[look], tool_choice="required", text=form)
        assert refused.value.param == "tool_choice"


@pytest.mark.ci
async def test_formats_and_forced_calls_of_messages(folder: Path) -> None:
    async with (
        server(folder) as (client, _),
        AsyncAnthropic(base_url=str(client.base_url), api_key="none", max_retries=0, timeout=60.0) as claude,
    ):
        look = {"name": "look", "input_schema": SCHEMA}
        sent: dict[str, Any] = {"model": "x", "messages": [USER], "max_tokens": 600, "extra_body": {"seed": 1}}
        made = await claude.messages.create(**sent, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        assert right(json.loads(made.content[0].text))
        assert made.stop_reason == "end_turn"
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
            async with claude.messages.stream(**sent, tools=[look], tool_choice=choice) as stream:
                streamed = await stream.get_final_message()
            for message in (await claude.messages.create(**sent, tools=[look], tool_choice=choice), streamed):
                assert [block.type for block in message.content] == ["tool_use"]
                assert right(message.content[0].input)
                assert message.stop_reason == "tool_use"


async def test_a_rendered_format_is_kept(folder: Path) -> None:
    async with server(folder) as (client, _):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"messages": [USER], "response_format": form, "max_tokens": 600, "seed": 1}
        chat = (await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})).json()
        rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
        made = (await client.post("/inference/v1/generate", json={**rendered, "output_mode": "text"})).json()
        assert made["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
        assert right(json.loads(chat["choices"][0]["message"]["content"]))
        # a call that is forced has no words there
        body = {"messages": [USER], "tools": [LOOK], "tool_choice": "required"}
        refused = await client.post("/v1/chat/completions/render", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
