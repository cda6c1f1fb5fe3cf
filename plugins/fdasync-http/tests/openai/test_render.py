"""`/v1/chat/completions/render`: a body of `/inference/v1/generate`, which answers it as the chat is answered."""

from __future__ import annotations

import pytest

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODY = {"messages": [USER], "seed": 7}


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine", "router"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 9, "n": 2, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": True},
        {"max_completion_tokens": 9, "stop_token_ids": [3], "repetition_penalty": 1.1, "tools": [LOOK],
         "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 2, "ignore_eos": True, "stop": ["a"]},
    ],
)  # fmt: skip
async def test_what_is_rendered_generates_what_the_chat_does(chat_of, kind, more):
    async with chat_of(kind) as (scene, _):

        async def post(path, body):
            response = await scene.client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        chat = await post("/v1/chat/completions", {**BODY, **more, "return_token_ids": True})
        rendered = await post("/v1/chat/completions/render", {**BODY, **more, "model": "any"})
        assert rendered["token_ids"] == chat["prompt_token_ids"]
        assert (rendered["model"], rendered["stream"], rendered["features"]) == ("any", False, None)
        assert rendered["request_id"].startswith("chatcmpl-")
        made = await post("/inference/v1/generate", {**rendered, "model": None})
        assert [one["token_ids"] for one in made["choices"]] == [one["token_ids"] for one in chat["choices"]]
        assert scene.generator.load().live == 0


async def test_what_it_tells_of_the_request(chat_of):
    async with chat_of(dialect="vllm") as (scene, _):

        async def post(**body):
            return (await scene.client.post("/v1/chat/completions/render", json={**BODY, **body})).json()

        told = await post(
            stream=True, stream_options={"include_usage": True}, cache_salt="s", priority=3, request_id="mine",
            routed_experts_prompt_start=4, logprobs=True, top_logprobs=2, prompt_logprobs=1,
        )  # fmt: skip
        assert (told["stream"], told["stream_options"]["include_usage"], told["cache_salt"]) == (True, True, "s")
        assert (told["priority"], told["request_id"]) == (3, "mine")
        sampling = told["sampling_params"]
        assert (sampling["routed_experts_prompt_start"], sampling["logprobs"], sampling["prompt_logprobs"]) == (4, 2, 1)
        schema = {"type": "object"}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for body, outputs in (
            ({"response_format": form}, {"json": '{"type":"object"}'}),
            ({"regex": "[ab]"}, {"regex": "[ab]"}),
            ({"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
            ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
            ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ):
            assert (await post(**body))["sampling_params"]["structured_outputs"] == outputs


async def test_what_a_chat_refuses_it_refuses(chat_of):
    async with chat_of(dialect="vllm") as (scene, _):
        for body, status, param in (
            ({"model": "gpt-9"}, 404, "model"),
            ({"messages": []}, 400, "messages"),
            ({"messages": [{"role": "king", "content": ""}]}, 400, "messages"),
            ({"chat_template": "x"}, 400, "chat_template"),
            ({"tools": [LOOK], "tool_choice": "required"}, 400, "tool_choice"),
        ):
            response = await scene.client.post("/v1/chat/completions/render", json={**BODY, **body})
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
