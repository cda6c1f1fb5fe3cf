"""Puts parts that are made while they are sent into the JSON of an answer.

The JSON is written with a mark in place of each part, and cut at the marks. A mark is drawn once in a process and never
sent, so no text of a client can hold one. Called by the rooms of paths.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.lines import one_line

if TYPE_CHECKING:
    from fdasync_http.replies import Part

#: stands for the text of the next part in an answer that is built
MARK = secrets.token_hex(16)
_MARK = MARK.encode()


def assembled(answer: Any, parts: list[Part]) -> list[bytes | Part]:
    """The compact JSON of `answer`, with `parts` in place of its marks, in order."""
    encoded = one_line(msgspec.json.encode(answer))
    if not parts:
        return [encoded]
    texts = encoded.split(_MARK)
    assert len(texts) == len(parts) + 1
    body: list[bytes | Part] = [texts[0]]
    for part, text in zip(parts, texts[1:], strict=True):
        body += [part, text]
    return body
