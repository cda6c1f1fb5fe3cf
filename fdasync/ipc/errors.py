"""Errors that cross from a child process to its parent: by the name of their class and its constructor's arguments.

No other class than those of a table is made from a peer's message. Called by `rpc.py`, `service.py` and contracts.
"""

from __future__ import annotations

import contextlib
import inspect

import msgspec

from fdasync.errors import FdasyncError, ProtocolError


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """To the parent: the call raised.

    Attributes:
        number: of the call.
        kind: name of the error's class.
        fields: its constructor's arguments.
    """

    number: int
    kind: str
    fields: dict[str, str | int | tuple[str, ...] | None]


class ErrorTable:
    """The classes of errors that may cross a channel; no other class is made from a peer's message.

    Args:
        kinds: each keeps the arguments of its constructor as attributes of the same names.
    """

    def __init__(self, *kinds: type[FdasyncError]) -> None:
        self._fields = {kind: frozenset(inspect.signature(kind).parameters) for kind in kinds}

    def __contains__(self, error: BaseException) -> bool:
        return type(error) in self._fields

    def pack(self, number: int, error: FdasyncError) -> Failed:
        """An error of the table, for the wire. A limit may be of any type, so it crosses in words."""
        fields = {
            name: value if value is None or (isinstance(value, (int, tuple)) and name != "limit") else str(value)
            for name, value in error.fields().items()
        }
        return Failed(number, type(error).__name__, fields)

    def unpack(self, failed: Failed) -> FdasyncError:
        """The error of a message. Raises ProtocolError for a class that is not in the table, or for wrong fields."""
        for kind, fields in self._fields.items():
            if kind.__name__ == failed.kind and failed.fields.keys() == fields:
                with contextlib.suppress(TypeError, ValueError):
                    return kind(**failed.fields)
        raise ProtocolError(f"a child process failed in a way that has no name here: {failed.kind}")
