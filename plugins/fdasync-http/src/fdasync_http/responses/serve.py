"""`POST /v1/responses`: OpenAI's Responses, as its agents send them. Called by `application.py`."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from fdasync_http.bodies import read_json
from fdasync_http.openai.chat import prepared
from fdasync_http.openai.types import ChatBody
from fdasync_http.responses.events import ResponseEvents
from fdasync_http.responses.items import format_of, messages_of, tool_choice_of, tools_of
from fdasync_http.responses.types import NAMES, ResponsesBody
from fdasync_http.translated.answers import answered
from fdasync_http.translated.fields import extras_of, told_as

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

_LOGPROBS = "message.output_text.logprobs"


async def responses(request: Request, front: Front) -> Response:
    """`POST /v1/responses`: OpenAI's Responses, whole or as events."""
    body = await read_json(request, ResponsesBody, front.config)
    with told_as(NAMES):
        chat = prepared(front, chat_of(body), caps_tokens=True)
    events = ResponseEvents(front, _response_of(front, body, chat.asked.request_id))
    return await answered(request, front, chat, events, NAMES)


def chat_of(body: ResponsesBody) -> ChatBody:
    """The body of the chat that it is. Raises Refused (400), which names a field of Responses."""
    extras = extras_of(body)
    if body.request_id is None and body.rid is None:
        extras["request_id"] = f"resp_{secrets.token_hex(12)}"
    return ChatBody(
        **extras,
        model=body.model,
        messages=messages_of(body.instructions, body.input),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=tools_of(body.tools),
        tool_choice=tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=format_of(body.text.format, body.text.verbosity),
        reasoning_effort=body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        # SGLang's form has log-probs in it
        logprobs=_LOGPROBS in body.include or body.top_logprobs > 0 or body.return_meta_info,
        top_logprobs=body.top_logprobs,
    )


def _response_of(front: Front, body: ResponsesBody, request_id: str) -> dict[str, Any]:
    """The Response, before anything of it is there."""
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model or front.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        # whatever was asked for
        "store": False,
        "temperature": body.temperature,
        "text": {"format": body.text.format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata,
    }
