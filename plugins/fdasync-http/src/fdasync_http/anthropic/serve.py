"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages. Called by `application.py`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from fdasync_http.anthropic.blocks import format_of, is_prefilled, messages_of, tool_choice_of, tools_of
from fdasync_http.anthropic.events import MessageEvents
from fdasync_http.anthropic.types import NAMES, CountBody, MessagesBody
from fdasync_http.bodies import read_json
from fdasync_http.calls import reply
from fdasync_http.failures import unserved
from fdasync_http.openai.asked import check_common
from fdasync_http.openai.chat import prepared, prompt_of
from fdasync_http.openai.chat import tools_of as served_tools
from fdasync_http.openai.types import ChatBody
from fdasync_http.translated.answers import answered
from fdasync_http.translated.fields import extras_of, told_as

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

#: where errors have Anthropic's form
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


async def messages(request: Request, front: Front) -> Response:
    """`POST /v1/messages`: Anthropic's Messages, whole or as events."""
    body = await read_json(request, MessagesBody, front.config)
    with told_as(NAMES):
        chat = prepared(front, chat_of(body), caps_tokens=True)
    return await answered(request, front, chat, MessageEvents(front, chat, max_tokens=body.max_tokens), NAMES)


def chat_of(body: MessagesBody) -> ChatBody:
    """The body of the chat that it is. Raises Refused (400), which names a field of Messages."""
    extras = extras_of(body)
    if body.request_id is None and body.rid is None:
        extras["request_id"] = f"msg_{secrets.token_hex(12)}"
    return ChatBody(
        **{**extras, **_conversation_of(body)},
        stream=body.stream,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        # SGLang's form has log-probs in it
        logprobs=body.return_meta_info,
    )


async def count_tokens(request: Request, front: Front) -> Response:
    """`POST /v1/messages/count_tokens`: the tokens of a conversation, which is not answered."""
    body = await read_json(request, CountBody, front.config)
    with told_as(NAMES):
        chat = ChatBody(**_conversation_of(body))
        check_common(front, chat)
        prompt = prompt_of(front, chat, served_tools(chat))
    return reply({"input_tokens": len(prompt)})


def _conversation_of(body: CountBody) -> dict[str, Any]:
    """The fields of a chat's body that make its prompt. Raises Refused (400), which names a field of Messages."""
    if body.thread is not None:
        # by this word Anthropic's tool runner, which keeps its conversations in threads, goes on without one
        words = "nothing is kept of a request; give the whole conversation"
        raise unserved("thread", words, code="thread_unsupported_request")
    made = messages_of(body.system, body.messages)
    variables = body.chat_template_kwargs
    if body.thinking is not None and body.thinking.type in ("disabled", "enabled"):
        thinks = body.thinking.type == "enabled"
        # the names that templates have for it
        variables = {"enable_thinking": thinks, "thinking": thinks, **variables}
    return {
        "model": body.model,
        "messages": made,
        "continue_final_message": is_prefilled(made),
        "tools": tools_of(body.tools),
        "tool_choice": tool_choice_of(body.tool_choice),
        "parallel_tool_calls": not body.tool_choice.get("disable_parallel_tool_use", False),
        "response_format": format_of(body.output_config.format),
        "reasoning_effort": body.output_config.effort,
        "chat_template_kwargs": variables,
    }
