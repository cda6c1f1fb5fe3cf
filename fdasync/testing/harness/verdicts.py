"""Assertions of the conformance suites, whose messages say what was called, what it returned, and what is right.

A suite runs in other projects, where pytest does not rewrite its assertions: so each message says by itself what
happened. Used by the suites for stores, runners and transports.
"""

from __future__ import annotations

from typing import Any

from fdasync.cache.store.base import Outcome

_MOST_CHARS = 400
_MOST_BYTES = 8


def equal(found: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError, with both, unless they are equal."""
    if found == wanted:
        return
    where = ""
    if isinstance(found, bytes) and isinstance(wanted, bytes) and len(found) == len(wanted):
        at = next(at for at, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
        where = f"; byte {at} differs first: {found[at]:#04x} instead of {wanted[at]:#04x}"
    raise AssertionError(f"{what}: it returned {in_words(found)} instead of {in_words(wanted)}{where}")


def check(holds: object, what: str, found: Any) -> None:
    """Raise AssertionError, with what was found, unless the condition holds."""
    if not holds:
        raise AssertionError(f"{what}: it returned {in_words(found)}")


def in_words(value: Any) -> str:
    """A value in a message: bytes by their number and the first of them, outcomes in words; cut where it is long."""
    if isinstance(value, bytes | bytearray | memoryview):
        text = f"{len(value)} bytes {bytes(value[:_MOST_BYTES]).hex()}{'...' if len(value) > _MOST_BYTES else ''}"
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        inner = ", ".join([in_words(each) for each in value])
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    elif isinstance(value, Outcome):
        problem = f" ({value.problem}{'; transient' if value.transient else ''})" if value.problem else ""
        text = f"{value.status}{problem}"
    else:
        text = repr(value)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
