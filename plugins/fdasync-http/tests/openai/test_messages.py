"""`/v1/messages` by Anthropic's client: texts, calls, thinking, whole and as events, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager

import anthropic as library
import httpx2
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message
from fdasync_http.anthropic.serve import chat_of
from fdasync_http.anthropic.types import MessagesBody

from fdasync import SamplingParams
from fdasync.testing import until

USER = {"role": "user", "content": "hi"}
KEY = "sk-0123456789abcdef"
LOOK = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
SHOWN = [{"function": {"name": "look"}}]
CALL = '{"name": "look", "arguments": {"at": 1, "to": "é"}}'
BODY = {"model": "any", "messages": [USER], "max_tokens": 12}


@pytest.fixture
def claude_of(chat_of):
    """A scene, and Anthropic's client of it."""

    @asynccontextmanager
    async def make(kind="engine", client=None, **config):
        async with chat_of(kind, **config) as (scene, _):
            settings = {"api_key": config.get("api_key", "none"), "max_retries": 0, "timeout": 300.0, **(client or {})}
            async with AsyncAnthropic(base_url=scene.url, **settings) as claude:
                yield scene, claude

    return make


@pytest.fixture
async def claude(kind, claude_of):
    async with claude_of(kind) as made:
        yield made


def told(message):
    """What a Message says, without the names that are drawn."""
    fields = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    return [(block.type, *[getattr(block, name) for name in fields[block.type]]) for block in message.content]


async def both(claude, **body):
    """The Message of a whole answer, and the events of a stream, which the client puts together to the same."""
    body = {**BODY, **body}
    whole = await claude.messages.create(**body)
    async with claude.messages.stream(**body) as stream:
        put_together = await stream.get_final_message()
    assert told(put_together) == told(whole)
    events = [event async for event in await claude.messages.create(**body, stream=True)]
    for message in (put_together, events[-2].delta):
        assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    for usage in (whole.usage, put_together.usage, events[-2].usage):
        assert usage.output_tokens == whole.usage.output_tokens
        assert tokens_in(usage) == tokens_in(whole.usage)
    assert (events[0].type, [event.type for event in events[-2:]]) == (
        "message_start", ["message_delta", "message_stop"]
    )  # fmt: skip
    # one block behind the other
    at, is_open = -1, False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            at, is_open = at + 1, True
        assert (event.index, is_open) == (at, True)
        is_open = event.type != "content_block_stop"
    assert (at, is_open) == (len(whole.content) - 1, False)
    return whole, events


def tokens_in(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@pytest.mark.ci(after=1)
async def test_a_text(claude, scripted):
    scene, client = claude
    whole, events = await both(client, extra_body={"seed": 7, "return_token_ids": True})
    prompt = scripted(["x"]).tokenizer.apply_chat_template([USER])
    right = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, seed=7))
    for message in (whole, events[-2]):
        assert (message.token_ids, message.prompt_token_ids) == (list(right.token_ids), prompt)
    assert whole.id.startswith("msg_")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "any")
    assert (whole.stop_reason, whole.stop_sequence, len(told(whole)[0][1])) == ("max_tokens", None, 12)
    assert (tokens_in(whole.usage), whole.usage.output_tokens) == (len(prompt), 12)
    assert Message.model_validate(whole.to_dict())
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert {event.type for event in events[2:-3]} == {"content_block_delta"}


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_calls_and_their_results(claude_of, scripted_turns, kind):
    turn = [USER, {"role": "assistant", "content": "I see."}, {"role": "tool", "content": "there"},
            {"role": "user", "content": "so?"}]  # fmt: skip
    pieces = ["I ", "see. ", "<tool_call>", CALL[:9], CALL[9:], "</tool_call>", "<tool_call>", '{"name": "go"}',
              "</tool_call>"]  # fmt: skip
    model = scripted_turns([(pieces, [USER]), (["It is ", "so."], turn)], tools=SHOWN)
    async with claude_of(kind, tokenizer=model.tokenizer) as (_, client):
        more = {"tools": [LOOK], "extra_body": model.more, "max_tokens": 30}
        whole, events = await both(client, **more)
        assert told(whole) == [("text", "I see."), ("tool_use", "look", {"at": 1, "to": "é"}), ("tool_use", "go", {})]
        assert whole.stop_reason == "tool_use"
        assert whole.content[1].id.startswith("toolu_")
        names = [event.type for event in events if getattr(event, "index", None) == 1]
        assert names == ["content_block_start", "content_block_delta", "content_block_stop"]
        result = {"type": "tool_result", "tool_use_id": whole.content[1].id,
                  "content": [{"type": "text", "text": "there"}], "is_error": False}  # fmt: skip
        content = [result, {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}]
        messages = [USER, {"role": "assistant", "content": whole.content[:2]}, {"role": "user", "content": content}]
        after, _ = await both(client, messages=messages, **more)
        assert (told(after), after.stop_reason) == ([("text", "It is so.")], "end_turn")
        asked = model.tokenizer.asked[-1]
        _, assistant, tool, last = asked["messages"]
        function = {"name": "look", "arguments": {"at": 1, "to": "é"}}
        assert assistant["tool_calls"] == [{"id": whole.content[1].id, "type": "function", "function": function}]
        assert (tool["tool_call_id"], tool["name"], tool["content"]) == (whole.content[1].id, "look", "there")
        assert last["content"] == "so?"
        shown = {"name": "look", "description": "looks", "parameters": LOOK["input_schema"]}
        assert asked["tools"] == [{"type": "function", "function": shown}]
        none = await client.messages.create(**{**BODY, **more, "tool_choice": {"type": "none"}})
        assert none.stop_reason != "tool_use"
        assert model.tokenizer.asked[-1]["tools"] is None


async def test_thinking_is_a_block_of_its_own_and_comes_back(claude_of, scripted):
    model = scripted(["(hm", "m)", "It is", " so."], template="", declares=True)
    async with claude_of(tokenizer=model.tokenizer) as (_, client):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        whole, events = await both(client, extra_body=model.more, thinking=thinking)
        assert told(whole) == [("thinking", "hmm"), ("text", "It is so.")]
        assert {event.delta.type for event in events if event.type == "content_block_delta"} == {
            "thinking_delta", "text_delta",
        }  # fmt: skip
        assert model.tokenizer.asked[-1]["variables"] == {"enable_thinking": True, "thinking": True}
        disabled = {"type": "disabled"}
        messages = [USER, {"role": "assistant", "content": whole.content}, USER]
        await client.messages.create(**{**BODY, "messages": messages, "thinking": disabled})
        asked = model.tokenizer.asked[-1]
        assert (asked["messages"][1]["content"], asked["messages"][1]["reasoning_content"]) == ("It is so.", "hmm")
        assert asked["variables"] == {"enable_thinking": False, "thinking": False}


@pytest.mark.ci(after=1)
async def test_stop_sequences_are_told(claude):
    _, client = claude
    plain = await client.messages.create(**BODY, extra_body={"seed": 7})
    text = plain.content[0].text
    whole, _ = await both(client, stop_sequences=["nowhere", text[3:5]], extra_body={"seed": 7})
    assert (told(whole), whole.stop_reason, whole.stop_sequence) == (
        [("text", text[:3])], "stop_sequence", text[3:5]
    )  # fmt: skip
    # a message that says nothing has no blocks
    whole, _ = await both(client, stop_sequences=[text[:2]], extra_body={"seed": 7})
    assert (told(whole), whole.stop_sequence) == ([], text[:2])
    after = await client.messages.create(**{**BODY, "messages": [USER, whole.to_param(), USER]})
    assert after.usage.output_tokens == 12


async def test_an_answer_goes_on_with_what_the_assistant_began(claude_of, scripted):
    tokenizer = scripted(["x"]).tokenizer
    async with claude_of(tokenizer=tokenizer) as (scene, client):
        messages = [USER, {"role": "assistant", "content": "It is"}]
        whole, _ = await both(client, messages=messages, extra_body={"seed": 7})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        right = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, seed=7))
        assert told(whole) == [("text", tokenizer.decode(right.token_ids))]


async def test_how_to_sample_is_the_client_s_word(claude, scripted):
    scene, client = claude
    whole, _ = await both(client, extra_body={"temperature": 0, "return_token_ids": True})
    prompt = scripted(["x"]).tokenizer.apply_chat_template([USER])
    right = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, temperature=0))
    assert whole.token_ids == list(right.token_ids)
    # the synthetic runner draws from all tokens
    body = MessagesBody(messages=[USER], max_tokens=3, temperature=0.5, top_p=0.9, top_k=3, seed=5, min_p=0.1)
    asked = chat_of(body)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.min_p) == (0.5, 0.9, 3, 5, 0.1)


async def test_what_reaches_the_template(claude_of, scripted):
    tokenizer = scripted(["x"]).tokenizer
    async with claude_of(tokenizer=tokenizer) as (_, client):
        await client.messages.create(
            model="any", max_tokens=1, metadata={"user_id": "u"},
            system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "And kind."}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                      {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, USER],
            output_config={"effort": "low"}, extra_body={"top_k": 3, "top_p": 0.9, "temperature": 0.5},
        )  # fmt: skip
        asked = tokenizer.asked[-1]
        messages = [(one["role"], one["content"]) for one in asked["messages"]]
        assert messages == [("system", "Be brief.\nAnd kind."), ("user", "a\nb\nc"), ("assistant", "d"), ("user", "hi")]
        assert asked["variables"] == {"reasoning_effort": "low"}


async def test_tokens_are_counted_as_a_message_has_them(claude):
    _, client = claude
    body = {"model": "any", "messages": [USER], "system": "Be brief.", "tools": [LOOK]}
    counted = await client.messages.count_tokens(**body)
    made = await client.messages.create(**body, max_tokens=1)
    assert counted.input_tokens == tokens_in(made.usage) > 20
    with pytest.raises(library.BadRequestError, match=r"messages\[0\].role"):
        await client.messages.count_tokens(model="any", messages=[{"role": "king", "content": ""}])


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_rows_are_there_where_they_are_asked_for(claude_of, scripted, kind):
    tokenizer = scripted(["x"]).tokenizer
    async with claude_of(kind, tokenizer=tokenizer) as (scene, client):
        extra = {"seed": 7, "return_routed_experts": True, "return_meta_info": True}
        whole, events = await both(client, extra_body=extra)
        right = await scene.generator.complete(
            tokenizer.apply_chat_template([USER]), SamplingParams(max_tokens=12, seed=7)
        )
        for message in (whole, events[-2]):
            rows = np.frombuffer(base64.b64decode(message.meta_info["routed_experts"]), "<i4")
            np.testing.assert_array_equal(rows.reshape(-1, *right.routing.array.shape[1:]), right.routing.array)
            assert [token for _, token, _ in message.meta_info["output_token_logprobs"]] == list(right.token_ids)
        assert not hasattr(await client.messages.create(**BODY), "meta_info")


@pytest.mark.ci
async def test_a_limit_beyond_the_context_means_what_the_context_leaves(claude):
    _, client = claude
    whole, _ = await both(client, max_tokens=1000, extra_body={"seed": 7})
    assert (tokens_in(whole.usage) + whole.usage.output_tokens, whole.stop_reason) == (
        256, "model_context_window_exceeded"
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_is_an_answer(claude_of, stream):
    async with claude_of() as (scene, client):

        async def reason():
            made = await client.messages.create(
                model="x",
                messages=[USER],
                max_tokens=230,
                stream=stream,
                extra_body={"ignore_eos": True, "rid": "mine"},
            )
            return [event async for event in made][-2].delta.stop_reason if stream else made.stop_reason

        call = asyncio.ensure_future(reason())
        await until(lambda: scene.generator.load().running == 1)
        await scene.client.post("/abort_request", json={"rid": "mine"})
        assert await call == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(claude_of, stream):
    async with claude_of() as (scene, client):

        async def read():
            made = await client.messages.create(
                model="x", messages=[USER], max_tokens=230, extra_body={"ignore_eos": True}, stream=stream
            )
            async for _ in made:
                pass

        call = asyncio.ensure_future(read())
        await until(lambda: scene.generator.load().running == 1)
        call.cancel()
        await until(lambda: not scene.generator.load().live)


# what is sent, and the field that the message begins with
REFUSED = [
    ({"temprature": 1}, "temprature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"top_k": -7}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "auto"}}, "compaction"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
    # the synthetic runner keeps no such format
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "output_config.format"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "leap"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": ["any"]}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": ["look"]}}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 30_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
     "messages[1].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
        {"type": "image"}]}]}]}, "messages[0].content[0].content[0]"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f",
     "input": "x"}]}]}, "messages[1].content[0].input"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f",
     "input": {}}]}]}, "messages"),
]  # fmt: skip


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_served_is_refused_by_name(claude, subtests, stream):
    scene, _ = claude
    for body, param in REFUSED:
        with subtests.test(body=str(body)[:80]):
            response = await scene.client.post("/v1/messages", json={**BODY, **body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, set(response.json())) == (400, {"type", "error"})
            assert error["type"] == "invalid_request_error"
            assert set(error) <= {"type", "message", "details"}
            assert param in error["message"], error


async def test_what_changes_nothing_is_taken(claude_of):
    async with claude_of() as (_, client):
        kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        made = await client.beta.messages.create(
            **BODY, service_tier="auto", cache_control={"type": "ephemeral"}, context_management=kept,
            thinking={"type": "adaptive"}, betas=["context-management-2025-06-27"],
            tools=[{**LOOK, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}],
            extra_body={"container": None, "mcp_servers": []},
        )  # fmt: skip
        assert made.usage.output_tokens == 12


@pytest.mark.parametrize("sent", ["x-api-key", "authorization"])
async def test_keys_come_as_either_header_and_errors_are_anthropic_s(claude_of, sent):
    settings = {"api_key": KEY} if sent == "x-api-key" else {"api_key": None, "auth_token": KEY}
    async with claude_of(api_key=KEY, dialect="vllm", client=settings) as (scene, client):
        made = await client.messages.create(**{**BODY, "model": "synthetic"})
        assert made.model == "synthetic"
        with pytest.raises(library.NotFoundError) as refused:
            await client.messages.create(**BODY)
        assert refused.value.body["error"]["type"] == "not_found_error"
        wrong = {"api_key": "sk-wrong-0123456789"} if sent == "x-api-key" else {"auth_token": "sk-wrong-0123456789"}
        with pytest.raises(library.AuthenticationError) as refused:
            await client.with_options(**wrong).messages.create(**BODY)
        assert refused.value.body["error"]["type"] == "authentication_error"
        # the path of another dialect keeps its own form
        response = await scene.client.post("/v1/chat/completions", json={}, headers={"x-api-key": "wrong"})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "needs_key")
        response = await scene.client.get("/v1/models", headers={"x-api-key": KEY})
        assert response.status_code == 200


async def test_errors_of_any_kind_have_anthropic_s_form(claude_of):
    async with claude_of(max_body_nbytes=1000, max_live=1, client={"max_retries": 0}) as (scene, client):

        async def told(method="POST", **sent):
            response = await scene.client.request(method, "/v1/messages", **sent)
            assert int(response.headers["content-length"]) == len(response.content)
            body = response.json()
            assert body["type"] == "error"
            assert set(body["error"]) <= {"type", "message", "details"}
            return response.status_code, body["error"]["type"]

        assert await told("GET") == (405, "invalid_request_error")
        assert await told(content=b"x" * 2000) == (413, "request_too_large")
        assert await told(content=b"{") == (400, "invalid_request_error")
        assert await told(json=BODY, headers={"sec-fetch-site": "cross-site"}) == (403, "permission_error")
        held = asyncio.ensure_future(
            client.messages.create(**{**BODY, "max_tokens": 230}, extra_body={"ignore_eos": True, "rid": "mine"})
        )
        await until(lambda: scene.generator.load().running == 1)
        with pytest.raises(library.RateLimitError) as refused:
            await client.messages.create(**BODY)
        assert refused.value.response.headers["retry-after"] == "1"
        assert await told(json={**BODY, "stream": True}) == (429, "rate_limit_error")
        scene.generator.abort_all()
        await held


class Forgetful:
    """Names three tokens."""

    def __init__(self):
        self.names = 3

    def decode(self, token_ids):
        self.names -= 1
        if self.names < 0:
            raise ValueError("no such token")
        return "x"


async def test_an_error_inside_a_stream_is_raised(claude_of, special_tags):
    class Fragile(special_tags):
        def with_specials(self):
            return Forgetful()

    async with claude_of(tokenizer=Fragile()) as (scene, client):
        made = await client.messages.create(**BODY, extra_body={"return_meta_info": True}, stream=True)
        assert (await anext(made)).type == "message_start"

        async def rest():
            async for _ in made:
                pass

        with pytest.raises(library.APIStatusError, match="a defect") as raised:
            await rest()
        assert raised.value.body["error"]["type"] == "api_error"
        await until(lambda: not scene.generator.load().live)


async def test_a_mount_keeps_the_form_of_errors(claude_of):
    from fdasync_http import app
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with claude_of() as (scene, _):
        transport = httpx2.ASGITransport(Starlette(routes=[Mount("/llm", app(scene.generator))]))
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            response = await client.post("/llm/v1/messages", json={})
            assert (response.status_code, response.json()["type"]) == (400, "error")
