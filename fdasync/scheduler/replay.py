"""Replaying a recorded trace: the same events must give the same actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput, InvariantBroken
from fdasync.events.trace import FORMAT, TraceHeader, Turn
from fdasync.scheduler.core import Scheduler
from fdasync.scheduler.state.config import SchedulerConfig

if TYPE_CHECKING:
    from fdasync.events.actions import Action


def replay(trace: bytes) -> int:
    """Feed a recorded trace to a fresh scheduler; returns how many turns gave the same actions.

    Raises InvariantBroken at the first turn that differs, ValueError for what is no complete trace.
    """
    lines = trace.splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=TraceHeader)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a trace: {BadInput.of_validation(error, whole='its header')}") from None
    if header.format != FORMAT or not header.complete:
        raise ValueError(f"cannot replay a trace of format {header.format}, complete={header.complete}")
    scheduler = Scheduler(msgspec.convert(header.scheduler, SchedulerConfig))
    decoder = msgspec.json.Decoder(Turn)
    encoder = msgspec.json.Encoder()
    for number, line in enumerate(lines[1:]):
        try:
            turn = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number + 2} is not a turn: {BadInput.of_validation(error, whole='it')}") from None
        actions = scheduler.handle(list(turn.events))
        if encoder.encode(actions) != encoder.encode(turn.actions):
            raise InvariantBroken(f"turn {number} replays to other actions", _both(turn, actions))
    return len(lines) - 1


def _both(turn: Turn, actions: list[Action]) -> list[str]:
    """What a turn recorded and what it replays to."""
    return [f"recorded: {action!r}"[:400] for action in turn.actions] + [f"now: {action!r}"[:400] for action in actions]
