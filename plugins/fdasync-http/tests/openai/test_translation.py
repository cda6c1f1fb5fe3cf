"""Whatever a chat says in whatever pieces, the events of a dialect put together are its whole answer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fdasync_http.anthropic import blocks as blocks_of_messages
from fdasync_http.anthropic.blocks import is_prefilled
from fdasync_http.anthropic.blocks import messages_of as of_blocks
from fdasync_http.anthropic.events import MessageEvents
from fdasync_http.failures import Refused
from fdasync_http.openai.tools import Call, Said
from fdasync_http.openai.types import ChatBody
from fdasync_http.responses import items as items_of_responses
from fdasync_http.responses.events import ResponseEvents
from fdasync_http.responses.items import messages_of as of_items
from hypothesis import given
from hypothesis import strategies as st

from fdasync import CachedTokens, Result, Sample

FRONT = SimpleNamespace(tokenizer=SimpleNamespace(encode=list, decode=lambda ids: "x" * len(ids)), model="m")
ARGUMENTS = {"at": 1}

calls = st.integers(0, 999).map(lambda number: Call(f"f{number}", json.dumps(ARGUMENTS), f"call_{number}"))
pieces = st.lists(
    st.builds(Said, st.sampled_from(["", "a", "bc"]), st.sampled_from(["", "r", "st"]),
              st.lists(calls, max_size=2, unique_by=lambda call: call.call_id).map(tuple)),
    max_size=6,
)  # fmt: skip
reasons = st.sampled_from(["stop", "length", "abort", "deadline"])


def ended(reason):
    sample = Sample(
        index=0, token_ids=(1, 2), text="", raw_logprobs=None, processed_logprobs=None, top_logprobs=None,
        finish_reason=reason, cached=CachedTokens(device=1, host=0, store=0), weight_version=(), routing=None, aux={},
        stop_token_id=2 if reason == "stop" else None,
    )  # fmt: skip
    return sample, Result(request_id="r", prompt_token_ids=(1, 2, 3), samples=(sample,))


def joined(said):
    """Content, reasoning and calls of all pieces."""
    return (
        "".join(one.content for one in said), "".join(one.reasoning for one in said),
        [call.name for one in said for call in one.calls],
    )  # fmt: skip


def played(events, said, reason):
    """All events, as they are sent, and the answer."""
    told = list(events.begin())
    for one in said:
        told += events.add(one, [])
    told += events.end(*ended(reason))
    return [json.loads(json.dumps(event)) for event in told]


@pytest.mark.ci
@given(pieces, reasons)
def test_a_response(said, reason):
    events = ResponseEvents(FRONT, {"id": "resp_1", "output": []})
    told = played(events, said, reason)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    output, parts = [], {}
    for event in told[2:-1]:
        kind, at = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert at == len(output), "one item behind the other"
            output.append(None)
        assert at == len(output) - 1
        if kind.endswith(".delta"):
            parts[at] = parts.get(at, "") + event["delta"]
        if kind == "response.output_item.done":
            output[at] = event["item"]
    answer = told[-1]["response"]
    assert answer["output"] == output
    assert answer == events.answer
    texts = {"message": "", "reasoning": ""}
    names = []
    for at, item in enumerate(output):
        if item["type"] == "function_call":
            names.append(item["name"])
            assert json.loads(parts[at]) == ARGUMENTS
        else:
            texts[item["type"]] += item["content"][0]["text"]
            assert item["content"][0]["text"] == parts.get(at, "")
    assert (texts["message"], texts["reasoning"], names) == joined(said)
    assert output, "a Response says something"
    assert (answer["status"] == "completed") == (reason == "stop")
    assert told[-1]["type"] == f"response.{answer['status']}"
    # and comes back as it was said: one turn of the assistant
    (turn,) = of_items(None, output)
    assert "".join(part["text"] for part in turn["content"]) == joined(said)[0]
    assert turn.get("reasoning_content", "") == joined(said)[1]
    assert [call["function"]["name"] for call in turn.get("tool_calls", ())] == joined(said)[2]


@pytest.mark.ci
@given(pieces, reasons)
def test_a_message(said, reason):
    params = SimpleNamespace(max_tokens=3)
    asked = SimpleNamespace(request_id="msg_1", body=ChatBody(), params=params, prompt=[1, 2, 3])
    events = MessageEvents(FRONT, SimpleNamespace(asked=asked), max_tokens=3)
    start, *middle, ended, last = played(events, said, reason)
    assert (start["type"], ended["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    content = []
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content), "one block behind the other"
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                content[-1]["input"] = json.loads(delta["partial_json"])
            else:
                content[-1][kind] += delta[kind]
        assert event["index"] == len(content) - 1
    assert content == events.answer["content"]
    assert start["message"] | ended["delta"] | {"content": content, "usage": ended["usage"]} == events.answer
    words = {"stop": "tool_use" if joined(said)[2] else "end_turn", "length": "max_tokens"}
    assert ended["delta"]["stop_reason"] == words.get(reason, "abort")
    assert ended["usage"] == {
        "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 2,
    }  # fmt: skip
    if content:
        (turn,) = of_blocks("", [{"role": "assistant", "content": content}])
        assert "".join(part["text"] for part in turn["content"]) == joined(said)[0]
        assert turn.get("reasoning_content", "") == joined(said)[1]
        assert [call["function"]["name"] for call in turn.get("tool_calls", ())] == joined(said)[2]


@pytest.mark.parametrize("arguments", ["[1]", "3", "{", ""])
def test_arguments_that_are_no_object_stand_in_one(arguments):
    asked = SimpleNamespace(request_id="m", body=ChatBody(), params=SimpleNamespace(max_tokens=3), prompt=[1])
    events = MessageEvents(FRONT, SimpleNamespace(asked=asked), max_tokens=3)
    (block, delta, _) = events.add(Said(calls=(Call("f", arguments, "call_1"),)), [])
    assert isinstance(events.answer["content"][0]["input"]["arguments"], int | list | str)
    assert json.loads(delta["delta"]["partial_json"]) == events.answer["content"][0]["input"]
    assert block["content_block"]["input"] == {}


@pytest.mark.parametrize("none", [None, "", " \n", "null", "{}", {}])
def test_a_call_without_arguments_has_none_however_that_is_said(none):
    items = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": none}]
    blocks = [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": none}]}]
    for messages in (of_items(None, items), of_blocks("", blocks), of_items(None, [{**items[0], "arguments": "{}"}])):
        ((call,),) = (message["tool_calls"] for message in messages)
        assert call["function"] == {"name": "f", "arguments": {}}


def test_a_choice_without_a_type_is_the_model_s():
    assert [blocks_of_messages.tool_choice_of(choice) for choice in ({}, {"type": None})] == ["auto", "auto"]


def test_roles_may_be_in_capitals():
    turns = [{"role": "USER", "content": "a"}, {"role": "Assistant", "content": [{"type": "text", "text": "b"}]}]
    assert [message["role"] for message in of_blocks("", turns)] == ["user", "assistant"]
    assert [message["role"] for message in of_items(None, turns)] == ["user", "assistant"]


KEYS = st.sampled_from([
    "type", "role", "content", "text", "name", "call_id", "id", "input", "arguments", "output", "tool_use_id",
    "thinking", "summary", "encrypted_content", "parameters", "input_schema", "schema", "refusal",
])  # fmt: skip
WORDS = st.sampled_from([
    "message", "text", "input_text", "output_text", "refusal", "tool_use", "tool_result", "user", "assistant", "system",
    "developer", "function_call", "function_call_output", "reasoning", "thinking", "function", "tool", "any", "custom",
    "json_schema", "{}", "{", "x", "",
])  # fmt: skip
odd = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
objects = st.dictionaries(KEYS, odd, max_size=4)
# most of them are what they say
items = st.one_of([
    objects, st.builds(lambda role, content: {"role": role, "content": content}, WORDS, odd),
    st.builds(lambda kind, more: {"call_id": "1", "name": "f", **more, "type": kind}, WORDS, objects),
])  # fmt: skip


def refusal_of(work):
    try:
        work()
    except Refused as refused:
        return refused
    return None


@pytest.mark.ci
@given(st.lists(items, max_size=3), odd)
def test_whatever_is_sent_is_a_conversation_or_refused_by_name(given_items, choice):
    choice = choice if isinstance(choice, dict) else {"type": choice}
    for work in (
        lambda: of_items(None, given_items),
        lambda: of_blocks("", given_items) and is_prefilled(of_blocks("", given_items)),
        lambda: items_of_responses.tools_of(given_items),
        lambda: blocks_of_messages.tools_of(given_items),
        lambda: items_of_responses.tool_choice_of(choice),
        lambda: blocks_of_messages.tool_choice_of(choice),
        lambda: items_of_responses.format_of(choice, None),
        lambda: blocks_of_messages.format_of(choice),
    ):
        refused = refusal_of(work)
        assert refused is None or (refused.status == 400 and refused.message.startswith(refused.param))
