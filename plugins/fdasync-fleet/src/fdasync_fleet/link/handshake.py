"""Reads the first message of either side: a Hello of this protocol, or a reason to refuse it.

The version is read before the other fields: a Hello of another version may have other fields, but every version is an
array that begins with tag and version. Pure; knows no sessions. Called by `inbound.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import ProtocolError
from fdasync_fleet.messages import PROTOCOL, Hello, Refused, decode

if TYPE_CHECKING:
    from fdasync_fleet.link.wire import Frame


class _AnyHello(msgspec.Struct, array_like=True, tag="hello"):
    """The first fields of a Hello, the same in all versions; msgspec ignores the rest."""

    protocol: int


_ANY = msgspec.msgpack.Decoder(_AnyHello)


def hello_of(body: Frame) -> Hello | Refused:
    """A Hello of our version, or the reply to one of another version. Raises ProtocolError for any other message."""
    try:
        message = decode(body)
    except ProtocolError:
        try:
            theirs = _ANY.decode(body).protocol
        except (msgspec.MsgspecError, ValueError, RecursionError):
            theirs = PROTOCOL
        if theirs == PROTOCOL:
            raise
        return other_protocol(theirs)
    if not isinstance(message, Hello):
        raise ProtocolError(f"a {type(message).__name__} where a Hello should be")
    return message if message.protocol == PROTOCOL else other_protocol(message.protocol)


def other_protocol(theirs: int) -> Refused:
    return Refused("protocol", f"ours is {PROTOCOL}, theirs is {theirs}")
