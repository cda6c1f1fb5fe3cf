"""Sampling parameters: every value that makes no sense is refused by name and limit; versions of weights
(`fdasync/request.py`)."""

from __future__ import annotations

import math

import msgspec
import pytest

from fdasync.errors import BadInput
from fdasync.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    next_order,
    next_version,
)

VOCAB = 100


def test_the_defaults_are_fine():
    SamplingParams().validated(vocab_size=VOCAB)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0.0, "top_p": 1e-9, "min_p": 1.0, "top_k": VOCAB},
        {"top_k": VOCAB + 1},
        {"top_k": 100_000_000},
        {"top_k": 2**63 - 1},
        {"temperature": 100, "repetition_penalty": 1e-3},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {0: -MAX_LOGIT_BIAS, VOCAB - 1: MAX_LOGIT_BIAS, 5: 0}},
        {"seed": 0, "n": 1024},
        {"seed": 2**63 - 1},
        {"stop": ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"logprobs": "raw", "top_logprobs": 64},
    ],
)
def test_the_bounds_belong_to_what_is_allowed(values):
    SamplingParams(**values).validated(vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 257, "0 to 256"),
        ("temperature", -0.1, "0.0 to 100.0"),
        ("temperature", math.nan, "0.0 to 100.0"),
        ("temperature", math.inf, "0.0 to 100.0"),
        ("top_k", -1, "0 to 9223372036854775807"),
        ("top_k", 2**63, "0 to 9223372036854775807"),
        ("top_p", 0.0, "above 0.0, up to 1.0"),
        ("top_p", 1.01, "above 0.0, up to 1.0"),
        ("top_p", math.nan, "above 0.0, up to 1.0"),
        ("min_p", -0.01, "0.0 to 1.0"),
        ("min_p", 1.5, "0.0 to 1.0"),
        ("repetition_penalty", 0.0, "0.001 to 1000.0"),
        ("repetition_penalty", -1.0, "0.001 to 1000.0"),
        ("repetition_penalty", math.inf, "0.001 to 1000.0"),
        ("presence_penalty", 2.1, "-2.0 to 2.0"),
        ("presence_penalty", math.nan, "-2.0 to 2.0"),
        ("frequency_penalty", -2.1, "-2.0 to 2.0"),
        ("logit_bias", {VOCAB: 1.0}, "0 to 99"),
        ("logit_bias", {-1: 1.0}, "0 to 99"),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS_TOKENS + 1), 1.0), "up to 1024"),
        ("n", 0, "1 to 1024"),
        ("n", 1025, "1 to 1024"),
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", 2**63, "0 to 9223372036854775807"),
        ("top_logprobs", -1, "0 to 64"),
        ("top_logprobs", 65, "0 to 64"),
        ("stop", ("",), "1 to 256"),
        ("stop", ("x" * 257,), "1 to 256"),
        ("stop", ("x",) * 65, "up to 64"),
        ("stop_token_ids", (VOCAB,), "0 to 99"),
        ("stop_token_ids", (3, -1), "0 to 99"),
    ],
)
def test_what_is_out_of_range_is_refused(field, value, limit):
    with pytest.raises(BadInput) as caught:
        SamplingParams(**{field: value}).validated(vocab_size=VOCAB)
    assert (caught.value.field, caught.value.limit) == (field, limit)
    assert str(limit) in str(caught.value)
    if (field, value) not in (("stop_token_ids", (VOCAB,)), ("logit_bias", {VOCAB: 1.0})):
        # of a vocabulary a mapping knows nothing
        with pytest.raises(BadInput) as caught:
            SamplingParams.from_mapping({field: value})
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": object()}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"n": [1]}, "n"),
        ({"stop": 7}, "stop"),
        ({"stop": b"text"}, "stop"),
        ({"stop": {"a": "b"}}, "stop"),
        ({"stop": (1,)}, "stop[0]"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids[0]"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {3: "much"}}, "logit_bias[3]"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "most"}, "logprobs"),
        ({"top_logprobs": "5"}, "top_logprobs"),
    ],
)
def test_what_has_the_wrong_type_is_refused(values, field):
    for make in (
        lambda: SamplingParams(**values).validated(vocab_size=VOCAB),
        lambda: SamplingParams.from_mapping(values),
    ):
        with pytest.raises(BadInput) as caught:
            make()
        assert caught.value.field == field
        assert "$" not in str(caught.value)


@pytest.mark.parametrize("bias", [100.5, -101, math.nan, math.inf])
def test_a_bias_out_of_range_is_refused_with_its_token(bias):
    with pytest.raises(BadInput) as caught:
        SamplingParams(logit_bias={3: 1.0, 7: bias}).validated(vocab_size=VOCAB)
    assert (caught.value.field, caught.value.limit) == ("logit_bias[7]", "-100.0 to 100.0")


def test_a_bias_is_copied_and_its_ids_may_be_the_strings_of_json():
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given).validated(vocab_size=VOCAB)
    given[4] = 2.0
    assert params.logit_bias == {3: 1.0}, "the caller's mapping is the caller's"
    assert SamplingParams.from_mapping({"logit_bias": {"3": 1}}) == params
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


def test_a_mapping_says_what_the_constructor_says():
    values = {
        "max_tokens": 7,
        "temperature": 1,
        "stop": ["a", "bc"],
        "stop_token_ids": [3],
        "seed": None,
        "logprobs": "raw",
    }
    params = SamplingParams.from_mapping(values)
    assert params == SamplingParams(**values).validated(vocab_size=VOCAB)
    values["stop"].append("d")
    assert params.stop == ("a", "bc"), "the caller's list is the caller's"
    assert SamplingParams.from_mapping({}) == SamplingParams()


@pytest.mark.parametrize(
    "make",
    [
        lambda stop: SamplingParams(stop=stop),
        lambda stop: SamplingParams(stop=stop).validated(vocab_size=VOCAB),
        lambda stop: SamplingParams.from_mapping({"stop": stop}),
        lambda stop: msgspec.structs.replace(SamplingParams(), stop=stop),
        lambda stop: msgspec.convert({"stop": stop}, SamplingParams),
    ],
)
def test_a_string_is_one_stop_string(make):
    assert make("ab").stop == ("ab",)
    assert make(("ab", "c")).stop == ("ab", "c")


def test_an_empty_stop_string_is_refused_however_it_is_given():
    for stop in ("", [""]):
        with pytest.raises(BadInput, match="a stop string of 0 characters"):
            SamplingParams.from_mapping({"stop": stop})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temprature": 1.0}, "temprature: is not a key that exists; did you mean 'temperature'?"),
        ({"Top_P": 1.0}, "Top_P: is not a key that exists; did you mean 'top_p'?"),
        ({"qqq": 1.0}, "qqq: is not a key that exists"),
        (
            {"max_token": 1, "n": 2, "wings": 2, "stops": "a"},
            "max_token: is not a key that exists, nor is 'wings', nor 'stops' ('stop'?); did you mean 'max_tokens'?",
        ),
        ({1: 1}, "params: 1 is no name of a field"),
        ([("n", 1)], "params: a mapping is needed, not list"),
        (None, "params: a mapping is needed, not NoneType"),
        ("n", "params: a mapping is needed, not str"),
        ({"n": "two"}, "n: Expected `int`, got `str` (limit: 1 to 1024)"),
        ({"stop": ["a", 2]}, "stop[1]: Expected `str`, got `int`"),
        (
            {"logprobs": "most"},
            "logprobs: Invalid enum value 'most' (limit: 'none' or 'raw' or 'processed' or 'both')",
        ),
        (
            {"top_p": 2},
            "top_p: 2 is out of range (limit: above 0.0, up to 1.0); use temperature=0 for greedy",
        ),
    ],
)
def test_what_is_wrong_with_a_mapping_is_named(values, text):
    with pytest.raises(BadInput) as caught:
        SamplingParams.from_mapping(values)
    assert str(caught.value) == text


def test_top_logprobs_need_logprobs():
    with pytest.raises(BadInput, match="needs logprobs") as caught:
        SamplingParams(top_logprobs=1).validated(vocab_size=VOCAB)
    assert caught.value.field == "top_logprobs"
    assert "raw" in caught.value.hint


def test_unknown_parameters_are_refused_by_name():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 1.0}, SamplingParams)


def test_parameters_cannot_be_changed():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.n = 3


@pytest.mark.parametrize(
    ("version", "after"),
    [("0", "1"), ("9", "10"), ("step-9", "step-10"), ("v009", "v010"), ("2-final", "3-final"), ("best", "best-1"),
     ("a1b2", "a1b3"), ("\u0663", "\u0663-1")],
)  # fmt: skip
def test_the_next_version_counts_the_last_digits_up(version, after):
    assert next_version(version) == after
    with pytest.raises(BadInput, match="characters"):
        next_version("v" * 255)


def test_a_later_version_has_a_higher_order():
    assert [next_order(-1, version) for version in ("0", "7", "step-7", "99999999999999", "9" * 15)] == [
        0, 7, 0, 99999999999999, 0
    ]  # fmt: skip
    assert [next_order(7, version) for version in ("3", "7", "8", "12", "step-99")] == [8, 8, 8, 12, 8]
