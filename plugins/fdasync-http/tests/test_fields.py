"""The rule for fields of bodies, on the tables of all dialects: read, ignored and counted, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from fdasync_http.anthropic.types import CountBody, MessagesBody
from fdasync_http.bodies import decode
from fdasync_http.config import HttpConfig
from fdasync_http.failures import Refused
from fdasync_http.fields import Engine, Ignored, Table, Unserved, asked_by, engine, ignored, not_served
from fdasync_http.openai.tokenize import DetokenizeBody, TokenizeBody
from fdasync_http.openai.types import ChatBody, CompletionBody
from fdasync_http.responses.types import ResponsesBody
from fdasync_http.sampling import Sampled, params_of
from fdasync_http.sglang import asked as sglang
from fdasync_http.sglang.sampling import Sampling as SGLangSampling
from fdasync_http.vllm import generate as vllm
from fdasync_http.vllm.sampling import Sampling as VLLMSampling
from hypothesis import given
from hypothesis import strategies as st

from fdasync import GenerateOptions, SamplingParams
from fdasync.errors import InvariantBroken

BODIES = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, ResponsesBody, MessagesBody, CountBody,
          sglang.GenerateBody, vllm.GenerateBody]  # fmt: skip
OBJECTS = [*BODIES, SGLangSampling, VLLMSampling]
# what a body cannot be without
LEAST = {
    ChatBody: {"messages": []}, CompletionBody: {"prompt": "a"}, TokenizeBody: {"prompt": "a"},
    DetokenizeBody: {"tokens": [1]}, sglang.GenerateBody: {"text": "a"}, vllm.GenerateBody: {"token_ids": [1]},
    ResponsesBody: {"input": "a"}, MessagesBody: {"messages": [], "max_tokens": 1}, CountBody: {"messages": []},
    SGLangSampling: {}, VLLMSampling: {},
}  # fmt: skip


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that refuses what it does not know."""

    count: int = 7


class Body(msgspec.Struct, frozen=True):
    """A body that ignores what it does not know."""

    RULES: ClassVar[Table] = {
        "own": engine("seed"), **ignored("it is said", "said"), **not_served("it is not", "not_this"),
        "only": Unserved("but one", (3,)), "kept": Engine(("max_tokens",), reads_null=True),
    }  # fmt: skip
    OBJECTS: ClassVar[dict] = {"inner": Inner}

    own: int = 5
    kept: int | None = 128
    inner: Inner | list[Inner] = Inner()


def read(body, kind=Body):
    told = []
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return decode(raw, kind, HttpConfig(), told.append), told


def refused(body, kind=Body):
    with pytest.raises(Refused) as error:
        read(body, kind)
    assert error.value.status == 400
    return error.value


def test_null_is_the_default_at_each_level():
    assert read({"own": None, "inner": None, "said": None, "not_this": None, "other": None}) == (Body(), [])
    assert read({"inner": {"count": None}}) == (Body(), [])
    assert read({"inner": [{"count": None}, {"count": 2}]})[0].inner == [Inner(), Inner(2)]
    assert read({"inner": [None, {"count": 2}]})[0].inner == [Inner(), Inner(2)]
    # one that means something of its own
    assert read({"kept": None})[0].kept is None
    assert read({})[0].kept == 128


def test_what_changes_nothing_is_ignored_and_told():
    assert read({"said": 1, "other": [2], "not_this": False, "only": 3}) == (Body(), ["said", "other"])


def test_what_asks_for_something_that_is_not_served_is_refused_by_name():
    assert (refused({"not_this": True}).param, refused({"not_this": True}).code) == ("not_this", "not_served")
    assert refused({"not_this": 1}).message == "not_this: is not served: it is not"
    assert refused({"only": 4}).param == "only"
    error = refused({"inner": [{}, {"cuont": 1}]})
    assert (error.param, error.code) == ("inner[1].cuont", "unknown_key")
    assert error.message == "inner[1].cuont: there is no such key in inner[1]; did you mean count? known are: count"
    assert refused({"inner": {"count": "x"}}).param == "inner.count"
    assert refused({"inner": 3}).param == "inner"


@pytest.mark.parametrize("text", [b'{"own": 2.0}', b'\xef\xbb\xbf{"own": 2}', b'{"own": "2"}', b'\r\n {"own": 2}\n'])
def test_forms_that_other_servers_read_are_read(text):
    assert read(text)[0].own == 2
    assert refused(b'{"own": 2.5}').param == "own"


@pytest.mark.ci(after=16)
@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b"caf\xe9", b"\xe4\xbd", b"\xed\xa0\x80", b"\\q", b"\x01", b"\\u12", b"\\ud83d"]
)
@pytest.mark.parametrize("kind", OBJECTS)
def test_bytes_that_are_no_text_are_refused_wherever_they_stand(kind, bad):
    names = [*kind.__struct_fields__, *kind.RULES, *getattr(kind, "OBJECTS", {}), "unknown"]
    least = msgspec.json.encode(LEAST[kind]).removesuffix(b"}")
    for name in names:
        for value in (b'"%s"' % bad, b'["%s"]' % bad, b'{"%s": 1}' % bad, b'{"a": "%s"}' % bad):
            comma = b", " if LEAST[kind] else b""
            refused(least + comma + b'"%s": %s}' % (name.encode(), value), kind)
    refused(least + (b", " if LEAST[kind] else b"") + b'"%s": 1}' % bad, kind)


@pytest.mark.parametrize("kind", OBJECTS)
def test_tables_and_types_agree(kind):
    """A field is read, or the table says why not; what it asks for is the engine's."""
    for name, rule in kind.RULES.items():
        if isinstance(rule, Engine):
            for field in rule.fields:
                known = {*SamplingParams.__struct_fields__, *GenerateOptions.__annotations__, "prompt"}
                assert field in known, (name, field)
        else:
            assert name not in kind.__struct_fields__, name
            assert rule.why
    # those of its own path
    read_here = {name for name, rule in kind.RULES.items() if isinstance(rule, Engine)}
    if kind in (SGLangSampling, VLLMSampling, sglang.GenerateBody, vllm.GenerateBody):
        assert read_here <= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_field_may_be_null(kind):
    plain, _ = read(LEAST[kind], kind)
    for name in [*kind.__struct_fields__, *kind.RULES, "unknown"]:
        rule = kind.RULES.get(name)
        if name in LEAST[kind] or (isinstance(rule, Engine) and rule.reads_null):
            continue
        assert read({**LEAST[kind], name: None}, kind) == (plain, []), name


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_field_of_a_table_is_ignored_or_refused_as_it_says(kind):
    for name, rule in kind.RULES.items():
        if isinstance(rule, Ignored):
            assert read({**LEAST[kind], name: {"any": [1]}}, kind)[1] == [name]
        elif isinstance(rule, Unserved):
            assert refused({**LEAST[kind], name: {"any": [1]}}, kind).param == name
            for value in rule.unless:
                assert read({**LEAST[kind], name: value}, kind)[1] == []


def test_the_client_s_names_of_the_engine_s_fields():
    assert asked_by(ChatBody)["max_tokens"] == ("max_completion_tokens", "max_tokens")
    assert asked_by(sglang.GenerateBody)["max_tokens"] == ("sampling_params.max_new_tokens",)
    assert asked_by(vllm.GenerateBody)["top_logprobs"] == ("sampling_params.logprobs",)


SAME = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "n": 3, "ignore_eos": True, "repetition_penalty": 1.5,
        "presence_penalty": 1.25, "frequency_penalty": -1.25, "top_k": 9, "stop": "x", "stop_token_ids": [4, None, 5],
        "logit_bias": {"7": 1000, "8": -1000, "9": 2.5}}  # fmt: skip
MEANT = SamplingParams(
    temperature=0.5, top_p=0.25, min_p=0.125, n=3, ignore_eos=True, repetition_penalty=1.5, presence_penalty=1.25,
    frequency_penalty=-1.25, top_k=9, stop=("x",), stop_token_ids=(4, 5), logit_bias={7: 100.0, 8: -100.0, 9: 2.5},
    min_tokens=2, seed=11, max_tokens=6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (SGLangSampling, {"min_new_tokens": 2, "sampling_seed": 11}),
        (VLLMSampling, {"min_tokens": 2, "seed": 11}),
        (ChatBody, {"min_tokens": 2, "seed": 11}),
        (CompletionBody, {"min_tokens": 2, "seed": 11}),
    ],
)
def test_parameters_mean_the_same_in_each_dialect(kind, own):
    asked, told = read({**LEAST[kind], **SAME, **own}, kind)
    assert (params_of(asked, max_tokens=6), told) == (MEANT, [])
    plain, _ = read({**LEAST[kind], **dict.fromkeys([*SAME, *own])}, kind)
    assert params_of(plain, max_tokens=6) == SamplingParams(max_tokens=6)


names = st.text(max_size=5).map("_".__add__)


@given(st.dictionaries(names, st.none() | st.integers() | st.lists(st.none(), max_size=2), max_size=4))
def test_what_no_one_knows_is_ignored_or_refused_by_name(strange):
    told = [name for name, value in strange.items() if value is not None]
    assert read({"text": "a", **strange}, sglang.GenerateBody)[1] == told
    if told:
        assert refused({"messages": [], **strange}, ChatBody).param == told[0]


README = Path(__file__).parents[1] / "README.md"
# tables, by what the README calls their place
PLACES = {
    "`/generate`": sglang.GenerateBody.RULES, "its `sampling_params`": SGLangSampling.RULES,
    "`/inference/v1/generate`": vllm.GenerateBody.RULES, "the `sampling_params` of that": VLLMSampling.RULES,
    "OpenAI's paths": ChatBody.RULES, "`/v1/responses`": ResponsesBody.RULES, "`/v1/messages`": MessagesBody.RULES,
}  # fmt: skip


def test_the_readme_lists_what_is_refused():
    wanted = []
    for place, table in PLACES.items():
        names = [f"`{name}`" for name, rule in table.items() if isinstance(rule, Unserved)]
        wanted.append(f"| {place} | {', '.join(names)} |")
    section = README.read_text().partition("## Fields")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")][2:] == wanted


def test_two_fields_that_give_one_parameter_are_refused_by_name():
    class Twice(Sampled, frozen=True, kw_only=True):
        RULES: ClassVar[Table] = {"least_p": engine("min_p")}

        least_p: float = 0.0

    with pytest.raises(InvariantBroken, match="Twice: min_p and least_p both give min_p"):
        params_of(Twice(), max_tokens=1)
