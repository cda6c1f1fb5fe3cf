"""Reads bodies within bounds, and decodes them: size, time and depth are checked before memory is taken.

Knows no paths. Called by every endpoint that takes a body.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fdasync_http.failures import TOO_LONG, Refused

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.config import HttpConfig
    from fdasync_http.front import Front

T = TypeVar("T")

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
# longer tokens are rare; text of them alone is refused, and can be sent as token ids
_MAX_TOKEN_CHARS = 64
_LEVELS = re.compile(rb"[\[\]{}]")


async def read_body(request: Request, config: HttpConfig) -> bytes:
    """The whole body. Raises Refused: 413 above `max_body_nbytes`, 408 after `body_timeout_s`, 400 for a body that ends
    early."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and len(told) < 20 and int(told) > config.max_body_nbytes:
        raise _too_large(config)
    parts: list[bytes] = []
    nbytes = 0
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
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None


def _too_large(config: HttpConfig) -> Refused:
    return Refused(413, f"the body is too large; the limit is {config.max_body_nbytes} bytes", code="too_large")


def decode(body: bytes, kind: type[T], config: HttpConfig) -> T:
    """The body as a `kind`. Raises Refused (400), which names the field, for anything else."""
    if _is_deeper(body, config.max_json_depth):
        raise Refused(400, f"the JSON is deeper than {config.max_json_depth} levels", code="bad_json")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise Refused(400, f"{field}: {words}" if field else words, param=field, code="bad_input") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", code="bad_json") from None


def _is_deeper(body: bytes, levels: int) -> bool:
    """Whether arrays and objects nest deeper than `levels`."""
    # most bodies have fewer brackets than that; counting is as fast as memory
    if body.count(b"[") + body.count(b"{") <= levels:
        return False
    depth = 0
    for match in _LEVELS.finditer(_STRINGS.sub(b'""', body)):
        depth += 1 if match.group() in b"[{" else -1
        if depth > levels:
            return True
    return False


def check_text_size(field: str, text: str, front: Front) -> None:
    """Raise Refused (400) for text that the front would have to tokenise itself, and that no context can hold."""
    most = _MAX_TOKEN_CHARS * front.generator.facts().max_context_tokens
    if len(text) > most:
        words = f"{TOO_LONG}: {field} has {len(text)} characters; no more than {most} can fit"
        raise Refused(400, words, param=field, code="context_length_exceeded")


async def read_json(request: Request, kind: type[T], config: HttpConfig) -> T:
    """The body of a request as a `kind`; an empty body counts as `{}`. Raises Refused."""
    return decode(await read_body(request, config) or b"{}", kind, config)
