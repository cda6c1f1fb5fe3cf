"""Answers read as the checkpoint declares: by `parse_response` of its tokenizer, again at each delta.

The library reads whole answers, so what has accumulated is read again: at first with each delta, later each time the
answer has grown by a sixteenth, so that the cost grows with the answer's length and not with its square. An unfinished
answer reads differently than a finished one at its very end, so the last characters are held back, and the last tool
call until something follows it. Knows no requests. Called by `chat.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.errors import TokenizerFailed
from fdasync_http.openai.tools import Call, Said, new_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync.engine.tokenizer import ChatTokenizer

# longer than any delimiter of a message's parts; a delimiter's beginning may look like content
_HELD_CHARS = 32
_GROWTH = 16
# names that checkpoints have for it
_REASONING = ("reasoning_content", "reasoning", "thinking")


class _Message:
    """A message as it was read.

    Attributes:
        content, reasoning: text.
        calls: name and arguments of each tool call.
    """

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        self.content = _text(parsed.get("content"))
        self.reasoning = next((text for name in _REASONING if (text := _text(parsed.get(name)))), "")
        self.calls: list[tuple[str, Any]] = []
        calls = parsed.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                self.calls.append((function["name"], function.get("arguments")))


class DeclaredReader:
    """See the module. An answer that cannot be read to its end (it was cut short in a tool call), or calls tools though
    none were given, is given as plain text; in a stream that has given reasoning by then, only the rest is.

    Args:
        prompt_token_ids: of the conversation, or its end: a template may have begun the answer.
        tools: as the request gave them; (): none.
        stop: stop strings at which text ends; (): it does not.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        prompt_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
    ) -> None:
        self._chat = chat
        self._prompt = prompt_token_ids
        self._tools = tools
        self._stop = stop
        self._lag = max([_HELD_CHARS, *map(len, stop)])
        self._tokens: list[int] = []
        self._due = 0
        self._text = ""
        # the latest message that could be read
        self._read: _Message | None = None
        # what was given
        self._content = ""
        self._reasoning = ""
        self._calls = 0

    def add(self, text: str, token_ids: Sequence[int]) -> Said:
        self._text += text
        self._tokens += token_ids
        if len(self._tokens) < self._due:
            return Said()
        self._due = len(self._tokens) + max(len(self._tokens) // _GROWTH, 1)
        message = self._parsed(self._tokens)
        if message is None:
            return Said()
        self._read = message
        # what a later part has followed is as it stays
        content = message.content if message.calls else message.content[: -self._lag]
        is_past_reasoning = message.calls or content
        reasoning = message.reasoning if is_past_reasoning else message.reasoning[: -self._lag]
        return self._new(content, reasoning, message.calls[:-1])

    def end(self, text: str, token_ids: Sequence[int]) -> Said:
        self._text += text
        self._tokens += token_ids
        message = self._parsed(self._tokens)
        if message is not None:
            # a stop string ends in the last token's text; an earlier one was barred by `min_tokens`
            before = (self._parsed(self._tokens[:-1]) if self._stop else None) or _Message({})
            content = _cut(message.content, before.content, self._stop)
            reasoning = _cut(message.reasoning, before.reasoning, self._stop)
            return self._new(content, reasoning, message.calls)
        read = self._read
        if read is None or not (self._reasoning or self._calls):
            return self._new(self._text, "", [])
        # parts of it were given already, so what follows the part that could be read is content as it stands
        _, _, rest = self._text.rpartition(read.content or read.reasoning)
        return self._new(read.content + rest, read.reasoning, read.calls)

    def _parsed(self, token_ids: Sequence[int]) -> _Message | None:
        try:
            parsed = self._chat.parse_response(token_ids, self._prompt, tools=list(self._tools) or None)
        except TokenizerFailed:
            return None
        message = _Message(parsed or {})
        return None if message.calls and not self._tools else message

    def _new(self, content: str, reasoning: str, calls: Sequence[tuple[str, Any]]) -> Said:
        new_content, new_reasoning = _rest(content, self._content), _rest(reasoning, self._reasoning)
        self._content += new_content
        self._reasoning += new_reasoning
        new_calls: list[Call] = [new_call(name, arguments) for name, arguments in calls[self._calls :]]
        self._calls += len(new_calls)
        return Said(new_content, new_reasoning, tuple(new_calls))


def _rest(text: str, given: str) -> str:
    # what was given stays given: a part that reads differently now waits for more
    return text[len(given) :] if text.startswith(given) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str, before: str, stop: Sequence[str]) -> str:
    """Up to a stop string that ends behind the text that was there before the last token."""
    found = [at for one in stop if (at := text.find(one, max(len(before) - len(one) + 1, 0))) >= 0]
    return text[: min(found)] if found else text
