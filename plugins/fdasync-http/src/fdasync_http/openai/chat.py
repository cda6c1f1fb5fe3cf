"""`POST /v1/chat/completions`: what a body asks for, and whole answers; `chat_stream.py` makes the streams.

Also as Miles' sessions send it: `input_ids` beside `messages`, and `choices[0].meta_info` in the answer. Called by
`application.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync.engine.tokenizer import ChatTokenizer, WithSpecials
from fdasync.errors import TokenizerFailed
from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused, unserved, wrong
from fdasync_http.grammars import field_of, grammar_of
from fdasync_http.openai.answers import Spent, finish_of, head_of, prompt_scores_of, put_extras, usage_of, version_of
from fdasync_http.openai.asked import Asked, asks_for_stops, check_common
from fdasync_http.openai.chat_stream import streamed, tool_call
from fdasync_http.openai.declared import DeclaredReader
from fdasync_http.openai.forced import forced_of
from fdasync_http.openai.growing import Growing
from fdasync_http.openai.logprobs import TokenNames, of_chat
from fdasync_http.openai.messages import tokens_of
from fdasync_http.openai.tools import OPEN, PlainReader, TagReader, hides_tags, shows_tags
from fdasync_http.openai.types import ChatBody, Tool, converted
from fdasync_http.parts import assembled
from fdasync_http.replies import Events, Part, Parts, whole
from fdasync_http.sampling import texts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front
    from fdasync_http.openai.tools import Reader, Said

_KIND = "chat.completion"
# what a template puts before an answer is shorter
_BEGINNING_TOKENS = 512


async def chat_completions(request: Request, front: Front) -> Response:
    """`POST /v1/chat/completions`: OpenAI's chats, whole or as events."""
    asked, new_reader = prepared(front, await read_json(request, ChatBody, front.config))
    if asked.body.stream:
        return Events(streamed(front, asked, new_reader))
    return await whole(request, _answer(front, asked, new_reader))


class Prepared(NamedTuple):
    """A chat that can be asked for.

    Attributes:
        asked: of the engine.
        new_reader: makes what reads one sample.
    """

    asked: Asked
    new_reader: Callable[[], Reader]


def prepared(front: Front, body: ChatBody, *, caps_tokens: bool = False) -> Prepared:
    """What a body asks for, checked. Raises Refused or BadInput, which name its field.

    Args:
        caps_tokens: a limit of new tokens beyond what the context leaves means what it leaves; else it is refused.
    """
    check_common(front, body)
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    tools = tools_of(body)
    prompt = prompt_of(front, body, tools)
    new_reader, specials = _reader_of(front, body, tools, prompt)
    forced = forced_of(front, body, tools)
    grammar = grammar_of(body)
    if forced is not None and grammar is not None:
        raise wrong("tool_choice", "forces calls, which leaves no other format")
    room = room_of(front, prompt)
    if caps_tokens and (body.max_completion_tokens or 0) > room:
        body = msgspec.structs.replace(body, max_completion_tokens=room)
    asked = Asked(
        front,
        body,
        prompt,
        prefix="chatcmpl",
        max_tokens=room,
        with_logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        specials=specials,
        grammar=forced or grammar,
        grammar_field=partial(field_of, body) if forced is None else lambda: "tool_choice",
    )
    return Prepared(asked, new_reader)


def room_of(front: Front, prompt: list[int]) -> int:
    """Tokens that the context leaves; the engine refuses a prompt that leaves none."""
    return max(front.generator.facts().max_context_tokens - len(prompt), 1)


def tools_of(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model may call. Raises Refused (400)."""
    for at, tool in enumerate(converted(msgspec.json.encode(body.tools), list[Tool], "tools")):
        if tool.type not in (None, "function"):
            raise Refused(400, f"{tool.type!r:.100} is not served; give functions", param=f"tools[{at}].type")
    return [] if body.tool_choice == "none" else body.tools


def prompt_of(front: Front, body: ChatBody, tools: list[dict[str, Any]]) -> list[int]:
    """Tokens of the conversation. Raises Refused or BadInput (400)."""
    if body.input_ids is not None:
        return body.input_ids
    return tokens_of(
        front,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs={**_thinking_of(body), **body.chat_template_kwargs},
        add_special_tokens=body.add_special_tokens,
    )


def _thinking_of(body: ChatBody) -> dict[str, Any]:
    """Variables of the template that say how a model thinks; templates know different ones."""
    effort = body.reasoning_effort if body.reasoning.effort is None else body.reasoning.effort
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    enabled = False if effort == "none" else body.reasoning.enabled
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    return variables


def _reader_of(
    front: Front, body: ChatBody, tools: list[dict[str, Any]], prompt: list[int]
) -> tuple[Callable[[], Reader], bool]:
    """Makes what reads a sample; and whether it must see special tokens. Raises Refused where tools are given
    whose calls could not be read: the checkpoint declares no form of them, and its template shows none."""
    tokenizer = front.tokenizer
    if tokenizer is not None and isinstance(tokenizer, ChatTokenizer):
        is_begun_here = body.input_ids is None and not body.continue_final_message
        beginning = prompt[-_BEGINNING_TOKENS:] if is_begun_here else prompt
        if _declares(tokenizer, beginning) and (body.separate_reasoning or tools):
            if not body.separate_reasoning:
                raise unserved("separate_reasoning", "this model's tool calls are read together with its reasoning")
            stop = () if asks_for_stops(body) else texts_of(body.stop)
            return partial(DeclaredReader, tokenizer, beginning, tools, stop), False
        if tools and shows_tags(tokenizer.chat_template(with_tools=True)):
            hidden = hides_tags(tokenizer)
            if not hidden or isinstance(tokenizer, WithSpecials):
                return TagReader, hidden
    if not tools:
        return PlainReader, False
    words = (
        "it is not known how this model calls tools: its checkpoint declares no response template, and its chat "
        f"template does not show {OPEN}{{json}}</tool_call>"
    )
    raise Refused(400, words, param="tools", code="not_served")


def _declares(chat: ChatTokenizer, beginning: list[int]) -> bool:
    """Whether the checkpoint says how to read answers."""
    try:
        return chat.parse_response((), beginning) is not None
    except TokenizerFailed:
        # it does, and an answer without any text is none
        return True


async def _answer(front: Front, asked: Asked, new_reader: Callable[[], Reader]) -> Response:
    with front.place(), asked.names.told_to_client():
        result = await front.complete(asked.prompt, asked.params, **asked.options)
    names = TokenNames(front, as_ids=asked.body.return_tokens_as_token_ids)
    choices: list[dict[str, Any]] = []
    parts: list[Part] = []
    for sample in result.samples:
        said = Growing(asked, new_reader).end(sample)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": _message(said),
            "logprobs": of_chat(sample, names),
            "finish_reason": finish_of(sample, calls_tools=bool(said.calls)),
        }
        if asked.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        put_extras(front, asked, sample, choice, parts, Spent.of(result))
        choices.append(choice)
    answer = head_of(front, result.request_id, _KIND, asked.body.model)
    answer |= {"choices": choices, "usage": usage_of([result]), "weight_version": version_of(front, result)}
    answer |= await prompt_scores_of(asked, result, names)
    if asked.body.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_token_ids
    return Parts(assembled(answer, parts))


def _message(said: Said) -> dict[str, Any]:
    # Miles' sessions read content as text, whatever else the answer has
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [tool_call(call) for call in said.calls]
    return message
