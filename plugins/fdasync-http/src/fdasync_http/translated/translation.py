"""What a chat says, as parts that follow one another: each begins, grows and ends before the next one begins.

Whole answers and streams are made by one code: a whole answer is a stream whose events are dropped. In a whole answer
all text stands before the calls, as it does in a chat. Called by `answers.py`; dialects say what their events are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fdasync import Result, Sample
    from fdasync_http.failures import Refused
    from fdasync_http.openai.tools import Call, Said

#: the JSON of an event; its `type` is its name
Event = dict[str, Any]
Kind = Literal["reasoning", "text"]


class Translation(ABC):
    """The events of one answer.

    Attributes:
        answer: the dialect's object of the whole answer; complete once it has ended.
        calls_tools: whether it called any.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.calls_tools = False
        self._open: Kind | None = None

    @abstractmethod
    def begin(self) -> list[Event]:
        """The events before anything is said."""

    def add(self, said: Said, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Events of what is new.

        Args:
            logprobs: of the new tokens, in a chat's form.
        """
        events = self._take(logprobs)
        told: tuple[tuple[Kind, str], ...] = (("reasoning", said.reasoning), ("text", said.content))
        for kind, text in told:
            if text:
                events += self._open_as(kind)
                events += self._grow(text)
        for call in said.calls:
            events += self._close()
            events += self._call(call)
            self.calls_tools = True
        return events

    @abstractmethod
    def end(self, sample: Sample, result: Result) -> list[Event]:
        """The events that end it."""

    @abstractmethod
    def extras_of(self, event: Event) -> dict[str, Any] | None:
        """Where an event of the end has what clients ask for beside the dialect's fields; None: it has none."""

    @abstractmethod
    def failed(self, refused: Refused) -> Event:
        """The event of an error after the first event."""

    def _take(self, logprobs: list[dict[str, Any]]) -> list[Event]:  # noqa: ARG002 - a dialect may keep them
        return []

    def _open_as(self, kind: Kind) -> list[Event]:
        """Begin a part, unless one of its kind is open."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        return events + self._begin(kind)

    def _close(self) -> list[Event]:
        """End the part that is open."""
        kind, self._open = self._open, None
        return [] if kind is None else self._end(kind)

    @abstractmethod
    def _begin(self, kind: Kind) -> list[Event]: ...

    @abstractmethod
    def _grow(self, text: str) -> list[Event]: ...

    @abstractmethod
    def _end(self, kind: Kind) -> list[Event]: ...

    @abstractmethod
    def _call(self, call: Call) -> list[Event]: ...
