"""Record turns, so that `scheduler/replay.py` can feed them to a fresh scheduler.

A turn is the events of one `handle` call and the actions that it returned. Both are payload-free, so a ring can keep
them and a JSONL file can hold them: a header line with the scheduler's configuration, then one line per turn. The
module knows no scheduler; the driver fills the ring.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.events.actions import Action
from fdasync.events.catalog import AnyEvent, Event

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
_ENCODER = msgspec.json.Encoder()


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace.

    Attributes:
        format: version of the format.
        complete: the trace starts at the engine's first turn, so it can be replayed.
        scheduler: the scheduler's configuration, its policy included.
    """

    format: int
    complete: bool
    scheduler: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """One call of `handle`.

    Attributes:
        events: its argument.
        actions: its result.
    """

    events: list[AnyEvent]
    actions: list[Action]


class TraceRing:
    """The latest turns. Keeps the structs themselves: recording costs an append.

    Args:
        config: the scheduler's, for the header.
        max_turns: how many turns are kept.
    """

    def __init__(self, config: msgspec.Struct, max_turns: int) -> None:
        self._config = config
        self._turns: deque[tuple[list[Event], list[Action]]] = deque(maxlen=max_turns)
        self._count = 0

    def add(self, events: list[Event], actions: list[Action]) -> None:
        self._turns.append((events, actions))
        self._count += 1

    def story(self, limit: int = 20) -> list[str]:
        """The latest events in words, oldest first, for errors."""
        lines = [repr(event)[:200] for events, _ in list(self._turns)[-limit:] for event in events]
        return lines[-limit:]

    def encode(self) -> bytes:
        """The trace as JSON lines."""
        header = TraceHeader(
            format=FORMAT,
            complete=self._count == len(self._turns),
            scheduler=msgspec.to_builtins(self._config),
        )
        lines = [_ENCODER.encode(header)]
        lines += [_line({"events": events, "actions": actions}) for events, actions in self._turns]
        return b"\n".join(lines) + b"\n"

    def save(self, path: Path) -> None:
        """Write the trace to a file. Blocks: not for a loop that serves."""
        path.write_bytes(self.encode())


def _line(turn: dict[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(turn)
    except UnicodeEncodeError:
        # words of an error, which may quote a path that is no valid text; a caller's texts are checked by the frontend
        return _ENCODER.encode(_readable(msgspec.to_builtins(turn)))


def _readable(value: Any) -> Any:
    """The same, with a question mark for each lone surrogate."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list | tuple) else value
