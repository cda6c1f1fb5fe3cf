"""What a router refuses before anything is sent, in the words that an engine has for it (`prepare.py`).

An instance drops what it cannot decode, and its caller would wait to the deadline: so whatever is sent for a caller is
checked here, field by field, and then once more as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized
from typing import Any

from fdasync.errors import BadInput, ProtocolError
from fdasync.pd.messages import Message, Submit, decode, encode
from fdasync.request import MAX_SALT_CHARS, SamplingParams, check_text, checked_aux

#: of `Tokens` and of the text of a Submit, as their types say
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT_CHARS = 4 << 20
_MAX_ID_CHARS = 200
_MAX_PATH_CHARS = 4096


def words_of(
    prompt: Any, params: SamplingParams, *, priority: Any, deadline_s: Any, routing: Any, aux: Any, start: Any,
    salt: Any, streams: bool,
) -> Submit:  # fmt: skip
    """A request in words, without its names; `params` are checked but for what they would be too long for. Raises
    BadInput."""
    if not _is_int(priority) or not -(2**31) <= priority < 2**31:
        raise BadInput("priority", f"{priority!r} is not an integer of 32 bits")
    _check_seconds("deadline_s", deadline_s, above_0=True)
    if not _is_int(start) or not 0 <= start < MAX_PROMPT_TOKENS:
        raise BadInput("start", f"{start!r} is not a position", limit="0 up to the prompt's length")
    if not isinstance(salt, str):
        raise BadInput("cache_salt", "is not a string")
    if len(salt) > MAX_SALT_CHARS:
        raise BadInput("cache_salt", f"{len(salt)} characters are too many", limit=f"{MAX_SALT_CHARS} characters")
    check_text("cache_salt", salt)
    if routing is not None and not isinstance(routing, bool):
        raise BadInput("routing", f"{routing!r} is neither True, False nor None")
    aux = checked_aux(aux)
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
        "-", "-", text, tokens, (), params, streams, priority, float(deadline_s), routing, aux, start, salt,
    )  # fmt: skip


def check_request_id(request_id: Any) -> None:
    """Raises BadInput."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_ID_CHARS:
        raise BadInput("request_id", f"{request_id!r} is no name", limit=f"1 to {_MAX_ID_CHARS} characters")
    check_text("request_id", request_id)


def check_path(field: str, path: str) -> None:
    """Raises BadInput for a path that a Command cannot carry."""
    if len(path) > _MAX_PATH_CHARS:
        raise BadInput(field, f"a path of {len(path)} characters", limit=f"{_MAX_PATH_CHARS} characters")
    check_text(field, path)


def check_limit_s(limit_s: Any) -> None:
    """Raises BadInput for what is no time to wait."""
    _check_seconds("limit_s", limit_s, above_0=False)


def check_whole(field: str, message: Message) -> None:
    """Raises BadInput if whoever gets a message could not read it; rare enough that it is tried before it is sent."""
    try:
        decode(encode(message))
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        # encoding raises TypeError for what has no msgpack, OverflowError for integers beyond 64 bits
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
        # before anything is read of it
        raise BadInput("prompt", f"{len(prompt)} tokens leave no room to answer", limit=MAX_PROMPT_TOKENS)
    tolist = getattr(prompt, "tolist", None)
    values = tolist() if callable(tolist) else prompt
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise BadInput("prompt", f"{type(prompt).__name__} is neither text nor a sequence of token ids")
    if not values:
        raise BadInput("prompt", "is empty", limit="at least one token")
    if bool in set(map(type, values)):
        raise BadInput("prompt", "holds a bool, which is no token id")
    try:
        return array("i", values).tobytes()
    except (TypeError, OverflowError) as error:
        raise BadInput("prompt", f"holds something that is no token id: {error}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
