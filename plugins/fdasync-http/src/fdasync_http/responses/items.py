"""Items of Responses as the messages of a chat, and its tools as a chat's. Pure. Called by `serve.py`."""

from __future__ import annotations

from typing import Any

from fdasync_http.failures import unserved, wrong
from fdasync_http.openai.messages import arguments_of
from fdasync_http.translated.conversation import Conversation

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# OpenAI's clients send back what a model refused to say as a part of its own
_REFUSAL = "refusal"


def messages_of(instructions: str | None, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Raises Refused (400), which names the item."""
    # system messages in a row are one: templates take one, at the beginning
    made = Conversation(("system", "assistant"))
    if instructions:
        made.say("system", [instructions])
    if isinstance(given, str):
        made.say("user", [given])
        return made.messages
    for number, item in enumerate(given):
        _put(made, f"input[{number}]", item)
    if not given:
        raise wrong("input", "is empty; give a text or at least one item")
    return made.messages


def _put(made: Conversation, field: str, item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise wrong(f"{field}.role", f"is {role!r:.100}; there are {', '.join(_ROLES)}")
        made.say(_ROLES[role.lower()], _texts_of(f"{field}.content", item.get("content")))
    elif kind == "function_call":
        arguments = arguments_of(f"{field}.arguments", item.get("arguments"))
        made.call(_text(field, item, "call_id"), _text(field, item, "name"), arguments)
    elif kind == "function_call_output":
        made.result(_text(field, item, "call_id"), _texts_of(f"{field}.output", item.get("output")))
    elif kind == "reasoning":
        texts = _texts_of(f"{field}.content", item.get("content") or item.get("summary") or [])
        if not texts and item.get("encrypted_content"):
            raise unserved(f"{field}.encrypted_content", "it is another server's; leave the item out")
        made.think("\n".join(texts))
    else:
        raise unserved(field, f"{kind!r:.100}; there are messages, function calls, their outputs, and reasoning")


def _text(field: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{field}.{name}", "is missing, or no text")
    return value


def _texts_of(field: str, content: Any) -> list[str]:
    """The texts of a content: a text, or parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(field, "is neither text nor a list")
    return [_part(f"{field}[{at}]", part) for at, part in enumerate(content)]


def _part(field: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise wrong(field, "is no part with a text")
    kind = part.get("type")
    if kind not in (*_TEXTS, _REFUSAL):
        raise unserved(field, f"{kind!r:.100}; give text")
    text = part.get("refusal" if kind == _REFUSAL else "text")
    if not isinstance(text, str):
        raise wrong(field, "is no part with a text")
    return text


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a chat. Raises Refused (400), which names the tool."""
    made = []
    for at, tool in enumerate(tools):
        field = f"tools[{at}]"
        if tool.get("type") != "function":
            raise unserved(f"{field}.type", f"{tool.get('type')!r:.100}; give functions")
        _text(field, tool, "name")
        told = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        made.append({"type": "function", "function": told})
    return made


def tool_choice_of(choice: Any) -> Any:
    """The tool choice of a chat. Raises Refused (400)."""
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise unserved("tool_choice", f"{choice.get('type')!r:.100}; there are auto, none, required and functions")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def format_of(given: dict[str, Any] | None, verbosity: str | None) -> dict[str, Any] | None:
    """The `response_format` of a chat. Raises Refused (400)."""
    if verbosity not in (None, "medium"):
        raise unserved("text.verbosity")
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("schema"), dict):
        raise wrong("text.format.schema", "is missing, or no JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
