"""The loggers of the project, all below `fdasync`, and a handler that writes their lines without waiting.

    logging.getLogger("fdasync").setLevel("INFO")      # in a program that has handlers of its own
    async with log_to(2, "info", as_json=True): ...    # as the commands do: to stderr
    async with JsonLogTap(engine, to_logger): ...      # an engine's events, in the logger `fdasync.engine`

The library adds no handler to the root logger, and `fdasync` has none that writes. Knows no engine. Called by the
commands that run long, and by users.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.telemetry.line_writer import LineWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LogLevel = Literal["debug", "info", "warning", "error"]
ROOT, EVENTS = "fdasync", "fdasync.engine"
_MAX_WAITING_NBYTES = 1 << 20
_CLOSE_S = 1.0
# fields of an event that its line leaves out: a log record has its own time and level, and "at" and "seq" order traces
_OF_RECORD = ("time", "level", "event", "at", "seq")


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the commands that run long log to stderr.

    Attributes:
        log_level: lowest level of lines on stderr.
        log_json: write these lines as JSON objects.
    """

    log_level: LogLevel = "error"
    log_json: bool = False


def to_logger(line: bytes) -> None:
    """Log a line of a `JsonLogTap`: give this to the tap in the place of a file."""
    found: dict[str, Any] = msgspec.json.decode(line)
    level = logging.getLevelNamesMapping()[found["level"].upper()]
    logger = logging.getLogger(EVENTS)
    if logger.isEnabledFor(level):
        fields = {name: value for name, value in found.items() if name not in _OF_RECORD}
        told = {name: value for name, value in fields.items() if value not in (None, "")}
        shown = " ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in told.items())
        logger.log(level, "%s %s", found["event"], shown, extra={"event": found["event"], "fields": fields})


@asynccontextmanager
async def log_to(target: int, level: LogLevel, *, as_json: bool = False, name: str = "") -> AsyncIterator[None]:
    """Write the lines of all loggers below `fdasync` to a descriptor, from this loop, until the block is left.

    Args:
        target: stays its owner's; a reader that takes nothing costs lines, which are counted, and no time.
        level: the lowest one that is written.
        name: of the process, in every line; "": lines have none.

    Raises ConfigError for a descriptor that cannot be written to.
    """
    formatter = JsonLines(name) if as_json else TextLines(name)
    logger, handler = logging.getLogger(ROOT), _Handler(target, formatter)
    was = logger.level, logger.propagate
    logger.setLevel(level.upper())
    # the root logger may have a handler of its own for the same stream
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(was[0])
        logger.propagate = was[1]
        await handler.writer.aclose(_CLOSE_S)


class _Handler(logging.Handler):
    """Gives lines to a `LineWriter`: of the loop alone, in whose processes no other thread runs Python."""

    def __init__(self, target: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.writer = LineWriter(target, _MAX_WAITING_NBYTES, self._note)

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.offer(self._line(record))

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="replace")

    def _note(self, count: int, problem: str) -> bytes:
        words = f"{count} lines were lost{problem and ': '}{problem}"
        return self._line(logging.LogRecord(ROOT, logging.WARNING, "", 0, words, None, None))


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER NAME: message`, and the traceback of an error."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name and f" {name}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return f"{_time(record)} {record.levelname} {record.name}{self._name}: {record.message}"


class JsonLines(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `name`, `message`; `fields` of events and of answers over HTTP;
    `error`, a traceback."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        if self._name:
            line["name"] = self._name
        # an event's words are its fields
        line["message"] = getattr(record, "event", None) or record.getMessage()
        if (fields := getattr(record, "fields", None)) is not None:
            line["fields"] = fields
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
