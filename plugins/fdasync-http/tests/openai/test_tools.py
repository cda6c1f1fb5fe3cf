"""Tool calls and reasoning: through OpenAI's client, and every way to cut an answer."""

from __future__ import annotations

import json

import pytest
from fdasync_http.failures import Refused
from fdasync_http.openai.chat import tools_of
from fdasync_http.openai.declared import DeclaredReader
from fdasync_http.openai.tools import Said, TagReader, shows_tags
from fdasync_http.openai.types import ChatBody
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '{"name": "look", "arguments": {"at": 1, "to": "é"}}'
TWO = ["I ", "see. ", "\n<tool", "_call>", CALL[:9], CALL[9:], "</tool_call", ">\n", "<tool_call>",
       '{"name": "go"}', "</tool_call>"]  # fmt: skip


async def both(openai, model, **body):
    """The message and the finish reason of a whole answer, and of a stream that is put together."""
    sent = {"model": "any", "messages": [USER], **model.sampling, **body}
    choice = (await openai.chat.completions.create(**sent)).choices[0]
    message = choice.message
    whole = (
        message.content, getattr(message, "reasoning_content", ""),
        [(call.function.name, call.function.arguments) for call in message.tool_calls or []], choice.finish_reason,
    )  # fmt: skip
    content = reasoning = ""
    calls = {}
    async for chunk in await openai.chat.completions.create(**sent, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            assert call.index not in calls, "id and name come once"
            assert call.id.startswith("call_")
            assert call.type == "function"
            calls[call.index] = (call.function.name, call.function.arguments)
    assert sorted(calls) == list(range(len(calls)))
    streamed = (content, reasoning, [calls[index] for index in sorted(calls)], chunk.choices[0].finish_reason)
    return whole, streamed


@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_tool_calls_by_tags(chat_of, scripted, kind):
    model = scripted(TWO, tools=[LOOK])
    async with chat_of(kind, tokenizer=model.tokenizer) as (_, openai):
        whole, streamed = await both(openai, model, tools=[LOOK])
        assert whole[0] == "I see."
        (name, arguments), other = whole[2]
        assert (name, json.loads(arguments)) == ("look", {"at": 1, "to": "é"})
        assert other == ("go", "{}")
        assert whole[3] == "tool_calls"
        assert streamed == whole
        assert model.tokenizer.asked[-1]["tools"] == [LOOK]


@pytest.mark.ci
async def test_tags_may_be_special_tokens(chat_of, scripted, special_tags):
    model = scripted(["So", "<tool_call>", CALL, "</tool_call>"], tools=[LOOK])
    async with chat_of(tokenizer=special_tags(model.tokenizer.script)) as (_, openai):
        for content, _, calls, reason in await both(openai, model, tools=[LOOK]):
            assert (content, len(calls), reason) == ("So", 1, "tool_calls")
        for content, _, calls, _ in await both(openai, model, tools=[LOOK], tool_choice="none", seed=1):
            assert (len(content) > 10, calls) == (True, [])


async def test_content_is_empty_text_where_calls_are_all(chat_of, scripted):
    model = scripted(["<tool_call>", CALL, "</tool_call>"], tools=[LOOK])
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        for message in await both(openai, model, tools=[LOOK], tool_choice="auto"):
            assert (message[0], len(message[2])) == ("", 1)


async def test_without_tools_tags_are_text(chat_of, scripted):
    model = scripted(["<tool_call>", CALL, "</tool_call>"])
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        for body in ({}, {"tools": [LOOK], "tool_choice": "none"}):
            for content, _, calls, reason in await both(openai, model, **body):
                assert (content, calls, reason) == (f"<tool_call>{CALL}</tool_call>", [], "stop")
            assert model.tokenizer.asked[-1]["tools"] is None


@pytest.mark.ci
async def test_calls_and_reasoning_as_the_checkpoint_declares(chat_of, scripted):
    thought, said = "(Let me think of it for", "Then I shall look at all that is there"
    pieces = [thought, " a while", ")", said, ", now", '{"name": "look", "arguments": {"at": {', '"x": 1}}}',
              '{"name": "look", "arguments": {"at": {"y": 2}}}']  # fmt: skip
    model = scripted(pieces, tools=[LOOK], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        whole, streamed = await both(openai, model, tools=[LOOK])
        assert whole[:2] == (f"{said}, now", "Let me think of it for a while")
        assert [json.loads(arguments) for _, arguments in whole[2]] == [{"at": {"x": 1}}, {"at": {"y": 2}}]
        assert whole[3] == "tool_calls"
        assert streamed == whole
        with pytest.raises(BadRequestError, match="read together with its reasoning"):
            await openai.chat.completions.create(
                model="x", messages=[USER], tools=[LOOK], extra_body={"separate_reasoning": False}
            )
    model = scripted(pieces, template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        # without tools in the body, calls are text
        extra = model.sampling["extra_body"]
        for body in ({}, {"extra_body": {**extra, "separate_reasoning": False}}):
            for content, _, calls, reason in await both(openai, model, **body):
                assert (calls, reason) == ([], "stop")
                assert content.endswith('{"x": 1}}}{"name": "look", "arguments": {"at": {"y": 2}}}')


async def test_reasoning_alone(chat_of, scripted):
    model = scripted(["(hm", "m)", "It is", " so."], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        for message in await both(openai, model):
            assert message == ("It is so.", "hmm", [], "stop")


async def test_a_stop_string_ends_what_is_read_unless_it_was_barred(chat_of, scripted):
    model = scripted(["(hm)", "It", " so", " so", " is"], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        extra = model.sampling["extra_body"]
        for body, content in (
            ({"stop": [" so"]}, "It"),
            ({"stop": [" so"], "extra_body": {**extra, "min_tokens": 3}}, "It so"),
            ({"stop": [" so"], "extra_body": {**extra, "min_tokens": 4}}, "It so so is"),
            ({"stop": [" so"], "extra_body": {**extra, "no_stop_trim": True}}, "It so"),
        ):
            for message in await both(openai, model, **body):
                assert message == (content, "hm", [], "stop")


async def test_an_answer_that_cannot_be_read_is_its_text(chat_of, scripted):
    model = scripted(["So: ", '{"name": "lo'], tools=[LOOK], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        for content, _, calls, reason in await both(openai, model, tools=[LOOK]):
            assert (content, calls, reason) == ('So: {"name": "lo', [], "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_call_in_another_form_cannot_be_forced(chat_of, scripted, choice):
    model = scripted(["x"], template="", declares=True)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        with pytest.raises(BadRequestError, match="calls are forced in the form <tool_call>") as refused:
            await openai.chat.completions.create(model="x", messages=[USER], tools=[LOOK], tool_choice=choice)
        assert refused.value.param == "tool_choice"


XML = "<tool_call>\n<function={{ tool_call.name }}>\n</tool_call> {{ tool_call.arguments }}"


@pytest.mark.parametrize("template", ["plain", XML])
async def test_tools_are_refused_where_no_form_of_calls_is_known(chat_of, scripted, template):
    tokenizer = scripted(["x"], template=template).tokenizer
    async with chat_of(tokenizer=tokenizer) as (_, openai):
        with pytest.raises(BadRequestError, match="not known how this model calls tools") as refused:
            await openai.chat.completions.create(model="x", messages=[USER], tools=[LOOK])
        assert refused.value.param == "tools"
        await openai.chat.completions.create(model="x", messages=[USER], tools=[LOOK], tool_choice="none", max_tokens=1)


def test_templates_that_show_the_form():
    qwen = '{"name": <function-name>, "arguments": <args-json-object>}'
    assert shows_tags(f"<tool_call>\\n{qwen}\\n</tool_call>")
    assert shows_tags('<tool_call>\\n{\\"name\\": <x>, \\"arguments\\": <y>}</tool_call>')
    assert not shows_tags(qwen)
    assert not shows_tags("<tool_call>{name}\n<arg_key>{arg}</tool_call>")


def joined(said):
    return (
        "".join(one.content for one in said), "".join(one.reasoning for one in said),
        [(call.name, call.arguments) for one in said for call in one.calls],
    )  # fmt: skip


answers = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<tool_", "call>", '{"name":"f"}', '{"name":1}', "x", " ", "<"])
).map("".join)


@pytest.mark.ci
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers, st.data())
def test_tags_are_read_alike_however_the_answer_is_cut(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = TagReader()
    said = [reader.add(text[a:b], ()) for a, b in zip([0, *cuts], cuts, strict=False)]
    said.append(reader.end(text[cuts[-1] if cuts else 0 :], ()))
    assert joined(said) == joined([TagReader().end(text, ())])
    content, _, calls = joined(said)
    if "<tool_call>" not in text:
        assert (content, calls) == (text, [])
    assert len(calls) <= text.count("<tool_call>")


def test_a_call_that_is_no_call_stays_text():
    for text in ("<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>'):
        assert TagReader().end(text, ()) == Said(text)
    assert joined([TagReader().end('<tool_call>{"name": "f"}', ())]) == ("", "", [("f", "{}")])


class Counting:
    """Reads nothing, and counts."""

    def __init__(self):
        self.tokens = 0

    def parse_response(self, token_ids, prompt_token_ids, *, tools=None):
        self.tokens += len(token_ids)
        return {"content": "x" * len(token_ids)}


def test_reading_again_costs_no_square():
    chat = Counting()
    reader = DeclaredReader(chat, [], (), ())
    said = [reader.add("x", [1]) for _ in range(20_000)]
    said.append(reader.end("", ()))
    assert joined(said)[0] == "x" * 20_000
    assert chat.tokens < 20_000 * 40


class GrowingCall:
    """Reads an unfinished call, too, as calls in other forms than JSON can be."""

    def parse_response(self, token_ids, prompt_token_ids, *, tools=None):
        calls = [{"name": "f", "arguments": {"x": "y" * min(len(token_ids), 5)}}]
        return {"tool_calls": calls + [{"name": "g", "arguments": None}] * (len(token_ids) > 5)}


def test_a_call_is_given_once_it_is_whole():
    reader = DeclaredReader(GrowingCall(), [], [LOOK], ())
    said = [reader.add("", [1]) for _ in range(8)]
    assert [len(one.calls) for one in said] == [0] * 5 + [1, 0, 0]
    said.append(reader.end("", ()))
    assert joined(said)[2] == [("f", '{"x":"yyyyy"}'), ("g", "{}")]


@pytest.mark.parametrize("more", [{}, {"type": None}, {"type": "function"}])
def test_a_tool_is_a_function_unless_it_says_else(more):
    tools = [{"function": {"name": "look", "parameters": None}, **more}]
    assert tools_of(ChatBody(messages=[], tools=tools)) == tools
    with pytest.raises(Refused, match=r"tools\[0\].type: 'browser' is not served"):
        tools_of(ChatBody(messages=[], tools=[{**tools[0], "type": "browser"}]))
