"""Checks the arguments of a router's calls, with the errors that an engine raises for them (`engine/prepare.py`).

An instance drops a message that it cannot decode, and the caller would wait until the deadline. So each field is
checked here, and then the whole message. Knows no instances. Called by `router/router.py` and `router/control.py`.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import BadInput, ProtocolError, SourceUnsupported
from fdasync.request import MAX_SALT_CHARS, check_text, check_trace, checked_aux, no_tokens
from fdasync_fleet.messages import Message, Submit, decode, encode

if TYPE_CHECKING:
    from fdasync.request import GenerateRequest

#: of `Tokens` and of the text of a Submit, as their types say
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT_CHARS = 4 << 20
_INTS = list[int]
_MAX_ID_CHARS = 200
_MAX_PATH_CHARS = 4096


def submit_of(request: GenerateRequest, request_deadline_s: float) -> Submit:
    """The message for a call, without the request's names. Raises BadInput.

    Args:
        request: the call; its `params` are checked already, except against an instance's context.
        request_deadline_s: the deadline of a call that names none.
    """
    priority: Any = request.priority
    if not _is_int(priority) or not -(2**31) <= priority < 2**31:
        raise BadInput("priority", f"{priority!r} is not an integer of 32 bits")
    deadline_s = request_deadline_s if request.deadline_s is None else request.deadline_s
    _check_seconds("deadline_s", deadline_s, above_0=True)
    start: Any = request.start
    if not _is_int(start) or not 0 <= start < MAX_PROMPT_TOKENS:
        raise BadInput("start", f"{start!r} is not a position", limit="0 up to the prompt's length")
    salt: Any = request.cache_salt
    if not isinstance(salt, str):
        raise BadInput("cache_salt", "is not a string")
    if len(salt) > MAX_SALT_CHARS:
        raise BadInput("cache_salt", f"{len(salt)} characters are too many", limit=f"{MAX_SALT_CHARS} characters")
    check_text("cache_salt", salt)
    routing: Any = request.routing
    if routing is not None and not isinstance(routing, bool):
        raise BadInput("routing", f"{routing!r} is neither True, False nor None")
    aux = checked_aux(request.aux)
    check_trace(request.trace)
    prompt, params = request.prompt, request.params
    if params.max_tokens > MAX_PROMPT_TOKENS:
        raise BadInput("max_tokens", f"{params.max_tokens} tokens are beyond the context", limit=MAX_PROMPT_TOKENS)
    text, tokens = None, b""
    if isinstance(prompt, str):
        text = prompt
        if not text:
            raise BadInput("prompt", "is empty", limit="at least one token")
        if len(text) > MAX_TEXT_CHARS:
            raise BadInput("prompt", f"{len(text)} characters cannot fit in the context", limit=MAX_TEXT_CHARS)
        check_text("prompt", text)
    else:
        tokens = _token_bytes(prompt)
        if start >= len(tokens) // 4:
            raise BadInput("start", f"{start} is not inside the prompt", limit=f"0 to {len(tokens) // 4 - 1}")
    return Submit(
        request="-", request_id="-", text=text, tokens=tokens, decoders=(), params=params, streams=request.streams,
        priority=priority, deadline_s=float(deadline_s), routing=routing, aux=aux, start=start, salt=salt,
        trace=request.trace,
    )  # fmt: skip


def check_request_id(request_id: Any) -> None:
    """Raises BadInput."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_ID_CHARS:
        raise BadInput("request_id", f"{request_id!r} is no name", limit=f"1 to {_MAX_ID_CHARS} characters")
    check_text("request_id", request_id)


def folder_of(source: Any) -> str:
    """The checkpoint folder of a weight update, as a verb carries it.

    Raises SourceUnsupported for tensors, BadInput for a value that is no source.
    """
    path = os.fspath(source) if isinstance(source, os.PathLike) else source
    if isinstance(path, str):
        if len(path) > _MAX_PATH_CHARS:
            raise BadInput("source", f"a path of {len(path)} characters", limit=f"{_MAX_PATH_CHARS} characters")
        if not path or "\0" in path:
            raise BadInput("source", f"{source!r} is no folder")
        check_text("source", path)
        return path
    if isinstance(path, Sequence) and not isinstance(path, bytes | bytearray | memoryview):
        raise SourceUnsupported("tensors of this process", "a checkpoint folder that every instance can read")
    raise BadInput("source", f"{type(source).__name__} is neither a folder nor a sequence of tensors")


def check_limit_s(limit_s: Any) -> None:
    """Raises BadInput for a value that is no time limit."""
    _check_seconds("limit_s", limit_s, above_0=False)


def check_whole(field: str, message: Message) -> None:
    """Raises BadInput if the receiver could not decode a message; tries it by encoding and decoding the message."""
    try:
        decode(encode(message))
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        # encoding raises TypeError for types that msgpack lacks, OverflowError for integers beyond 64 bits
        raise BadInput(field, f"cannot be sent: {error}"[:1000]) from None


def _check_seconds(field: str, value: Any, *, above_0: bool) -> None:
    # `not (...)` so that NaN is refused as well
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= 1e9
        or (above_0 and not value)
    ):
        limit = "above 0, up to 1e9" if above_0 else "0 to 1e9"
        raise BadInput(field, f"{value!r} is out of range", limit=limit)


def _token_bytes(prompt: Any) -> bytes:
    if isinstance(prompt, Sized) and getattr(prompt, "ndim", 1) == 1 and len(prompt) > MAX_PROMPT_TOKENS:
        # before the values are copied
        raise BadInput("prompt", f"{len(prompt)} tokens leave no room to answer", limit=MAX_PROMPT_TOKENS)
    if isinstance(prompt, array) and prompt.typecode == "i" and prompt:
        return prompt.tobytes()
    tolist = getattr(prompt, "tolist", None)
    values = tolist() if callable(tolist) else prompt
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise BadInput("prompt", f"{type(prompt).__name__} is neither text nor a sequence of token ids")
    if not values:
        raise BadInput("prompt", "is empty", limit="at least one token")
    try:
        # all at once if they are Python's integers; others, such as numpy's, and wrong ones are checked one by one
        msgspec.convert(values, _INTS)
        return struct.pack(f"{len(values)}i", *values)
    except (msgspec.ValidationError, struct.error, TypeError, UnicodeEncodeError):
        pass
    if bool in set(map(type, values)):
        raise BadInput("prompt", "holds a bool, which is no token id")
    try:
        return array("i", values).tobytes()
    except (TypeError, OverflowError) as error:
        raise no_tokens(values, error) from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
