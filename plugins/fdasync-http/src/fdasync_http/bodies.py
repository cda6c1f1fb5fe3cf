"""Reads bodies within bounds, and decodes them: size, time, depth and number of parts are checked before memory is
taken.

Knows no paths. Called by every endpoint that takes a body.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_origin

import msgspec
import numpy as np

from fdasync_http.budget import BUDGET, Budget
from fdasync_http.failures import TOO_LONG, Refused, wrong
from fdasync_http.fields import IGNORED, Ignore, read_by
from fdasync_http.known import listed, words_at

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray
    from starlette.requests import Request

    from fdasync_http.config import HttpConfig
    from fdasync_http.front import Front

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

# longer tokens are rare; text of them alone is refused, and can be sent as token ids
_MAX_TOKEN_CHARS = 64
#: arrays and objects of a body; millions of empty ones would keep the loop for seconds
MAX_PARTS = 50_000
# some clients begin a text with it
_BOM = b"\xef\xbb\xbf"
_PIECE_NBYTES = 1 << 20
_OPENS, _CLOSES, _QUOTE = 1, -1, 2


def _kinds_of_bytes() -> NDArray[np.int8]:
    kinds = np.zeros(256, np.int8)
    kinds[list(b"[{")], kinds[list(b"]}")], kinds[list(b'"')] = _OPENS, _CLOSES, _QUOTE
    return kinds


_KINDS = _kinds_of_bytes()
_OTHERS = bytes(np.flatnonzero(_KINDS == 0).tolist())


async def read_body(request: Request, config: HttpConfig) -> bytes:
    """The whole body. Raises Refused: 413 above `max_body_nbytes`, 408 after `body_timeout_s`, 429 where the bodies of
    all requests together are too large, 400 for a body that ends early."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and len(told) < 20 and int(told) > config.max_body_nbytes:
        raise _too_large(config)
    budget: Budget = request.scope.get(BUDGET) or Budget(config.max_body_nbytes)
    parts: list[bytes] = []
    nbytes = held = 0
    try:
        # bare deadline: a client is no process of ours, and answers with nothing but its body
        async with asyncio.timeout(config.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the body ended early")
                part = message.get("body", b"")
                nbytes += len(part)
                if nbytes > config.max_body_nbytes:
                    raise _too_large(config)
                budget.take(len(part))
                held += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None
    finally:
        budget.give(held)


def _too_large(config: HttpConfig) -> Refused:
    told = f"the body is too large; the limit is {config.max_body_nbytes} bytes (max_body_nbytes, --max-body-mib)"
    return Refused(413, told, code="too_large")


def decode(body: bytes, kind: type[T], config: HttpConfig, ignore: Ignore = lambda _: None) -> T:
    """The body as a `kind`: a struct, whose fields `fields.py` has the rule of, or anything else that JSON has. A whole
    number may be written as 2.0, and numbers and flags as texts.

    Args:
        ignore: called with the name of each field that changes nothing.

    Raises Refused (400), which names the field, for anything else.
    """
    body = body.removeprefix(_BOM)
    depth, parts = _shape_of(body, config.max_json_depth)
    if depth > config.max_json_depth:
        raise Refused(400, f"the JSON is deeper than {config.max_json_depth} levels", code="bad_json")
    if parts > MAX_PARTS:
        raise Refused(400, f"the JSON has more than {MAX_PARTS} arrays and objects", code="bad_json")
    try:
        if issubclass(get_origin(kind) or kind, msgspec.Struct):
            body = msgspec.json.encode(read_by(kind, body, ignore))
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", code="bad_json") from None


def decode_query(request: Request, told: S, names: Collection[str]) -> S:
    """A struct with the values that the query of a request has for these of its fields. A flag may stand there without
    a value. Raises Refused (400), which names the field."""
    query, given = request.query_params, msgspec.structs.asdict(told)
    for field in msgspec.structs.fields(told):
        name = field.encode_name
        if name in names and name in query:
            is_one = field.type in (bool, str) or get_origin(field.type) is Literal
            one = query[name] or ("true" if field.type is bool else "")
            given[name] = one if is_one else query.getlist(name)
    try:
        return msgspec.convert(given, type(told), strict=False)
    except msgspec.ValidationError as error:
        refused = _invalid(str(error), type(told))
        # a key has no number, however often it comes
        name = refused.param = refused.param.partition("[")[0]
        if name in query and (known := words_at(type(told), f".{name}")):
            # a query is text, also where the words are numbers
            refused = wrong(name, f"{query[name]!r:.50} is none of {listed(known)}")
        raise refused from None


def _invalid(told: str, kind: Any) -> Refused:
    """The refusal of a body that msgspec rejects; it names the values that the body could have had instead."""
    # of a key, msgspec says "at `key` in `$.field`"
    words, _, place = told.partition(" - at `")
    path = place.rstrip("`").rpartition("$")[2]
    if words.startswith("Invalid enum value") and (known := words_at(kind, path)):
        words = f"{words[len('Invalid enum value ') :]} is none of {listed(known)}"
    field = path.lstrip(".")
    return wrong(field, words)


def _shape_of(body: bytes, levels: int) -> tuple[int, int]:
    """How deep arrays and objects nest, and how many there are; at least as many where one of them is too large.

    Of a body that is no JSON: as far as it is.
    """
    count = body.count(b"[") + body.count(b"{")
    if count <= min(levels, MAX_PARTS):
        # most bodies have fewer brackets than that; counting is as fast as memory
        return count, count
    if b"\\" in body:
        # outside of strings there are none, and within them no escaped letter ends one
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # one pass that is as fast as memory, since most of a body is neither bracket nor quote
    body = body.translate(None, _OTHERS)
    depth = deepest = parts = quotes = 0
    for first in range(0, len(body), _PIECE_NBYTES):
        kinds = _KINDS.take(np.frombuffer(body, np.uint8, min(_PIECE_NBYTES, len(body) - first), first))
        is_quote = kinds == _QUOTE
        before = quotes + np.cumsum(is_quote, dtype=np.int32)
        # what is within a string, and its quotes
        kinds *= ~(is_quote | (before & 1).astype(bool))
        depths = depth + np.cumsum(kinds, dtype=np.int32)
        depth, quotes = int(depths[-1]), int(before[-1])
        deepest = max(deepest, int(depths.max()))
        parts += int(np.count_nonzero(kinds == _OPENS))
        if deepest > levels or parts > MAX_PARTS:
            break
    return deepest, parts


def check_text_size(field: str, text: str, front: Front) -> None:
    """Raise Refused (400) for text that the front would have to tokenise itself, and that no context can hold."""
    most = _MAX_TOKEN_CHARS * front.generator.facts().max_context_tokens
    if len(text) > most:
        words = f"{TOO_LONG}: it has {len(text)} characters; no more than {most} can fit"
        raise Refused(400, words, param=field, code="context_length_exceeded")


async def read_json(request: Request, kind: type[T], config: HttpConfig) -> T:
    """The body of a request as a `kind`; an empty body counts as `{}`. Fields that change nothing are counted. Raises
    Refused."""
    return decode_of(request, await read_body(request, config) or b"{}", kind, config)


def decode_of(request: Request, body: bytes, kind: type[T], config: HttpConfig) -> T:
    """The body of a request, which was read, as a `kind`. Fields that change nothing are counted. Raises Refused."""
    return decode(body, kind, config, request.scope.get(IGNORED) or (lambda _: None))
