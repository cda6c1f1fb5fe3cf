"""Answers read as messages: content, reasoning and tool calls, from the text of a model as it grows.

A `Reader` takes what is new of a sample and says what may be sent of it, so that whole answers and streams are read by
one code. Three ways: as the checkpoint declares (`parse_response` of its tokenizer, `declared.py`), as
`<tool_call>{json}</tool_call>` where the chat template shows this form, and as plain text. Knows no requests. Called by
`chat.py` and `chat_stream.py`.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON_FORM = re.compile(r'name\\?"\s*:.*?\\?"arguments\\?"\s*:', re.DOTALL)
# the same tags around forms that are no JSON
_OTHER_FORMS = ("<function=", "<arg_key>")


class Call(NamedTuple):
    """A tool call of an answer.

    Attributes:
        name: of the function.
        arguments: JSON text.
        call_id: drawn here.
    """

    name: str
    arguments: str
    call_id: str


class Said(NamedTuple):
    """What is new of an answer.

    Attributes:
        content, reasoning: text.
        calls: whole ones.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Reader(Protocol):
    """Reads one sample."""

    def add(self, text: str, token_ids: Sequence[int]) -> Said:
        """What may be sent of a sample with this text and these tokens behind the others."""
        ...

    def end(self, text: str, token_ids: Sequence[int]) -> Said:
        """What is left to be sent, with the last text and the last tokens."""
        ...


def new_call(name: str, arguments: Any) -> Call:
    """A call with an id of its own. `arguments`: JSON text, or what becomes it."""
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode({} if arguments is None else arguments).decode()
    return Call(name, arguments, f"call_{secrets.token_hex(12)}")


def shows_tags(template: str) -> bool:
    """Whether a chat template asks a model for `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""
    if OPEN not in template or CLOSE not in template or any(form in template for form in _OTHER_FORMS):
        return False
    return bool(_JSON_FORM.search(template)) or "tool_call.arguments" in template


def hides_tags(tokenizer: Tokenizer) -> bool:
    """Whether the tag is a special token, which is left out of text."""
    return OPEN not in tokenizer.decode(tokenizer.encode(OPEN))


class PlainReader:
    """All text is content."""

    def add(self, text: str, token_ids: Sequence[int]) -> Said:  # noqa: ARG002 - a Reader
        return Said(text)

    def end(self, text: str, token_ids: Sequence[int]) -> Said:  # noqa: ARG002 - a Reader
        return Said(text)


class TagReader:
    """Reads `<tool_call>{json}</tool_call>`. White space beside a tag is no content; a call that is no JSON object with
    a name stays text."""

    def __init__(self) -> None:
        # text that may be the beginning of a tag, or white space before one; inside a call: its text so far
        self._held = ""
        self._inside = False
        # white space behind a call is dropped
        self._after_call = False

    def add(self, text: str, token_ids: Sequence[int]) -> Said:  # noqa: ARG002 - a Reader
        return self._read(text, is_last=False)

    def end(self, text: str, token_ids: Sequence[int]) -> Said:  # noqa: ARG002 - a Reader
        return self._read(text, is_last=True)

    def _read(self, text: str, *, is_last: bool) -> Said:
        content: list[str] = []
        calls: list[Call] = []
        # a tag may be cut anywhere: only what is new, and a tag's length before it, is searched
        begin = max(len(self._held) - len(CLOSE), 0)
        self._held += text
        while True:
            at = self._held.find(CLOSE if self._inside else OPEN, begin)
            if at < 0:
                break
            begin = 0
            before = self._held[:at]
            self._held = self._held[at + len(CLOSE if self._inside else OPEN) :]
            if self._inside:
                self._end_call(before, CLOSE, calls, content)
            else:
                self._add_content(before.rstrip(), content)
            self._inside = not self._inside
        if is_last:
            self._end(calls, content)
        elif not self._inside:
            count = self._sure()
            self._add_content(self._held[:count], content)
            self._held = self._held[count:]
        return Said("".join(content), calls=tuple(calls))

    def _end(self, calls: list[Call], content: list[str]) -> None:
        if self._inside:
            # a model may stop without the tag
            self._end_call(self._held, "", calls, content)
        else:
            self._add_content(self._held, content)
        self._held = ""

    def _end_call(self, text: str, close: str, calls: list[Call], content: list[str]) -> None:
        call = _call_of(text)
        if call is None:
            content.append(f"{OPEN}{text}{close}")
            self._after_call = False
        else:
            calls.append(call)
            self._after_call = True

    def _add_content(self, text: str, content: list[str]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            content.append(text)

    def _sure(self) -> int:
        """How many characters are content whatever comes."""
        count = len(self._held)
        for size in range(min(len(OPEN) - 1, count), 0, -1):
            if self._held.endswith(OPEN[:size]):
                count -= size
                break
        return len(self._held[:count].rstrip())


def _call_of(text: str) -> Call | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return new_call(value["name"], value.get("arguments"))
