"""Recording turns, and replaying them into a fresh scheduler.

A turn is the events of one `handle` call and the actions that came of it. Both are payload-free, so a
ring can keep them and a JSONL file can hold them: a header line with the scheduler's configuration,
then one line per turn. Replaying the events must give the same actions.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from fdasync.actions import Action
from fdasync.errors import InvariantBroken
from fdasync.events.catalog import AnyEvent, Event

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.scheduler import Scheduler

_FORMAT = 1


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace. `complete`: it starts at the engine's first turn, so it can be replayed."""

    format: int
    complete: bool
    scheduler: dict[str, int | bool]


class Turn(msgspec.Struct, frozen=True):
    """One call of `handle`."""

    events: list[AnyEvent]
    actions: list[Action]


class TraceRing:
    """The latest turns. Keeps the structs themselves: recording costs an append."""

    def __init__(self, scheduler: Scheduler, max_turns: int) -> None:
        self._config = scheduler.config
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
            format=_FORMAT,
            complete=self._count == len(self._turns),
            scheduler=msgspec.structs.asdict(self._config),
        )
        encoder = msgspec.json.Encoder()
        lines = [encoder.encode(header)]
        lines += [encoder.encode({"events": events, "actions": actions}) for events, actions in self._turns]
        return b"\n".join(lines) + b"\n"

    def save(self, path: Path) -> None:
        """Write the trace to a file. Blocks: call it where that is no harm."""
        path.write_bytes(self.encode())


def replay(trace: bytes) -> int:
    """Feed a recorded trace to a fresh scheduler; returns how many turns gave the same actions.

    Raises InvariantBroken at the first turn that differs, ValueError for what is no complete trace.
    """
    from fdasync.scheduler import Scheduler, SchedulerConfig

    lines = trace.splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=TraceHeader)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a trace: {error}") from None
    if header.format != _FORMAT or not header.complete:
        raise ValueError(f"cannot replay a trace of format {header.format}, complete={header.complete}")
    scheduler = Scheduler(msgspec.convert(header.scheduler, SchedulerConfig))
    decoder = msgspec.json.Decoder(Turn)
    encoder = msgspec.json.Encoder()
    for number, line in enumerate(lines[1:]):
        try:
            turn = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number + 2} is not a turn: {error}") from None
        actions = scheduler.handle(list(turn.events))
        if encoder.encode(actions) != encoder.encode(turn.actions):
            raise InvariantBroken(f"turn {number} replays to other actions", scheduler_story(turn, actions))
    return len(lines) - 1


def scheduler_story(turn: Turn, actions: list[Action]) -> list[str]:
    """What a turn recorded and what it replays to."""
    return [f"recorded: {action!r}"[:400] for action in turn.actions] + [f"now: {action!r}"[:400] for action in actions]
