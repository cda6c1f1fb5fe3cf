"""Streams of chats: a chunk with the role, then what is new, then how each sample ended, then the usage.

The first chunks wait for the first delta, so that a request that fails before it has a status of its own. Rows come
with a sample's last chunk alone. Called by `chat.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import Sample
from fdasync_http.openai.answers import Spent, finish_of, prompt_scores_of, put_extras
from fdasync_http.openai.heads import Heads
from fdasync_http.openai.logprobs import TokenNames, of_chat
from fdasync_http.parts import event_with
from fdasync_http.replies import event_of
from fdasync_http.streams import read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fdasync import Delta, Result
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked
    from fdasync_http.openai.tools import Call, Reader, Said
    from fdasync_http.replies import Part
    from fdasync_http.text import SampleText

_KIND = "chat.completion.chunk"


def tool_call(call: Call) -> dict[str, Any]:
    """A tool call of a message."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(
    index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class _Growing:
    """A sample of a stream."""

    def __init__(self, text: SampleText, reader: Reader) -> None:
        self._text = text
        self._reader = reader
        self._calls = 0

    def choice(self, asked: Asked, delta: Delta, names: TokenNames) -> dict[str, Any] | None:
        """What is new of it; None: nothing that is sent."""
        # a token that stops it is no text: which one it was, the result tells
        text = self._text.add(delta.text, () if delta.finish_reason else delta.token_ids)
        made = self._delta_of(self._reader.add(text, delta.token_ids))
        logprobs = of_chat(delta, names)
        if not made and logprobs is None and not asked.body.return_token_ids:
            return None
        choice = _choice(delta.index, made, None, logprobs)
        if asked.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def last(self, sample: Sample) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """What is left of it, if anything, and how it ended."""
        text = self._text.rest(sample)
        rest = self._delta_of(self._reader.end(text, ()))
        ended = _choice(sample.index, {}, finish_of(sample, calls_tools=self._calls > 0))
        return _choice(sample.index, rest) if rest else None, ended

    def _delta_of(self, said: Said) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [
                {"index": number, **tool_call(call)} for number, call in enumerate(said.calls, self._calls)
            ]
            self._calls += len(said.calls)
        return delta


async def streamed(front: Front, asked: Asked, new_reader: Callable[[], Reader]) -> AsyncIterator[bytes]:
    """The events of a stream."""
    heads = Heads(front, [asked], _KIND)
    names = TokenNames(front, as_ids=asked.body.return_tokens_as_token_ids)
    samples = [_Growing(asked.form.of_sample(), new_reader()) for _ in range(asked.params.n)]
    # the prompt's log-probs have a chunk of their own behind the choices: they come at the end of the request
    is_scored = asked.body.prompt_logprobs is not None
    began = asyncio.get_running_loop().time()
    is_begun = False
    with front.place(), asked.names.told_to_client():
        async with front.generate(asked.prompt, asked.params, **asked.options) as stream:
            async for item in read(stream):
                if not is_begun:
                    is_begun = True
                    yield _beginning(heads, asked)
                if isinstance(item, Sample):
                    spent = Spent(len(stream.prompt_token_ids), asyncio.get_running_loop().time() - began)
                    async for event in _end(front, asked, heads, samples[item.index], item, spent):
                        yield event
                    continue
                heads.add(item)
                if (choice := samples[item.index].choice(asked, item, names)) is not None:
                    yield event_of(msgspec.json.encode(heads.event(choice)))
            result: Result = stream.result
    if is_scored:
        told = await prompt_scores_of(asked, result, names)
        yield event_of(msgspec.json.encode(heads.event(None, **told)))
    if (last := heads.last([result])) is not None:
        yield event_of(msgspec.json.encode(last))


async def _end(
    front: Front, asked: Asked, heads: Heads, state: _Growing, sample: Sample, spent: Spent
) -> AsyncIterator[bytes]:
    """What is left of a sample, and how it ended."""
    rest, ended = state.last(sample)
    if rest is not None:
        yield event_of(msgspec.json.encode(heads.event(rest)))
    parts: list[Part] = []
    put_extras(front, asked, sample, ended, parts, spent)
    async for event in event_with(heads.event(ended), parts):
        yield event


def _beginning(heads: Heads, asked: Asked) -> bytes:
    """The chunks with the role, one for each sample."""
    more = {"prompt_token_ids": asked.prompt} if asked.body.return_token_ids else {}
    events = []
    for index in range(asked.params.n):
        choice = _choice(index, {"role": "assistant", "content": ""})
        events.append(event_of(msgspec.json.encode(heads.event(choice, **more))))
        more = {}
    return b"".join(events)
