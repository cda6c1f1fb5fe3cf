"""A sample of a chat as it grows: what is new of its text is read as content, reasoning and tool calls.

Called by `chat.py`, `chat_stream.py` and `translated/answers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync import Delta, Sample
    from fdasync_http.openai.asked import Asked
    from fdasync_http.openai.tools import Reader, Said


class Growing:
    """One sample, read once: delta by delta and then its end, or its end alone."""

    def __init__(self, asked: Asked, new_reader: Callable[[], Reader]) -> None:
        self._text = asked.form.of_sample()
        self._reader = new_reader()
        self._is_fed = False

    def add(self, delta: Delta) -> Said:
        """What is new."""
        self._is_fed = True
        # a token that stops it is no text: which one it was, the result tells
        text = self._text.add(delta.text, () if delta.finish_reason else delta.token_ids)
        return self._reader.add(text, delta.token_ids)

    def end(self, sample: Sample) -> Said:
        """What is left, of a sample that has ended."""
        text = self._text.rest(sample)
        return self._reader.end(text, () if self._is_fed else sample.token_ids)
