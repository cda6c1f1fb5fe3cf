"""Keeps the JSON of an event on one line for clients that know more line ends than server-sent events have.

`httpx.Response.aiter_lines`, through which many clients read a stream, cuts at every line end of Unicode. Of these JSON
lets U+0085, U+2028 and U+2029 stand in a text as they are. Pure. Called by `parts.py` and `replies.py`.
"""

from __future__ import annotations

_ENDS = tuple([(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029"])


def one_line(encoded: bytes) -> bytes:
    """The same JSON with those three characters escaped. They can stand in its strings alone."""
    for end, escaped in _ENDS:
        encoded = encoded.replace(end, escaped)
    return encoded
