"""`/v1/responses` by OpenAI's client: texts, calls, reasoning, whole and as events, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import openai as library
import pytest
from fdasync_http.responses.serve import chat_of
from fdasync_http.responses.types import ResponsesBody
from openai.types.responses import Response

from fdasync import SamplingParams
from fdasync.testing import until

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
SHOWN = [{"function": {"name": "look"}}]
CALL = '{"name": "look", "arguments": {"at": 1, "to": "é"}}'
BODY = {"model": "any", "input": "hi", "max_output_tokens": 12}
TEXT_EVENTS = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
               "response.output_text.delta", "response.output_text.done", "response.content_part.done",
               "response.output_item.done", "response.completed"]  # fmt: skip


def in_short(events):
    """Their names, each once in a row."""
    names = [event.type for event in events]
    return [name for at, name in enumerate(names) if name != "response.output_text.delta" or names[at - 1] != name]


def told(response):
    """What a Response says, without the names that are drawn."""
    made = []
    for item in response.output:
        if item.type == "function_call":
            made.append(("call", item.name, json.loads(item.arguments)))
        elif item.type == "reasoning":
            made.append(("reasoning", "".join(part.text for part in item.content)))
        else:
            made.append(("text", "".join(part.text for part in item.content)))
    return made


async def both(openai, **body):
    """The Response of a whole answer, and the events of a stream, whose last one has the same."""
    whole = await openai.responses.create(**{**BODY, **body})
    events = [event async for event in await openai.responses.create(**{**BODY, **body}, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert told(last) == told(whole)
    assert (last.status, last.incomplete_details) == (whole.status, whole.incomplete_details)
    # the second one finds its prompt in the cache
    assert (last.usage.input_tokens, last.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    # each item was announced, and ended as it stands in the whole
    for at, item in enumerate(last.output):
        mine = [event for event in events if getattr(event, "output_index", None) == at]
        assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert mine[0].item.id == mine[-1].item.id == item.id
        assert mine[-1].item.to_dict() == item.to_dict()
        for event in mine:
            assert getattr(event, "item_id", item.id) == item.id
        assert "".join(event.delta for event in mine if event.type.endswith(".delta")) == (
            item.arguments if item.type == "function_call" else item.content[0].text
        )
    return whole, events


@pytest.mark.ci(after=1)
async def test_a_text(chat, scripted):
    scene, openai = chat
    whole, events = await both(openai, extra_body={"seed": 7, "return_token_ids": True})
    prompt = scripted(["x"]).tokenizer.apply_chat_template([USER])
    right = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, seed=7))
    for response in (whole, events[-1].response):
        assert (response.token_ids, response.prompt_token_ids) == (list(right.token_ids), prompt)
        assert response.id.startswith("resp_")
        assert (response.object, response.model, response.status) == ("response", "any", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert (response.usage.input_tokens, response.usage.total_tokens) == (len(prompt), len(prompt) + 12)
        assert Response.model_validate(response.to_dict())
    assert in_short(events) == [*TEXT_EVENTS[:-1], "response.incomplete"]
    assert len(whole.output_text) == 12


@pytest.mark.ci(after=1)
async def test_the_client_s_own_stream_puts_it_together(chat, scripted):
    _, openai = chat
    async with openai.responses.stream(model="any", input="hi", max_output_tokens=12, extra_body={"seed": 7}) as stream:
        texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
    whole = await openai.responses.create(**BODY, extra_body={"seed": 7})
    assert texts[-1] == whole.output_text


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_calls_and_their_outputs(chat_of, scripted_turns, kind):
    turn = [USER, {"role": "assistant", "content": "I see."}, {"role": "tool", "content": "there"}]
    pieces = ["I ", "see. ", "<tool_call>", CALL[:9], CALL[9:], "</tool_call>", "<tool_call>", '{"name": "go"}',
              "</tool_call>"]  # fmt: skip
    model = scripted_turns([(pieces, [USER]), (["It is ", "so."], turn)], tools=SHOWN)
    async with chat_of(kind, tokenizer=model.tokenizer) as (_, openai):
        more = {"tools": [LOOK], "extra_body": model.more}
        whole, events = await both(openai, **more)
        assert told(whole) == [("text", "I see."), ("call", "look", {"at": 1, "to": "é"}), ("call", "go", {})]
        assert whole.status == "completed"
        assert whole.tools[0].name == "look"
        call = whole.output[1]
        assert call.call_id.startswith("call_")
        names = [event.type for event in events if getattr(event, "output_index", None) == 1]
        assert names == ["response.output_item.added", "response.function_call_arguments.delta",
                         "response.function_call_arguments.done", "response.output_item.done"]  # fmt: skip
        # as agents send it back: what came, and what the calls gave
        given = [item.to_dict() for item in whole.output[:2]]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "there"}
        after, _ = await both(openai, input=[USER, *given, output], **more)
        assert (after.output_text, after.status) == ("It is so.", "completed")
        _, assistant, tool = model.tokenizer.asked[-1]["messages"]
        function = {"name": "look", "arguments": {"at": 1, "to": "é"}}
        assert assistant["tool_calls"] == [{"id": call.call_id, "type": "function", "function": function}]
        assert (tool["tool_call_id"], tool["name"], tool["content"]) == (call.call_id, "look", "there")
        shown = {"name": "look", "description": "looks", "parameters": LOOK["parameters"]}
        assert model.tokenizer.asked[-1]["tools"] == [{"type": "function", "function": shown}]


@pytest.mark.ci
async def test_reasoning_is_an_item_of_its_own_and_comes_back(chat_of, scripted):
    model = scripted(["(hm", "m)", "It is", " so."], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        whole, events = await both(openai, extra_body=model.more, reasoning={"effort": "low", "summary": "auto"})
        assert told(whole) == [("reasoning", "hmm"), ("text", "It is so.")]
        assert whole.usage.output_tokens_details.reasoning_tokens == 3
        names = [event.type for event in events if getattr(event, "output_index", None) == 0]
        assert names == ["response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
                         "response.reasoning_text.done", "response.content_part.done",
                         "response.output_item.done"]  # fmt: skip
        assert model.tokenizer.asked[-1]["variables"] == {"reasoning_effort": "low"}
        await openai.responses.create(model="x", input=[USER, *[item.to_dict() for item in whole.output], USER])
        _, assistant, _ = model.tokenizer.asked[-1]["messages"]
        assert (assistant["content"], assistant["reasoning_content"]) == ("It is so.", "hmm")


async def test_how_to_sample_is_the_client_s_word(chat, scripted):
    scene, openai = chat
    prompt = scripted(["x"]).tokenizer.apply_chat_template([USER])
    right = await scene.generator.complete(prompt, SamplingParams(max_tokens=12, temperature=0))
    whole, _ = await both(openai, temperature=0, extra_body={"return_token_ids": True})
    assert whole.token_ids == list(right.token_ids)
    # the synthetic runner draws from all tokens
    asked = chat_of(ResponsesBody(input="hi", temperature=0.5, top_p=0.9, top_k=3, seed=5, min_p=0.1))
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.min_p) == (0.5, 0.9, 3, 5, 0.1)


async def test_what_reaches_the_template(chat_of, scripted):
    tokenizer = scripted(["x"]).tokenizer
    async with chat_of(tokenizer=tokenizer) as (_, openai):
        parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
        await openai.responses.create(
            model="any", instructions="Be brief.", max_output_tokens=1,
            input=[{"role": "developer", "content": "And kind."}, {"role": "user", "content": parts},
                   {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
                   {"role": "user", "content": "d"}, {"role": "user", "content": "e"}],
        )  # fmt: skip
        messages = [(one["role"], one["content"]) for one in tokenizer.asked[-1]["messages"]]
        assert messages == [("system", "Be brief.\nAnd kind."), ("user", "a\nb"), ("assistant", "c"), ("user", "d"),
                            ("user", "e")]  # fmt: skip


async def test_an_empty_answer_is_a_message_without_text(chat_of, scripted):
    model = scripted([])
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        whole, events = await both(openai, extra_body=model.more)
        assert (told(whole), whole.status) == ([("text", "")], "completed")
        assert in_short(events) == [name for name in TEXT_EVENTS if name != "response.output_text.delta"]


async def test_log_probs_stand_beside_the_text(chat):
    _, openai = chat
    sent = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": {"seed": 3}}
    whole, events = await both(openai, **sent)
    ((part,),) = (item.content for item in whole.output)
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in part.logprobs)
    deltas = [one.token for event in events if event.type.endswith("text.delta") for one in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert deltas == [one.token for one in done.logprobs] == [one.token for one in part.logprobs]
    plain = await openai.responses.create(**BODY)
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_rows_are_there_where_they_are_asked_for(chat_of, scripted, kind):
    tokenizer = scripted(["x"]).tokenizer
    async with chat_of(kind, tokenizer=tokenizer) as (scene, openai):
        extra = {"seed": 7, "return_routed_experts": True, "return_meta_info": True}
        whole, events = await both(openai, extra_body=extra)
        right = await scene.generator.complete(
            tokenizer.apply_chat_template([USER]), SamplingParams(max_tokens=12, seed=7)
        )
        for response in (whole, events[-1].response):
            rows = np.frombuffer(base64.b64decode(response.meta_info["routed_experts"]), "<i4")
            np.testing.assert_array_equal(rows.reshape(-1, *right.routing.array.shape[1:]), right.routing.array)
            assert [token for _, token, _ in response.meta_info["output_token_logprobs"]] == list(right.token_ids)
        whole, events = await both(openai, extra_body={"seed": 7, "routed_experts_prompt_start": 2})
        assert whole.routed_experts == events[-1].response.routed_experts
        assert not hasattr(await openai.responses.create(**BODY), "routed_experts")


@pytest.mark.ci
async def test_a_limit_beyond_the_context_means_what_the_context_leaves(chat):
    _, openai = chat
    whole, _ = await both(openai, max_output_tokens=100_000, extra_body={"seed": 7})
    assert whole.usage.total_tokens == 256
    assert (whole.max_output_tokens, whole.incomplete_details.reason) == (100_000, "max_output_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_is_an_answer(chat_of, stream):
    async with chat_of() as (scene, openai):

        async def last():
            made = await openai.responses.create(
                model="any", input="hi", stream=stream, extra_body={"ignore_eos": True, "rid": "mine"}
            )
            return [event async for event in made][-1].response if stream else made

        call = asyncio.ensure_future(last())
        await until(lambda: scene.generator.load().running == 1)
        await scene.client.post("/abort_request", json={"rid": "mine"})
        response = await call
        assert (response.id, response.status, response.incomplete_details.reason) == ("mine", "incomplete", "abort")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(chat_of, stream):
    async with chat_of() as (scene, openai):

        async def read():
            made = await openai.responses.create(model="x", input="hi", extra_body={"ignore_eos": True}, stream=stream)
            async for _ in made:
                pass

        call = asyncio.ensure_future(read())
        await until(lambda: scene.generator.load().running == 1)
        call.cancel()
        await until(lambda: not scene.generator.load().live)


class Forgetful:
    """Names three tokens."""

    def __init__(self):
        self.names = 3

    def decode(self, token_ids):
        self.names -= 1
        if self.names < 0:
            raise ValueError("no such token")
        return "x"


async def test_an_error_inside_a_stream_is_raised(chat_of, special_tags):
    class Fragile(special_tags):
        def with_specials(self):
            return Forgetful()

    async with chat_of(tokenizer=Fragile()) as (scene, openai):
        made = await openai.responses.create(**BODY, include=["message.output_text.logprobs"], stream=True)
        assert [(await anext(made)).type for _ in range(2)] == TEXT_EVENTS[:2]

        async def rest():
            async for _ in made:
                pass

        with pytest.raises(library.APIError, match="a defect"):
            await rest()
        await until(lambda: not scene.generator.load().live)


async def test_a_client_s_defaults_are_served_and_nothing_is_kept(chat):
    _, openai = chat
    made = await openai.responses.create(
        model="any", input="hi", max_output_tokens=2, store=True, background=False, metadata={"a": "b"}, user="u",
        truncation="disabled", service_tier="auto", parallel_tool_calls=True, tools=[], tool_choice="auto",
        prompt_cache_key="k", safety_identifier="s", include=["reasoning.encrypted_content"],
        text={"verbosity": "medium"}, extra_body={"previous_response_id": None, "prompt": None, "temperature": None},
    )  # fmt: skip
    assert (made.store, made.previous_response_id, made.metadata) == (False, None, {"a": "b"})
    assert made.text.format.type == "text"
    with pytest.raises(library.NotFoundError):
        await openai.responses.retrieve(made.id)


# what is sent, and the field that the refusal names
REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"n": 2}, "n"),
    ({"stop": ["x"]}, "stop"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 10**6}, "top_logprobs"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
    # the synthetic runner keeps no such format
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "leap"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": "a" * 300}, "input"),
    ({"input": "a" * 30_000}, "input"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
    ({"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": 3}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "1", "output": 3}]}, "input[1].output"),
    ({"input": [USER, {"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input[1].encrypted_content"),
]  # fmt: skip


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_served_is_refused_by_name(chat, subtests, stream):
    _, openai = chat
    for body, param in REFUSED:
        with subtests.test(body=str(body)[:80]):
            with pytest.raises(library.BadRequestError) as refused:
                await openai.responses.create(model="any", input="hi", stream=stream, extra_body=body)
            assert refused.value.param == param
            assert param.split(".")[-1].split("[")[0] in refused.value.message


async def test_a_template_s_refusal_names_the_input(chat_of, scripted):
    async with chat_of(tokenizer=Refuses(scripted(["x"]).tokenizer)) as (_, openai):
        with pytest.raises(library.BadRequestError, match="no kings") as refused:
            await openai.responses.create(model="x", input="king")
        assert refused.value.param == "input"


class Refuses:
    """A tokenizer whose template refuses every conversation."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text):
        return self.inner.encode(text)

    def decode(self, token_ids):
        return self.inner.decode(token_ids)

    def chat_template(self, *, with_tools=False):
        return ""

    def parse_response(self, token_ids, prompt_token_ids, *, tools=None):
        return None

    def apply_chat_template(self, messages, **kwargs):
        return self.inner.apply_chat_template([{"role": "king", "content": ""}], **kwargs)


async def test_models_and_keys(chat_of):
    async with chat_of(api_key="sk-0123456789abcdef", dialect="vllm") as (_, openai):
        made = await openai.responses.create(model="synthetic", input="hi", max_output_tokens=1)
        assert made.model == "synthetic"
        with pytest.raises(library.NotFoundError) as refused:
            await openai.responses.create(model="gpt-9", input="hi")
        assert refused.value.code == "model_not_found"
        with pytest.raises(library.AuthenticationError):
            await openai.with_options(api_key="sk-wrong-0123456789").responses.create(model="synthetic", input="hi")
