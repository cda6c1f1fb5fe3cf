"""`tool_choice` that makes the model call a function: a grammar of calls in the form that its template shows.

Called by `chat.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.engine.tokenizer import ChatTokenizer
from fdasync_http.failures import unserved, wrong
from fdasync_http.grammars import calls_of
from fdasync_http.openai.tools import CLOSE, OPEN, hides_tags, shows_tags

if TYPE_CHECKING:
    from fdasync import Grammar
    from fdasync_http.front import Front
    from fdasync_http.openai.types import ChatBody

_FIELD = "tool_choice"


def forced_of(front: Front, body: ChatBody, tools: list[dict[str, Any]]) -> Grammar | None:
    """The grammar of the calls that `tool_choice` asks for; None: the model is free to call or not. Raises Refused
    (400)."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise wrong(_FIELD, "needs tools")
    tokenizer = front.tokenizer
    template = ""
    if tokenizer is not None and isinstance(tokenizer, ChatTokenizer):
        template = tokenizer.chat_template(with_tools=True)
    if tokenizer is None or not shows_tags(template):
        raise unserved(_FIELD, "calls are forced in the form <tool_call>, which this model's template does not show")
    chosen = tools if choice == "required" else [_named(choice, tools)]
    return calls_of(
        chosen,
        tags=(OPEN, CLOSE),
        special=hides_tags(tokenizer),
        several=choice == "required" and body.parallel_tool_calls,
    )


def _named(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The tool that a choice names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if isinstance(name, str) and tool["function"]["name"] == name:
            return tool
    names = ", ".join(tool["function"]["name"] for tool in tools)
    raise wrong(_FIELD, f"{choice!r:.200} is none of auto, none, required and the functions {names}")
