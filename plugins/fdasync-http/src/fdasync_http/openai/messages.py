"""Messages as OpenAI's clients send them, and as chat templates read them. Pure, but for the template itself.

Templates read content as one text, and arguments of earlier tool calls as an object; clients send parts of text, and
arguments as JSON text. Called by `chat.py`, `tokenize.py` and dialects that are
translated into chats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.engine.tokenizer import chat_of
from fdasync_http.bodies import check_text_size
from fdasync_http.failures import Refused, unserved, wrong
from fdasync_http.text import added_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync.engine.tokenizer import ChatTokenizer
    from fdasync_http.front import Front


def chat_tokenizer(front: Front) -> ChatTokenizer:
    """The tokenizer, for chats. Raises Refused, or ChatUnsupported (400)."""
    if front.tokenizer is None:
        raise Refused(400, "this server has no tokenizer: give input_ids", param="messages", code="not_served")
    return chat_of(front.tokenizer)


def tokens_of(
    front: Front,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
    add_special_tokens: bool,
) -> list[int]:
    """Tokens of a conversation, by the template of the checkpoint.

    Args:
        add_generation_prompt: None: unless the last message is continued.
        add_special_tokens: the tokenizer puts its own around them, as around a text.

    Raises Refused or BadInput (400), with the template's own words for messages that it refuses.
    """
    chat = chat_tokenizer(front)
    if not messages:
        raise wrong("messages", "are empty; give at least one")
    check_text_size("messages", msgspec.json.encode([messages, tools]).decode(), front)
    tokens = chat.apply_chat_template(
        [message_of(number, message) for number, message in enumerate(messages)],
        tools=list(tools) or None,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )
    if not add_special_tokens or front.tokenizer is None:
        return tokens
    before, behind = added_by(front.tokenizer)
    return [*before, *tokens, *behind]


def message_of(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it. Raises Refused, which names the field."""
    field = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise wrong(f"{field}.role", "is missing, or no text")
    made = {**message, "role": message["role"].lower()}
    content = message.get("content")
    if isinstance(content, list):
        made["content"] = "\n".join([_text_of(f"{field}.content[{at}]", part) for at, part in enumerate(content)])
    elif content is not None and not isinstance(content, str):
        raise wrong(f"{field}.content", "is neither text nor a list")
    elif content is None:
        made["content"] = ""
    # templates look whether the key is there
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = _calls_of(f"{field}.tool_calls", calls)
    return made


def _text_of(field: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind, text = part.get("type"), part.get("text")
        if kind == "text" and isinstance(text, str):
            return text
        if kind != "text":
            raise unserved(field, f"{kind!r:.100}; give text")
    raise wrong(field, "is no part with a text")


def _calls_of(field: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(field, "is no list")
    return [_call_of(f"{field}[{at}]", call) for at, call in enumerate(calls)]


def _call_of(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(field, "has no function with a name")
    arguments = arguments_of(f"{field}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(field: str, given: Any) -> dict[str, Any]:
    """Arguments of a call, which are an object, JSON text of one, or none. Raises Refused, which names the field."""
    arguments = given
    if isinstance(arguments, str):
        try:
            # clients say in many ways that there are none
            arguments = msgspec.json.decode(arguments) if arguments.strip() else None
        except (msgspec.DecodeError, RecursionError):
            arguments = ""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise wrong(field, "is no JSON object")
    return arguments
