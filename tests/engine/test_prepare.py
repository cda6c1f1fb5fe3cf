"""From a caller's words to events: validation, the frontend, hashing (`prepare.py`)."""

from __future__ import annotations

import asyncio
import math
from random import Random

import numpy as np
import pytest

from fdasync.cache.identity import block_keys, root_key
from fdasync.engine.config import EngineConfig
from fdasync.engine.prepare import Preparer, namespace_of
from fdasync.errors import BadInput
from fdasync.request import GenerateRequest, SamplingParams
from tests.engine.output_stage import ByteTokenizer
from tests.support.helpers import SPECS, make_capacity


class LongTexts:
    """Stands where the tokenizer's child process stands."""

    def __init__(self):
        self.asked = []

    async def encode(self, text, deadline_s):
        self.asked.append((len(text), deadline_s))
        return ByteTokenizer().encode(text)


async def refuse(grammar):
    """A runner's check."""
    raise BadInput("grammar", f"no {grammar.kind}")


def make_preparer(tokenizer=None, **options):
    capacity = options.pop("capacity", None) or make_capacity()
    long_texts = options.pop("long_texts", None)
    values = {"inline_tokenise_chars": 50, "prepare_deadline_s": 9.0, "max_requests": 8, "max_running": 8}
    check_grammar = options.pop("check_grammar", refuse)
    config = EngineConfig(**{**values, **options})
    return Preparer(config, capacity, tokenizer, long_texts, Random(5), check_grammar)


def make_ask(prompt, params, **options):
    values = {
        "streams": False, "request_id": None, "priority": 0, "deadline_s": None, "routing": None, "start": 0,
        "cache_salt": "",
    }  # fmt: skip
    return GenerateRequest(prompt=prompt, params=params, **{**values, **options})


def check(prompt=(1, 2, 3), params=None, tokenizer=None, preparer=None, **options):
    deadline_s = options.pop("deadline_s", 10.0)
    params = SamplingParams(max_tokens=4) if params is None else params
    return (preparer or make_preparer(tokenizer)).check(make_ask(prompt, params, **options), deadline_s)


async def prepare(preparer, prompt, params=None, keys=(0,), **options):
    defaults = {"rows": True, "arrived_at": 0.0, "deadline": 50.0}
    given = {name: options.pop(name, value) for name, value in defaults.items()}
    params = SamplingParams(max_tokens=4) if params is None else params
    ask = preparer.check(make_ask(prompt, params, **options), 10.0)
    return await preparer.prepare(ask, list(keys), **given)


# -- bad input, told before anything is started


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "is empty"),
        ((), "is empty"),
        (np.array([], np.int64), "is empty"),
        ([1, 300, 2], "token id 300 is outside the vocabulary"),
        ([-1], "token id -1 is outside the vocabulary"),
        ([2**40], "token id 1099511627776 is outside"),
        ([2**70], "no token id"),
        ([1, "2"], "no token id"),
        ([1, None], "no token id"),
        ([1.0], "no token id"),
        ([math.nan], "no token id"),
        (np.array([[1, 2]]), "several prompts .limit: one prompt a call."),
        ([[1, 2], [3]], "one prompt a call"),
        (["a", "b"], "one prompt a call"),
        (np.array([1.5]), "no token id"),
        (np.int64(3), "int64 is neither text nor"),
        ([True, 2], "holds a bool"),
        (iter([1]), "list_iterator is neither text nor"),
        (range(10**9), "1000000000 tokens leave no room"),
        (None, "NoneType is neither text nor"),
        (b"bytes", "bytes is neither text nor"),
        ({1: 2}, "dict is neither text nor"),
        (5, "int is neither text nor"),
        ("text", "is text, but the engine has no tokenizer"),
        ([1] * 100, "100 tokens leave no room"),
    ],
)
def test_prompts_that_cannot_be_used(prompt, problem):
    with pytest.raises(BadInput, match=problem) as caught:
        check(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("fine \ud800 not", "lone surrogate at character 5"),
        ("\udfff", "lone surrogate at character 0"),
        ("x" * ((1 << 26) + 1), "67108865 characters"),
    ],
)
def test_texts_that_cannot_be_used(text, problem):
    with pytest.raises(BadInput, match=problem) as caught:
        check(text, tokenizer=ByteTokenizer())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [[0, 299], (5,), range(3), np.array([1, 2], np.uint8), np.array([1, 2]), __import__("array").array("i", [3])],
)
async def test_sequences_of_ids_are_fine_and_stay_as_they_are(prompt):
    before = list(prompt)
    check(prompt)
    (event,) = await prepare(make_preparer(), prompt)
    assert event.tokens == tuple(before)
    assert all(type(token) is int for token in event.tokens)
    assert list(prompt) == before


@pytest.mark.parametrize(
    ("count", "max_tokens", "field", "limit"),
    [
        (10, 91, "max_tokens", 100),  # context
        (99, 2, "max_tokens", 100),
        (99, 1, None, None),
        (100, 1, "prompt", 100),
        (10, 90, None, None),
    ],
)
def test_the_context_bounds_prompt_and_output_together(count, max_tokens, field, limit):
    preparer = make_preparer(capacity=make_capacity(num_blocks=100))
    params = SamplingParams(max_tokens=max_tokens)
    if field is None:
        check([1] * count, params, preparer=preparer)
        return
    with pytest.raises(BadInput) as caught:
        check([1] * count, params, preparer=preparer)
    assert (caught.value.field, caught.value.limit) == (field, limit)


@pytest.mark.parametrize(
    ("count", "max_tokens", "fits"), [(40, 41, True), (40, 42, False), (80, 1, True), (81, 1, False)]
)
def test_no_request_needs_more_than_all_blocks(count, max_tokens, fits):
    # 20 blocks of 4; the last token is never forwarded
    if fits:
        check([1] * count, SamplingParams(max_tokens=max_tokens))
        return
    with pytest.raises(BadInput, match="more than all KV blocks hold") as caught:
        check([1] * count, SamplingParams(max_tokens=max_tokens))
    assert caught.value.limit == 81


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"start": -1}, "start"), ({"start": 3}, "start"), ({"start": 1.0}, "start"), ({"start": True}, "start"),
        ({"start": None}, "start"),
        ({"priority": 2**31}, "priority"), ({"priority": -(2**31) - 1}, "priority"), ({"priority": 1.5}, "priority"),
        ({"priority": False}, "priority"), ({"priority": "high"}, "priority"),
        ({"deadline_s": 0}, "deadline_s"), ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"), ({"deadline_s": math.inf}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"), ({"deadline_s": None}, "deadline_s"),
        ({"cache_salt": None}, "cache_salt"), ({"cache_salt": "x" * 4097}, "cache_salt"),
        ({"cache_salt": b"x"}, "cache_salt"), ({"cache_salt": "a\ud800"}, "cache_salt"),
        ({"request_id": "\ud800"}, "request_id"), ({"aux": ("\ud800",)}, "aux"),
        ({"params": {"n": 1}}, "params"), ({"params": SamplingParams(n=9)}, "n"),
        ({"params": SamplingParams(temperature=math.nan)}, "temperature"),
        ({"params": SamplingParams(stop_token_ids=(300,))}, "stop_token_ids"),
        ({"params": SamplingParams(stop=("x",))}, "stop"), ({"params": SamplingParams(stop=("\ud800",))}, "stop"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options, field):
    with pytest.raises(BadInput) as caught:
        check(**options)
    assert caught.value.field == field


def test_values_at_the_bounds_are_fine():
    check(start=2, priority=-(2**31), deadline_s=1e9)
    check(priority=2**31 - 1, deadline_s=1, params=SamplingParams(n=8, max_tokens=1))
    check("text", SamplingParams(stop=("x",), max_tokens=1), ByteTokenizer())


def test_routing_cannot_be_asked_of_an_engine_that_captures_none():
    preparer = make_preparer(capacity=make_capacity(aux_specs=()))
    check(preparer=preparer)
    check(preparer=preparer, routing=False)
    with pytest.raises(BadInput, match="captures none") as caught:
        check(preparer=preparer, routing=True)
    assert caught.value.field == "routing"
    check(routing=True)


@pytest.mark.parametrize(
    ("aux", "told"),
    [
        ("values", "sequence of names"),
        (7, "sequence of names"),
        (["values", 7], "are not names"),
        (["routing"], "argument of its own"),
        ([""], "0 characters"),
        (["x" * 300], "300 characters"),
        ([str(number) for number in range(65)], "64 names"),
        (["value"], r"no rows of 'value' \(limit: values\)"),
    ],
)
def test_rows_that_are_not_there_or_are_no_names_are_refused(aux, told):
    with pytest.raises(BadInput, match=told) as caught:
        check(aux=aux)
    assert caught.value.field == "aux"


def test_rows_besides_routing_cannot_be_asked_where_there_are_none():
    preparer = make_preparer(capacity=make_capacity(aux_specs=SPECS[:1]))
    check(preparer=preparer, aux=None)
    check(preparer=preparer, aux=())
    for aux in (True, ["values"]):
        with pytest.raises(BadInput, match="besides routing"):
            check(preparer=preparer, aux=aux)
    dense = make_preparer(capacity=make_capacity(aux_specs=SPECS[1:]))
    assert check(preparer=dense, aux=["values", "values"]).aux == ("values",)
    with pytest.raises(BadInput, match="captures none"):
        check(preparer=dense, routing=True)


async def test_a_text_is_checked_again_when_its_tokens_are_known():
    class Odd(ByteTokenizer):
        def __init__(self, tokens):
            self.tokens = tokens

        def encode(self, text):
            return self.tokens

    for tokens, field in [([], "prompt"), ([300], "prompt"), ([1] * 100, "prompt"), ([1] * 97, "max_tokens")]:
        with pytest.raises(BadInput) as caught:
            await prepare(make_preparer(Odd(tokens)), "x")
        assert caught.value.field == field
    with pytest.raises(BadInput) as caught:
        await prepare(make_preparer(Odd([1, 2])), "x", start=2)
    assert caught.value.field == "start"


# -- good input


async def test_an_event_carries_what_was_asked():
    params = SamplingParams(
        max_tokens=6, min_tokens=2, temperature=0.5, top_k=4, top_p=0.8, min_p=0.1, seed=11, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, stop_token_ids=(9, 8), logprobs="both", top_logprobs=3,
        logit_bias={5: 1.5, 2: -100.0},
    )  # fmt: skip
    preparer = make_preparer()
    (event,) = await prepare(preparer, [1, 2, 3], params, (7,), start=1, priority=4, arrived_at=3.0, deadline=99.0)
    assert (event.key, event.group, event.tokens, event.max_tokens, event.min_tokens) == (7, 7, (1, 2, 3), 6, 2)
    assert (event.priority, event.deadline, event.start, event.stop_ids) == (4, 99.0, 1, {7, 8, 9})
    assert event.arrived_at == 3.0
    sampler = event.sampler
    assert (sampler.prompt_len, sampler.seed, sampler.index, sampler.stop_ids) == (3, 11, 0, (7, 8, 9))
    assert (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p) == (0.5, 4, 0.8, 0.1)
    assert (sampler.repetition_penalty, sampler.presence_penalty, sampler.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampler.min_tokens, sampler.raw, sampler.processed, sampler.top) == (2, True, True, 3)
    assert sampler.logit_bias() == {5: 1.5, 2: -100.0}


@pytest.mark.parametrize(("top_k", "told"), [(0, 0), (1, 1), (299, 299), (300, 0), (100_000_000, 0), (2**63 - 1, 0)])
async def test_as_many_logits_as_there_are_tokens_are_all_of_them(top_k, told):
    (event,) = await prepare(make_preparer(), [1], SamplingParams(max_tokens=1, top_k=top_k))
    assert event.sampler.top_k == told


@pytest.mark.parametrize(
    ("params", "streams", "emits", "checks"),
    [
        (SamplingParams(max_tokens=2), False, False, False),
        (SamplingParams(max_tokens=2), True, True, False),
        (SamplingParams(max_tokens=2, logprobs="raw"), False, True, False),
        (SamplingParams(max_tokens=2, stop=("x",)), False, True, True),
    ],
)
async def test_tokens_come_one_by_one_only_where_somebody_needs_them(params, streams, emits, checks):
    (event,) = await prepare(make_preparer(ByteTokenizer()), [1], params, streams=streams)
    assert (event.emits, event.checks_stops) == (emits, checks)


async def test_rows_are_wanted_or_not():
    (wanted,) = await prepare(make_preparer(), [1, 2], start=1)
    (unwanted,) = await prepare(make_preparer(), [1, 2], start=1, rows=False)
    assert (wanted.start, unwanted.start) == (1, -1)


async def test_ignoring_eos_leaves_the_other_stop_ids():
    (event,) = await prepare(make_preparer(), [1], SamplingParams(max_tokens=2, ignore_eos=True, stop_token_ids=(3,)))
    assert event.stop_ids == {3}


async def test_samples_of_one_request_share_a_seed_and_differ_by_index():
    preparer = make_preparer()
    params = SamplingParams(max_tokens=2, n=3, temperature=1.0)
    events = await prepare(preparer, [1, 2], params, (4, 5, 6))
    assert [(event.key, event.group, event.sampler.index) for event in events] == [(4, 4, 0), (5, 4, 1), (6, 4, 2)]
    assert len({event.sampler.seed for event in events}) == 1
    again = await prepare(preparer, [1, 2], params, (7, 8, 9))
    assert again[0].sampler.seed != events[0].sampler.seed
    replayed = await prepare(make_preparer(), [1, 2], params, (4, 5, 6))
    assert replayed[0].sampler.seed == events[0].sampler.seed


async def test_short_texts_are_tokenised_here_and_long_ones_in_the_child():
    long_texts = LongTexts()
    preparer = make_preparer(ByteTokenizer(), long_texts=long_texts)
    (short,) = await prepare(preparer, "x" * 50)
    assert long_texts.asked == []
    (longer,) = await prepare(preparer, "x" * 51)
    assert long_texts.asked == [(51, 9.0)]
    assert (len(short.tokens), len(longer.tokens)) == (50, 51)


# -- identities


@pytest.mark.parametrize("length", [1, 3, 4, 5, 4 * 256 - 1, 4 * 256, 4 * 256 + 1, 4 * 600 + 3])
async def test_hashes_are_those_of_the_whole_prompt_however_they_are_sliced(length):
    preparer = make_preparer(capacity=make_capacity(max_context_tokens=10_000, num_blocks=3000))
    tokens = [token % 300 for token in range(length)]
    (event,) = await prepare(preparer, tokens, cache_salt="s")
    root = root_key(preparer.namespace, b"s")
    assert (event.namespace, event.root, event.salt) == (preparer.namespace, root, "s")
    assert event.block_keys == tuple(block_keys(root, tokens, 4))


async def test_hashing_a_long_prompt_yields_to_the_loop():
    preparer = make_preparer(capacity=make_capacity(max_context_tokens=10_000, num_blocks=3000))
    turns = 0
    task = asyncio.ensure_future(prepare(preparer, [1] * (4 * 256 * 5)))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 5


async def test_without_a_prefix_cache_nothing_is_hashed():
    (event,) = await prepare(make_preparer(prefix_cache=False), [1] * 20)
    assert event.block_keys == ()


async def test_a_salt_keeps_tenants_apart():
    preparer = make_preparer()
    keys = {(await prepare(preparer, [1] * 4, cache_salt=salt))[0].block_keys for salt in ("", "a", "b", "\u20ac")}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "g"}, {"weights_id": "v"}, {"kv_layout": "x"}, {"kv_dtype": "x"}, {"block_tokens": 8},
        {"aux_specs": SPECS[:1]}, {"aux_specs": ()}, {"aux_specs": (SPECS[1], SPECS[0])},
        {"routing_debug": True}, {"numerics": "fixed"}, {"sum_slices": 4},
    ],
)  # fmt: skip
def test_whatever_makes_kv_or_rows_differ_is_in_the_namespace(change):
    assert namespace_of(make_capacity(**change)) != namespace_of(make_capacity())


def test_what_makes_no_difference_is_not():
    change = {"model": "n", "num_blocks": 3, "vocab_size": 9, "notes": ("x",), "tokenizer": "t"}
    assert namespace_of(make_capacity(**change)) == namespace_of(make_capacity())
