"""Looks for stop strings in the text of one sample as it grows, with special tokens shown.

The engine's text leaves special tokens out, and a stop string may be one (`<|im_end|>`) or hold one. So the searched
text has special tokens' text at their places, and marks which characters belong to the engine's text; a match is told
as so many characters of the engine's text. Knows no tokens and no requests. Called by `request_state.py`.
"""

from __future__ import annotations

from typing import NamedTuple

_SHOWN, _HIDDEN = b"\1", b"\0"


class Match(NamedTuple):
    """A stop string that was found.

    Attributes:
        stop: the string.
        dropped: how many characters at the end of the text belong to it, or came behind it.
    """

    stop: str
    dropped: int


class StopSearch:
    """See the module. A token costs the same however long the text is.

    Attributes:
        held: how many characters at the end of the text could begin a stop string.
    """

    __slots__ = ("_longest", "_marks", "_stops", "_tail", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops`: at least one, none of them empty."""
        self._stops = stops
        self._longest = max(map(len, stops))
        # the end of what was searched, in which a match may begin; and of each of its characters, whether it is text
        self._tail = ""
        self._marks = b""
        self.held = 0

    def add(self, text: str, *, following: str, special: str, barred: bool) -> Match | None:
        """Search what a token added: the earliest match that ends in the new text; None: there is none.

        Args:
            text: that has become final.
            following: text that would be final if no token followed. A match ends the sample, so none follows.
            special: of a special token behind them.
            barred: no stop string may end here yet.
        """
        seen = len(self._tail)
        match = None if barred else self._find(text + following, special)
        self._tail += text + special
        self._marks += _SHOWN * len(text) + _HIDDEN * len(special)
        over = max(seen + len(text) + len(special) - self._longest + 1, 0)
        self._tail, self._marks = self._tail[over:], self._marks[over:]
        begun = max(_begun(self._tail, stop) for stop in self._stops)
        self.held = sum(self._marks[len(self._tail) - begun :])
        return match

    def _find(self, text: str, special: str) -> Match | None:
        seen = len(self._tail)
        whole = self._tail + text + special
        # the text searched before holds no whole stop string, or only a barred one
        found = [
            (at, number)
            for number, stop in enumerate(self._stops)
            if (at := whole.find(stop, max(seen - len(stop) + 1, 0))) >= 0
        ]
        if not found:
            return None
        at, number = min(found)
        marks = self._marks + _SHOWN * len(text) + _HIDDEN * len(special)
        return Match(self._stops[number], sum(marks[at:]))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` could begin `stop`."""
    tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0
