"""What the first message of either side has to be: a Hello of this protocol that fits.

The version is looked at before anything else of it: a Hello of another protocol may have other fields, but is an array
that begins with its tag and its version in all of them. Pure. Used by `links.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import ProtocolError
from fdasync.pd.messages import PROTOCOL, Hello, Refused, decode

if TYPE_CHECKING:
    from fdasync.pd.link.wire import Frame


class _AnyHello(msgspec.Struct, array_like=True, tag="hello"):
    """What Hellos of all protocols have in common; what comes after it is not looked at."""

    protocol: int


_ANY = msgspec.msgpack.Decoder(_AnyHello)


def hello_of(body: Frame) -> Hello | Refused:
    """A Hello of our protocol, or the answer to one of another. Raises ProtocolError for what is no Hello."""
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
