"""`POST /v1/completions`, whole and streamed.

A body with several prompts is answered with the choices of each in a row: choice `i * n + k` is sample k of prompt i.
Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.bodies import check_text_size
from fdasync_http.failures import Refused
from fdasync_http.grammars import grammar_of
from fdasync_http.openai.answers import event_with, finish_of, head_of, put_extras, usage_of, version_of
from fdasync_http.openai.asked import Asked, check_common
from fdasync_http.openai.heads import Heads
from fdasync_http.openai.logprobs import TokenNames, of_completion
from fdasync_http.openai.types import CompletionBody, read_known
from fdasync_http.parts import assembled
from fdasync_http.replies import Events, Part, Parts, all_of, event_of, whole
from fdasync_http.text import encoded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Delta, Result, Sample
    from fdasync_http.front import Front
    from fdasync_http.text import SampleText

_KIND = "text_completion"
# OpenAI's default, which SGLang and vLLM keep
_MAX_TOKENS = 16


async def completions(request: Request, front: Front) -> Response:
    """`POST /v1/completions`."""
    body = await read_known(request, CompletionBody, front.config)
    check_common(front, body)
    asked = _asked_of(front, body)
    if not body.stream:
        return await whole(request, _answer(front, asked))
    if len(asked) > 1:
        raise Refused(400, "a list of prompts cannot be streamed; send a request for each", param="stream")
    return Events(_streamed(front, asked[0]))


def _asked_of(front: Front, body: CompletionBody) -> list[Asked]:
    prompts = _prompts_of(body)
    asked = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and _early(body):
            if front.tokenizer is None:
                raise Refused(400, "prompt: this server has no tokenizer; give token ids", param="prompt")
            check_text_size("prompt", prompt, front)
            prompt = encoded(front.tokenizer, prompt)
        asked.append(
            Asked(
                front,
                body,
                prompt,
                prefix="cmpl",
                max_tokens=_MAX_TOKENS,
                with_logprobs=body.logprobs is not None,
                top_logprobs=body.logprobs or 0,
                number=number if len(prompts) > 1 else None,
                grammar=grammar_of(body),
            )
        )
    return asked


def _early(body: CompletionBody) -> bool:
    """Whether the first event tells of the prompt's tokens, before the engine does."""
    return body.return_token_ids or (body.stream and body.stream_options.continuous_usage_stats)


def _prompts_of(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        if len(ids) < len(prompt):
            raise Refused(400, "prompt mixes token ids with texts or lists", param="prompt", code="bad_input")
        return [ids]
    if not prompt:
        raise Refused(400, "prompt is empty", param="prompt", code="bad_input")
    return [part for part in prompt if not isinstance(part, int)]


async def _answer(front: Front, asked: list[Asked]) -> Response:
    with front.place():
        results = await all_of([front.generator.complete(one.prompt, one.params, **one.options) for one in asked])
    names = TokenNames(front, as_ids=asked[0].body.return_tokens_as_token_ids)
    choices: list[dict[str, Any]] = []
    parts: list[Part] = []
    for one, result in zip(asked, results, strict=True):
        for sample in result.samples:
            text = one.form.of_sample().end(sample.text, sample.token_ids, sample.stop_token_id)
            choice = _choice(len(choices), text, of_completion(sample, names), finish_of(sample))
            if one.body.return_token_ids:
                choice["token_ids"] = sample.token_ids
                choice["prompt_token_ids"] = result.prompt_token_ids
            put_extras(front, one, result, sample, choice, parts)
            choices.append(choice)
    # of one prompt, the name by which it can be aborted; of several, the common beginning of theirs
    name = asked[0].request_id if len(asked) == 1 else asked[0].request_id.removesuffix("-0")
    answer = head_of(front, name, _KIND)
    answer |= {"choices": choices, "usage": usage_of(results), "weight_version": version_of(front, results[-1])}
    return Parts(assembled(answer, parts))


def _choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class _Growing:
    """A sample of a stream.

    Attributes:
        text: what it has.
        given: how many characters of it were sent.
        offset: characters of the names of its tokens.
        begun: an event was sent.
    """

    def __init__(self, text: SampleText) -> None:
        self.text = text
        self.given = 0
        self.offset = 0
        self.begun = False

    def choice(self, asked: Asked, delta: Delta, names: TokenNames) -> dict[str, Any]:
        """What is new of it."""
        # a token that stops it is no text: which one it was, the result tells
        self.text.add(delta.text, () if delta.finish_reason else delta.token_ids)
        text = self.text.settled()[self.given :]
        self.given += len(text)
        logprobs = of_completion(delta, names, self.offset)
        if logprobs is not None:
            self.offset += sum(map(len, logprobs["tokens"]))
        choice = _choice(delta.index, text, logprobs, None)
        if asked.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if not self.begun:
                choice["prompt_token_ids"] = asked.prompt
        self.begun = True
        return choice

    def last(self, sample: Sample) -> dict[str, Any]:
        """What is left of it, and how it ended."""
        text = self.text.end(sample.text, sample.token_ids, sample.stop_token_id)
        return _choice(sample.index, text[self.given :], None, finish_of(sample))


async def _streamed(front: Front, asked: Asked) -> AsyncIterator[bytes]:
    """What is new of each sample; then an event for the end of each; then the usage."""
    heads = Heads(front, asked, _KIND)
    names = TokenNames(front, as_ids=asked.body.return_tokens_as_token_ids)
    samples = [_Growing(asked.form.of_sample()) for _ in range(asked.params.n)]
    with front.place():
        async with front.generator.generate(asked.prompt, asked.params, **asked.options) as stream:
            async for delta in stream:
                heads.add(delta)
                choice = samples[delta.index].choice(asked, delta, names)
                yield event_of(msgspec.json.encode(heads.event(choice)))
            result: Result = stream.result
    for sample, state in zip(result.samples, samples, strict=True):
        parts: list[Part] = []
        choice = state.last(sample)
        put_extras(front, asked, result, sample, choice, parts)
        async for event in event_with(heads.event(choice), parts):
            yield event
    if (last := heads.last(result)) is not None:
        yield event_of(msgspec.json.encode(last))
