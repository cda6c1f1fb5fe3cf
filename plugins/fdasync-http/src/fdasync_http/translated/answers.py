"""Answers of dialects that are translations: a chat is asked for, and what it says is told in their words.

Called by `responses/serve.py` and `anthropic/serve.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import Sample
from fdasync_http.failures import refused_of
from fdasync_http.lines import one_line
from fdasync_http.openai.answers import Spent, put_extras
from fdasync_http.openai.growing import Growing
from fdasync_http.openai.logprobs import TokenNames, of_chat
from fdasync_http.parts import assembled, event_with
from fdasync_http.replies import Events, Part, Parts, whole
from fdasync_http.streams import read
from fdasync_http.translated.fields import told_as

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Delta
    from fdasync_http.front import Front
    from fdasync_http.openai.chat import Prepared
    from fdasync_http.translated.translation import Event, Translation


async def answered(
    request: Request, front: Front, chat: Prepared, translation: Translation, names: Mapping[str, str]
) -> Response:
    """The answer to a chat of one sample, whole or as events.

    Args:
        names: the dialect's fields, by a chat's.

    Raises what the engine raises, in words of the dialect.
    """
    if chat.asked.body.stream:
        return _NamedEvents(_streamed(front, chat, translation, names), translation)
    return await whole(request, _whole(front, chat, translation, names))


async def _whole(front: Front, chat: Prepared, translation: Translation, names: Mapping[str, str]) -> Response:
    asked = chat.asked
    with told_as(names), front.place(), asked.names.told_to_client():
        result = await front.complete(asked.prompt, asked.params, **asked.options)
    (sample,) = result.samples
    translation.begin()
    translation.add(Growing(asked, chat.new_reader).end(sample), _logprobs_of(sample, TokenNames(front, as_ids=False)))
    translation.end(sample, result)
    parts: list[Part] = []
    _put(front, chat, sample, translation.answer, parts, Spent.of(result))
    return Parts(assembled(translation.answer, parts))


async def _streamed(
    front: Front, chat: Prepared, translation: Translation, names: Mapping[str, str]
) -> AsyncIterator[bytes]:
    asked = chat.asked
    growing = Growing(asked, chat.new_reader)
    token_names = TokenNames(front, as_ids=False)
    began = asyncio.get_running_loop().time()
    is_begun = False
    last: Sample | None = None
    with told_as(names), front.place(), asked.names.told_to_client():
        async with front.generate(asked.prompt, asked.params, **asked.options) as stream:
            async for item in read(stream):
                events = [] if is_begun else translation.begin()
                is_begun = True
                if isinstance(item, Sample):
                    last = item
                    events += translation.add(growing.end(item), [])
                else:
                    events += translation.add(growing.add(item), _logprobs_of(item, token_names))
                if events:
                    yield b"".join([_event_of(event) for event in events])
            result = stream.result
    assert last is not None
    spent = Spent(len(result.prompt_token_ids), asyncio.get_running_loop().time() - began)
    for event in translation.end(last, result):
        place = translation.extras_of(event)
        parts: list[Part] = []
        if place is not None:
            _put(front, chat, last, place, parts, spent)
        yield _name_of(event)
        async for piece in event_with(event, parts):
            yield piece


def _put(front: Front, chat: Prepared, sample: Sample, place: dict[str, Any], parts: list[Part], spent: Spent) -> None:
    """Add what is asked for beside the dialect's own fields, as a choice of a chat has it."""
    told: dict[str, Any] = {}
    if chat.asked.body.return_token_ids:
        told |= {"prompt_token_ids": chat.asked.prompt, "token_ids": sample.token_ids}
    put_extras(front, chat.asked, sample, told, parts, spent)
    # a word of both is the dialect's
    place |= {name: value for name, value in told.items() if name not in place}


def _logprobs_of(run: Sample | Delta, names: TokenNames) -> list[dict[str, Any]]:
    told = of_chat(run, names)
    return [] if told is None else list(told["content"])


def _name_of(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\n"


def _event_of(event: Event) -> bytes:
    return _name_of(event) + b"data: " + one_line(msgspec.json.encode(event)) + b"\n\n"


class _NamedEvents(Events):
    """Events that have names. The last one says that it is the last: there is none of `[DONE]`.

    Args:
        translation: makes the event of an error.
    """

    def __init__(self, events: AsyncIterator[bytes], translation: Translation) -> None:
        super().__init__(events, closing=b"")
        self._translation = translation

    def _last(self, error: Exception | None) -> bytes:
        return b"" if error is None else _event_of(self._translation.failed(refused_of(error)))
