"""Formats of clients as grammars: one for each body, in every dialect's words; bad ones are named."""

from __future__ import annotations

import json

import pytest
from fdasync_http.failures import Refused
from fdasync_http.grammars import calls_of, grammar_of
from fdasync_http.openai.types import CompletionBody
from fdasync_http.sglang.sampling import Sampling

from fdasync import Grammar, SamplingParams
from fdasync.errors import GrammarFailed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ANY = Grammar("json_schema", '{"type":"object"}')


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "disable_fallback": True}}, None),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"structured_outputs": {"json_object": True}}, ANY),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Grammar("json_schema", TEXT),
        ),
        # as SGLang reads it
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": None}},
            Grammar("json_schema", TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": True, "json_schema": {"schema": SCHEMA}}},
            Grammar("json_schema", TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": False}}, Grammar("json_schema", "false")),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"json_schema": "$$ANY$$"}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", r'start: "a" | "b\""')),
        ({"guided_choice": ["a"]}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("gbnf", "root ::= x")),
        ({"guided_grammar": "root ::= x"}, Grammar("gbnf", "root ::= x")),
        ({"ebnf": "root ::= x"}, Grammar("gbnf", "root ::= x")),
    ],
)
def test_each_field_is_a_grammar(fields, grammar):
    assert grammar_of(CompletionBody(prompt="", **fields)) == grammar


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no json_schema.schema"),
        ({"response_format": {"type": "json_schema", "schema": 3}}, "response_format.schema", "no JSON"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not served"),
        ({"response_format": {}}, "response_format", "is not served: type None"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "json_schema.schema", "no JSON"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "more than one"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "no text"),
        ({"structured_outputs": {"prose": "x"}}, "structured_outputs.prose", "not served"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "no list"),
        ({"guided_choice": [""]}, "guided_choice", "no list"),
        ({"guided_json": 3}, "guided_json", "no JSON schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "a format each"),
    ],
)
def test_what_is_no_format_is_named(fields, field, words):
    with pytest.raises(Refused, match=words) as refused:
        grammar_of(CompletionBody(prompt="", **fields))
    assert field in refused.value.param


def test_sampling_parameters_are_named_with_what_they_stand_in():
    assert grammar_of(Sampling(json_schema=TEXT), "sampling_params.") == Grammar("json_schema", TEXT)
    with pytest.raises(Refused) as refused:
        grammar_of(Sampling(json_schema=TEXT, regex="a"), "sampling_params.")
    assert refused.value.param == "sampling_params.json_schema"


def test_calls_are_written_in_the_form_of_templates():
    tools = [{"function": {"name": 'l"k', "parameters": SCHEMA}}, {"function": {"name": "go"}}]
    text = calls_of(tools, tags=("<a>", "</a>"), special=False, several=True).text
    assert text.splitlines() == [
        "start: call (BREAK call)*",
        'call: "<a>" BREAK (call_0 | call_1) BREAK "</a>"',
        r"BREAK: /\n/",
        r'call_0: "{\"name\": \"l\\\"k\", \"arguments\": " arguments_0 "}"',
        f"arguments_0: %json {TEXT}",
        r'call_1: "{\"name\": \"go\", \"arguments\": " arguments_1 "}"',
        'arguments_1: %json {"type":"object"}',
    ]
    one = calls_of(tools[1:], tags=("<a>", "</a>"), special=True, several=False).text
    assert one.startswith("start: call\ncall: <a> BREAK (call_0) BREAK </a>\n")


async def test_a_grammar_reaches_the_runner_through_hand_overs(scene):
    sampling = {"regex": "%7", "max_new_tokens": 9, "sampling_seed": 3, "temperature": 1.0}
    answer = (await scene.client.post("/generate", json={"input_ids": [1, 2, 3], "sampling_params": sampling})).json()
    want = scene.oracle.generate([1, 2, 3], 9, temperature=1.0, seed=3, grammar=Grammar("regex", "%7"))
    assert answer["output_ids"] == want
    assert all(token % 7 == 0 for token in want)


async def test_a_grammar_that_breaks_is_the_requests_own_fault(scene):
    sampling = {"regex": "%2!4", "max_new_tokens": 30}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    response = await scene.client.post("/generate", json=body)
    # no client sends a request again for this status
    assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_failed")
    with pytest.raises(GrammarFailed, match="told to break") as caught:
        await scene.generator.complete([1, 2, 3], SamplingParams(grammar=Grammar("regex", "%2!4"), max_tokens=30))
    assert len(caught.value.partial.samples[0].token_ids) <= 4
    assert (await scene.client.get("/health_generate")).status_code == 200
