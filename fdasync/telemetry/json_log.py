"""Writes an engine's events as JSON lines: one object per event, for people and for log collectors.

    async with Engine(config) as engine, JsonLogTap(engine, 2):  # to stderr
        ...

    {"time": "2026-03-01T12:00:00.123456Z", "at": 12.345, "seq": 88, "level": "info", "engine": "synthetic",
     "event": "RequestEnded", "request_id": "a", "reasons": {"length": 1}, "output_tokens": 10, ...}

By default it writes the noteworthy events: ends of requests, changes of breaker and weights, damaged blocks, failures,
waits that were cut off, late transfers, a loop that was held up. Prompts never appear: tokens and keys are counted,
hashes cut short.

A tap is a subscription behind a bounded queue, and lines wait in a bounded buffer (`line_writer.py`). A stuck reader
costs lines, which are counted and reported by a later line, and never holds up the engine. Knows the engine by its
public methods only. Made by users and by `fdasync serve`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from fdasync.errors import ConfigError
from fdasync.events.catalog import (
    BlockDamaged,
    BreakerChanged,
    CacheResetRequested,
    ConnectionsRefused,
    EngineDied,
    FetchEnded,
    LateTransferEnded,
    LeaseLost,
    LinkChanged,
    LookedUp,
    LoopHeldUp,
    PauseRequested,
    RequestEnded,
    ResumeRequested,
    SleepRequested,
    StepFailed,
    StoreCalled,
    StoreEnded,
    TapFailed,
    WeightsChanged,
    WeightsRelabelled,
    WritesRefused,
)
from fdasync.telemetry.line_writer import LineWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from fdasync.engine import Engine
    from fdasync.events.bus import Subscription
    from fdasync.events.catalog import Event

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
NOTEWORTHY: Final = (
    BlockDamaged,
    BreakerChanged,
    CacheResetRequested,
    ConnectionsRefused,
    EngineDied,
    FetchEnded,
    LeaseLost,
    LateTransferEnded,
    LinkChanged,
    LookedUp,
    LoopHeldUp,
    PauseRequested,
    RequestEnded,
    ResumeRequested,
    SleepRequested,
    StepFailed,
    StoreEnded,
    TapFailed,
    WeightsChanged,
    WeightsRelabelled,
    WritesRefused,
)
_TURN_EVENTS = 64
_MAX_CHARS = 500
_HEX_CHARS = 16
_MAX_ITEMS = 16
# fields that tell what a user said: their items are counted, never written
_COUNTED = frozenset({"tokens", "block_keys", "stop_ids", "keys"})
_LEFT_OUT = frozenset({"sampler", "at", "seq"})


class JsonLogTap:
    """See the module. Enter it on the engine's loop once the engine runs; leave it before or after the engine's end.

    Args:
        write: a path (appended to), a descriptor that stays yours (of a pipe, a terminal, a socket, a file), or a
            function that takes a line with its newline; it is called on the loop and must not block.
        kinds: which events; None: the noteworthy ones.
        level: the lowest level that is written; None: "info", or "debug" where `kinds` are given.
        name: the engine's name in each line; None: its model, or its runner.
        limit: most events that wait to be written.
        max_nbytes: most bytes of lines that wait for their reader.
        close_s: how long leaving waits for the reader to take lines, in seconds.
        wall: returns the time of day, in seconds since 1970.

    Attributes:
        lines: how many lines of events went to the function, or into the buffer; see `dropped`.
    """

    def __init__(
        self,
        engine: Engine,
        write: str | os.PathLike[str] | int | Callable[[bytes], object],
        *,
        kinds: Iterable[type[Event]] | None = None,
        level: Level | None = None,
        name: str | None = None,
        limit: int = 4096,
        max_nbytes: int = 1 << 20,
        close_s: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError for an unknown level."""
        if level is None:
            level = "info" if kinds is None else "debug"
        if level not in LEVELS:
            raise ConfigError("level", f"{level!r} is no level", limit=", ".join(LEVELS))
        self.lines = 0
        self._engine = engine
        self._target = None if callable(write) else write
        self._function = write if callable(write) else None
        self._kinds = NOTEWORTHY if kinds is None else tuple(kinds)
        self._from = LEVELS.index(level)
        self._name = _text(engine.config.model or engine.config.runner if name is None else name)
        self._limit = limit
        self._max_nbytes = max_nbytes
        self._close_s = close_s
        self._wall = wall
        self._loop: asyncio.AbstractEventLoop
        self._writer: LineWriter | None = None
        self._events: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen_dropped = 0
        self._store_left_alone = False
        self._encoder = msgspec.json.Encoder()

    @property
    def dropped(self) -> int:
        """Events and lines that were lost: too many waited, or writing failed. A later line reports them."""
        lost = 0 if self._events is None else self._events.dropped
        return lost if self._writer is None else lost - self._seen_dropped + self._writer.dropped

    @property
    def problem(self) -> str:
        """The error of the latest write that failed, or ""."""
        return "" if self._writer is None else self._writer.problem

    async def __aenter__(self) -> JsonLogTap:
        """Raises EngineClosed before the engine's start, ConfigError for a target that cannot be written to."""
        if self._events is not None:
            raise ConfigError("tap", "was entered before", hint="make another one")
        bus = self._engine.bus
        self._loop = asyncio.get_running_loop()
        if self._target is not None:
            self._writer = LineWriter(self._target, self._max_nbytes, self._note)
        self._events = events = bus.subscribe(*self._kinds, limit=self._limit)
        self._task = self._loop.create_task(self._consume(events), name="fdasync-jsonlog")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Writes the lines that wait, within `close_s`. Raises what the function that takes lines raised."""
        assert self._events is not None
        assert self._task is not None
        self._events.close()
        try:
            # ends by itself: the subscription is closed, and holds a bounded number of events
            await self._task
        finally:
            if self._writer is not None:
                await self._writer.aclose(self._close_s)

    async def _consume(self, events: Subscription) -> None:
        taken = 0
        async for event in events:
            level = self._level(event)
            if LEVELS.index(level) >= self._from:
                self._write(self._line(event.at, level, type(event).__name__, {"seq": event.seq, **summary(event)}))
            taken += 1
            if not taken % _TURN_EVENTS:
                # a full queue must not become one long callback
                await asyncio.sleep(0)

    def _level(self, event: Event) -> Level:
        if isinstance(event, BreakerChanged):
            self._store_left_alone = event.state != "closed"
        elif isinstance(event, LookedUp) and self._store_left_alone:
            # every request makes such an event; the breaker's own line has the reason
            return "debug"
        return level_of(event)

    def _write(self, line: bytes) -> None:
        assert self._events is not None
        lost = self._events.dropped - self._seen_dropped
        self._seen_dropped += lost
        if self._writer is not None:
            self._writer.dropped += lost
            self.lines += self._writer.offer(line)
        elif self._function is not None:
            if lost:
                self._function(self._note(lost, ""))
            self._function(line)
            self.lines += 1

    def _note(self, count: int, problem: str) -> bytes:
        fields = {"count": count, "problem": _text(problem)}
        return self._line(self._loop.time(), "warning", "LinesDropped", fields)

    def _line(self, at: float, level: str, name: str, fields: dict[str, Any]) -> bytes:
        # back from the time of day now: stays right when the clock is set
        moment = datetime.fromtimestamp(self._wall() - (self._loop.time() - at), UTC)
        line = {
            "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "at": round(at, 6),
            "level": level,
            "engine": self._name,
            "event": name,
            **fields,
        }
        return self._encoder.encode(line) + b"\n"


def level_of(event: Event) -> Level:
    """How much an event matters."""
    match event:
        case EngineDied() | StepFailed() | TapFailed():
            return "error"
        case BlockDamaged() | WritesRefused() | LoopHeldUp():
            return "warning"
        case RequestEnded():
            return "warning" if event.error or "failed" in event.reasons else "info"
        case BreakerChanged():
            return "warning" if event.state == "open" else "info"
        case FetchEnded() | StoreEnded():
            return "warning" if event.late else "debug"
        case LookedUp():
            return "debug" if event.answered else "warning"
        case StoreCalled():
            return "warning" if event.error or event.failed or event.damaged else "debug"
        case ConnectionsRefused():
            return "warning"
        case LinkChanged():
            return "info" if event.up else "warning"
        case LeaseLost() | LateTransferEnded() | PauseRequested() | ResumeRequested() | SleepRequested():
            return "info"
        case WeightsChanged() | WeightsRelabelled():
            return "info"
        case CacheResetRequested():
            return "info"
    return "debug"


def summary(event: Event) -> dict[str, Any]:
    """An event's fields as they are written: plain values, tokens and keys counted, hashes cut short."""
    found: dict[str, Any] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name in _LEFT_OUT:
            continue
        if name == "cached":
            found["cached"] = dict(zip(("device", "host", "store"), value, strict=True))
        elif name == "reasons":
            found["reasons"] = dict(Counter(value))
        elif name in ("arrived", "stored"):
            found["blocks"] = len(value)
            found[name] = sum(value)
        elif name in _COUNTED:
            found[f"num_{name}"] = len(value)
        elif name == "salt":
            found["salted"] = bool(value)
        elif isinstance(value, bytes):
            found[name] = value.hex()[:_HEX_CHARS]
        elif name == "weights_id":
            found[name] = value[:_HEX_CHARS]
        elif isinstance(value, str):
            # a stored object's key is made of hashes
            found[name] = (
                "/".join([_text(part)[:_HEX_CHARS] for part in value.split("/")]) if name == "key" else _text(value)
            )
        elif isinstance(value, tuple | frozenset):
            found[name if len(value) <= _MAX_ITEMS else f"num_{name}"] = (
                value if len(value) <= _MAX_ITEMS else len(value)
            )
        elif isinstance(value, float):
            found[name] = round(value, 6) if math.isfinite(value) else None
        else:
            found[name] = value
    return found


def _text(value: str) -> str:
    """Text that can be written: not too long, and UTF-8."""
    return value[:_MAX_CHARS].encode(errors="replace").decode()
