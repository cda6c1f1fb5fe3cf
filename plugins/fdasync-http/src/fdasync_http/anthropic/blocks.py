"""Messages of blocks as the messages of a chat, and their tools as a chat's. Pure. Called by `serve.py`."""

from __future__ import annotations

from typing import Any

from fdasync_http.failures import unserved, wrong
from fdasync_http.openai.messages import arguments_of
from fdasync_http.translated.conversation import Conversation

_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def messages_of(system: str | list[dict[str, Any]], given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Raises Refused (400), which names the block."""
    # turns in a row are one turn
    made = Conversation(_ROLES)
    if system:
        made.say("system", _texts_of("system", system))
    for number, message in enumerate(given):
        field = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise wrong(f"{field}.role", f"is {role!r:.100}; there are {', '.join(_ROLES)}")
        role = role.lower()
        if isinstance(content, str):
            made.say(role, [content])
            continue
        if not isinstance(content, list):
            raise wrong(f"{field}.content", "is neither text nor a list")
        if not content:
            # an answer without blocks, which came back
            made.say(role, [])
        for at, block in enumerate(content):
            _put(made, f"{field}.content[{at}]", role, block)
    if not given:
        raise wrong("messages", "are empty; give at least one")
    return made.messages


def is_prefilled(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message of the conversation. Raises Refused (400) for a call without its
    result."""
    if messages[-1]["role"] != "assistant":
        return False
    if "tool_calls" in messages[-1]:
        raise wrong("messages", "end with a tool_use: its tool_result is due")
    return True


def _put(made: Conversation, field: str, role: str, block: Any) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        made.say(role, [_text(field, block, "text")])
    elif role == "assistant" and kind == "thinking":
        made.think(_text(field, block, "thinking"))
    elif role == "assistant" and kind == "tool_use":
        arguments = arguments_of(f"{field}.input", block.get("input"))
        made.call(_text(field, block, "id"), _text(field, block, "name"), arguments)
    elif role == "user" and kind == "tool_result":
        # templates have no place for a failure of its own: the content tells it
        made.result(_text(field, block, "tool_use_id"), _texts_of(f"{field}.content", block.get("content") or ""))
    else:
        raise unserved(field, f"{kind!r:.100} of {role}; there are text, tool_use, tool_result and thinking")


def _text(field: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{field}.{name}", "is missing, or no text")
    return value


def _texts_of(field: str, content: Any) -> list[str]:
    """The texts of a content: a text, or blocks of text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(field, "is neither text nor a list")
    texts = []
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise unserved(f"{field}[{at}]", f"{kind!r:.100}; give text")
        texts.append(_text(f"{field}[{at}]", block, "text"))
    return texts


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a chat. Raises Refused (400), which names the tool."""
    made = []
    for at, tool in enumerate(tools):
        field = f"tools[{at}]"
        if tool.get("type") not in (None, "custom"):
            raise unserved(f"{field}.type", f"{tool['type']!r:.100}; give tools with an input_schema")
        told = {"name": _text(field, tool, "name"), "description": tool.get("description"),
                "parameters": tool.get("input_schema")}  # fmt: skip
        function = {name: value for name, value in told.items() if value is not None}
        made.append({"type": "function", "function": function})
    return made


def tool_choice_of(choice: dict[str, Any]) -> Any:
    """The tool choice of a chat. Raises Refused (400)."""
    kind = "auto" if choice.get("type") is None else choice["type"]
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice", f"is {kind!r:.100}; there are auto, none, any and tool")
    return _CHOICES[kind]


def format_of(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `response_format` of a chat. Raises Refused (400)."""
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise wrong("output_config.format", "is no json_schema with a schema")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
