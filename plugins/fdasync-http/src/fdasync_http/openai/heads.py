"""What the events of a stream begin with, and the usage that they tell: at the end, or so far in each of them.

Called by `completions.py`, `completion_stream.py` and `chat_stream.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_http.openai.answers import head_of, usage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync import Delta, Result, Sample
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked


def common_name(asked: Sequence[Asked]) -> str:
    """The name by which a single prompt can be aborted; for several prompts, the common beginning of their names."""
    return asked[0].request_id if len(asked) == 1 else asked[0].request_id.removesuffix("-0")


class Heads:
    """The heads of one stream's events.

    Args:
        asked: the prompts of a body; they are token ids where usage is asked for in each event.
        kind: `object` of the events.
    """

    def __init__(self, front: Front, asked: Sequence[Asked], kind: str) -> None:
        options = asked[0].body.stream_options
        self._fields = head_of(front, common_name(asked), kind, asked[0].body.model)
        self._tells = options.include_usage
        if self._tells:
            self._fields["usage"] = None
        self._counts = options.include_usage and options.continuous_usage_stats
        self._prompt_tokens = sum(len(one.prompt) for one in asked)
        self._tokens = 0

    def add(self, new: Delta | Sample) -> None:
        """Count its tokens."""
        self._tokens += len(new.token_ids)

    def event(self, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """An event with a choice, or without one."""
        event = {**self._fields, **more, "choices": [] if choice is None else [choice]}
        if self._counts:
            event["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
            }
        return event

    def last(self, results: Sequence[Result]) -> dict[str, Any] | None:
        """The event behind all choices; None: it was not asked for."""
        return {**self._fields, "choices": [], "usage": usage_of(results)} if self._tells else None
