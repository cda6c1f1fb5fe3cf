"""Bodies within bounds: size, time, depth, and errors that name the field."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import msgspec
import pytest
from fdasync_http.bodies import decode, decode_query, read_body
from fdasync_http.budget import BUDGET, Budget
from fdasync_http.config import HttpConfig
from fdasync_http.failures import Refused
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request


def request_of(*messages, headers=()):
    waiting = list(messages)

    async def receive():
        if not waiting:
            await asyncio.get_running_loop().create_future()
        return waiting.pop(0)

    return Request({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive)


def part(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_whole_whatever_its_parts():
    assert await read_body(request_of(part(b"ab", True), part(b"", True), part(b"c")), HttpConfig()) == b"abc"


@pytest.mark.parametrize("headers", [(), [(b"content-length", b"11")]])
async def test_a_body_above_the_limit_is_refused(headers):
    config = HttpConfig(max_body_nbytes=10)
    assert len(await read_body(request_of(part(b"x" * 10)), config)) == 10
    with pytest.raises(Refused, match=r"the limit is 10 bytes \(max_body_nbytes, --max-body-mib\)") as refused:
        await read_body(request_of(part(b"x" * 6, True), part(b"x" * 5), headers=headers), config)
    assert refused.value.status == 413


async def test_a_body_that_is_told_to_be_too_large_is_not_read():
    def never():
        raise AssertionError("the body was read")

    request = Request({"type": "http", "headers": [(b"content-length", b"999999999999")]}, never)
    with pytest.raises(Refused, match="too large"):
        await read_body(request, HttpConfig())


async def test_half_a_body_ends_at_its_deadline():
    with pytest.raises(Refused, match=r"did not arrive within 0.01 s") as refused:
        await read_body(request_of(part(b"{", True)), HttpConfig(body_timeout_s=0.01))
    assert refused.value.status == 408


async def test_a_client_that_goes_away_ends_its_body():
    with pytest.raises(Refused, match="ended early"):
        await read_body(request_of(part(b"{", True), {"type": "http.disconnect"}), HttpConfig())


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A body."""

    count: int
    inner: list[dict[str, int]] = []


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (b"", "", "no JSON"),
        (b"{", "", "no JSON"),
        (b'{"count": 1}x', "", "no JSON"),
        (b'{"count": "a"}', "count", "count: Expected `int`, got `str`"),
        (b'{"count": 1, "inner": [{"a": null}]}', "inner[0][...]", "Expected `int`, got `null`"),
        (b'{"cuont": 1}', "cuont", "cuont: there is no such key; did you mean count. known are: count, inner"),
        (b"[]", "", "Expected `object`"),
        (b'"\xff"', "", "Expected `object`|no JSON"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_and_named(body, param, told):
    with pytest.raises(Refused, match=told) as refused:
        decode(body, Body, HttpConfig())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_deep_body_is_refused_before_it_is_decoded():
    for depth in (33, 10_000, 1_000_000):
        with pytest.raises(Refused, match="deeper than 32 levels"):
            decode(b"[" * depth + b"]" * depth, list, HttpConfig())
    assert decode(b"[" * 32 + b"]" * 32, list, HttpConfig())


def test_a_body_of_millions_of_empty_parts_is_refused_before_it_is_decoded():
    with pytest.raises(Refused, match="more than 50000 arrays and objects"):
        decode(b"[" + b"[]," * 3_000_000 + b"[]]", list, HttpConfig())
    # brackets of a text are no parts
    text = "[" * 300_000
    assert decode(msgspec.json.encode([text]), list, HttpConfig()) == [text]


def test_a_budget_is_given_back_whatever_becomes_of_a_body():
    budget = Budget(10)
    budget.take(8)
    with pytest.raises(Refused) as refused:
        budget.take(3)
    assert (refused.value.status, budget.held) == (429, 8)
    budget.give(8)
    budget.take(10)


@pytest.mark.parametrize("last", [part(b"cd"), part(b"x" * 20), {"type": "http.disconnect"}, None])
async def test_a_body_holds_its_bytes_only_while_it_is_read(last):
    budget = Budget(15)
    request = request_of(part(b"ab", True), *([] if last is None else [last]))
    request.scope[BUDGET] = budget
    with contextlib.suppress(Refused):
        await read_body(request, HttpConfig(body_timeout_s=0.01))
    assert budget.held == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet='ab"\\[]{}é\n'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='ab"\\[{}]', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def depth_of(value):
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@pytest.mark.ci
@given(json_values, st.integers(1, 5))
def test_depth_counts_levels_and_no_brackets_in_strings(value, limit):
    body = msgspec.json.encode(value)
    config = HttpConfig(max_json_depth=limit)
    if depth_of(value) > limit:
        with pytest.raises(Refused, match="deeper"):
            decode(body, object, config)
    else:
        assert decode(body, object, config) == value


class Call(msgspec.Struct, frozen=True):
    """A call, whose query may have fields of its body."""

    level: Literal[0, 1, 2] = 1
    clear: bool = False
    tags: list[Literal["weights", "kv_cache"]] | None = None
    own: str = ""


NAMES = ("level", "clear", "tags")


def asked(query, call):
    return decode_query(Request({"type": "http", "query_string": query, "headers": []}), call, NAMES)


def test_words_of_a_query_go_before_those_of_a_body():
    sent = Call(2, True, ["kv_cache"], "a")
    assert asked(b"", sent) == sent
    assert asked(b"level=0&clear=FALSE&tags=weights&tags=kv_cache&own=b", sent) == Call(
        0, False, ["weights", "kv_cache"], "a"
    )
    # a flag without a value is set
    assert asked(b"clear=", Call()).clear


@pytest.mark.parametrize("query", [b"level=01", b"level=7", b"level=", b"clear=yes", b"tags=weights&tags=x", b"tags="])
def test_a_wrong_word_of_a_query_is_refused_by_its_key(query):
    with pytest.raises(Refused) as error:
        asked(query, Call())
    assert (error.value.status, error.value.param) == (400, query.partition(b"=")[0].decode())
