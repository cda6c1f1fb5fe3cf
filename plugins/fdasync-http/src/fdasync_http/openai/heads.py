"""What the events of a stream begin with, and the usage that they tell: at the end, or so far in each of them.

Called by `completions.py` and `chat_stream.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_http.openai.answers import head_of, usage_of

if TYPE_CHECKING:
    from fdasync import Delta, Result
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked


class Heads:
    """The heads of one stream's events.

    Args:
        asked: its prompt is token ids where usage is asked for in each event.
        kind: `object` of the events.
    """

    def __init__(self, front: Front, asked: Asked, kind: str) -> None:
        options = asked.body.stream_options
        self._fields = head_of(front, asked.request_id, kind)
        self._tells = options.include_usage
        if self._tells:
            self._fields["usage"] = None
        self._counts = options.include_usage and options.continuous_usage_stats
        self._prompt_tokens = len(asked.prompt)
        self._tokens = 0

    def add(self, delta: Delta) -> None:
        """Count its tokens."""
        self._tokens += len(delta.token_ids)

    def event(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        """An event with a choice."""
        event = {**self._fields, **more, "choices": [choice]}
        if self._counts:
            event["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
            }
        return event

    def last(self, result: Result) -> dict[str, Any] | None:
        """The event behind all choices; None: it was not asked for."""
        return {**self._fields, "choices": [], "usage": usage_of([result])} if self._tells else None
