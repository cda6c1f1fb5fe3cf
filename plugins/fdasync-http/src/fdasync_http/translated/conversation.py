"""A conversation in the pieces of other dialects, put together as the messages of a chat. Pure.

A turn of an assistant is one message of a chat: what it thought, said and called. Other dialects have a piece for each.
Called by `responses/items.py` and `anthropic/blocks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Conversation:
    """Grows piece by piece.

    Args:
        joined: roles whose messages in a row become one.

    Attributes:
        messages: of a chat.
    """

    def __init__(self, joined: Collection[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._joined = joined
        self._called: dict[str, str] = {}

    def say(self, role: str, texts: Sequence[str]) -> None:
        """Parts of a message's text."""
        self._message(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def think(self, text: str) -> None:
        """What the assistant thought, before what it says next."""
        turn = self._message("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A tool that the assistant called. `arguments`: an object, or JSON text of one."""
        self._called[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, texts: Sequence[str], **more: Any) -> None:
        """What a tool gave back. `more`: further keys of the message, for templates that read them."""
        message = {"role": "tool", "tool_call_id": call_id, "content": [], **more}
        if call_id in self._called:
            message["name"] = self._called[call_id]
        self.messages.append(message)
        self.say("tool", texts)

    def _message(self, role: str) -> dict[str, Any]:
        """The message that a piece of this role belongs to."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or role not in (*self._joined, "tool"):
            last = {"role": role, "content": []}
            self.messages.append(last)
        return last
