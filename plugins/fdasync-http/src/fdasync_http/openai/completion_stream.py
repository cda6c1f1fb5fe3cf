"""Streams of completions, and how a choice repeats its prompt.

What is new of each sample, then an event for its end; the streams of several prompts are mixed. A choice that repeats
the prompt's log-probs, or has no new tokens, is sent when all of it is there: the prompt's log-probs are known at the
end of a request. Called by `completions.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync import Delta
from fdasync_http.openai.answers import Spent, finish_of, prompt_scores_of, put_extras
from fdasync_http.openai.heads import Heads, common_name
from fdasync_http.openai.logprobs import TextOffsets, TokenNames, join, of_completion, of_echo, spaced
from fdasync_http.parts import event_with
from fdasync_http.prompt_scores import without_output
from fdasync_http.replies import Part, event_of, interleaved
from fdasync_http.streams import read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from fdasync import Result, Sample
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked
    from fdasync_http.text import SampleText

KIND = "text_completion"
#: a choice of an event, with marks for its parts
_Choice = tuple[dict[str, Any], list[Part]]


def choice_of(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    """A choice of a completion, or what is new of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def result_of(front: Front, asked: Asked) -> Result:
    """The whole result of a prompt, without the token that it did not ask for."""
    with asked.names.told_to_client():
        result = await front.complete(asked.prompt, asked.params, **asked.options)
    return without_output(result) if asked.scores_only else result


class Echo(NamedTuple):
    """A prompt as its choices repeat it.

    Attributes:
        text: of it.
        logprobs: of its tokens; None: none were asked for.
    """

    text: str = ""
    logprobs: dict[str, Any] | None = None


async def echo_of(front: Front, asked: Asked, result: Result, names: TokenNames) -> Echo:
    """The prompt of a request that has ended; empty where its choices do not repeat it."""
    if not asked.echo:
        return Echo()
    text = _prompt_text(front, asked, names)
    if asked.params.logprobs == "none" or result.prompt_logprobs is None:
        return Echo(text)
    offsets = TextOffsets(names, spaced=text.startswith(" "), within=text)
    return Echo(text, await of_echo(result, names, offsets))


def _prompt_text(front: Front, asked: Asked, names: TokenNames) -> str:
    if isinstance(asked.prompt, str):
        return asked.prompt
    return (
        ""
        if front.tokenizer is None
        else spaced(front.tokenizer.decode(asked.prompt), asked.prompt, names, specials=False)
    )


def with_echo(
    asked: Asked, echo: Echo, text: SampleText, sample: Sample, names: TokenNames
) -> tuple[str, dict[str, Any] | None]:
    """Text and log-probs of a whole sample; the prompt's come first, if the answer repeats the prompt."""
    before, own = echo.logprobs, text.end(sample)
    if asked.echo:
        own = spaced(own, sample.token_ids, names, specials=asked.form.specials)
    offsets = TextOffsets(names, specials=asked.form.specials, spaced=asked.echo, first=len(echo.text))
    logprobs = of_completion(sample, names, offsets)
    if before is not None and logprobs is not None:
        told: dict[str, Any] = {name: [*values] for name, values in before.items()}
        join(told, logprobs)
        logprobs = told
    return echo.text + own, logprobs


class _Growing:
    """A sample of a stream.

    Args:
        echo: text that goes before its own; None: none does.
        offsets: of its tokens.

    Attributes:
        begun: an event was sent.
    """

    def __init__(self, index: int, text: SampleText, echo: str | None, names: TokenNames, offsets: TextOffsets) -> None:
        self._index = index
        self._echo = echo or ""
        self._text = text
        self._names = names
        self._offsets = offsets
        # tokens before its first text, which stands behind another text; None: it has begun, or stands alone
        self._first: list[int] | None = None if echo is None else []
        self.begun = False

    def choice(self, asked: Asked, delta: Delta) -> dict[str, Any]:
        """What is new of it."""
        # a token that stops it is no text: which one it was, the sample tells
        text = self._text.add(delta.text, () if delta.finish_reason else delta.token_ids)
        logprobs = of_completion(delta, self._names, self._offsets)
        choice = choice_of(self._index, self._behind_echo(text, delta.token_ids), logprobs, None)
        if asked.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if not self.begun:
                choice["prompt_token_ids"] = asked.prompt
        self.begun = True
        return choice

    def last(self, sample: Sample) -> dict[str, Any]:
        """What is left of it, and how it ended."""
        text = self._text.rest(sample)
        return choice_of(self._index, self._behind_echo(text, ()), None, finish_of(sample))

    def _behind_echo(self, text: str, token_ids: Sequence[int]) -> str:
        echo, self._echo = self._echo, ""
        if self._first is not None:
            self._first += token_ids
            if text:
                text = spaced(text, self._first, self._names, specials=self._offsets.specials)
                self._first = None
        return echo + text


class _Prompt:
    """One prompt of a stream.

    Args:
        first: number of its first choice.
        heads: count the tokens of all prompts.

    Attributes:
        result: of the request, once its choices have ended.
    """

    result: Result

    def __init__(self, front: Front, asked: Asked, first: int, names: TokenNames, heads: Heads) -> None:
        self._front = front
        self._asked = asked
        self._first = first
        self._names = names
        self._heads = heads

    def choices(self) -> AsyncGenerator[_Choice, None]:
        """What is new of its samples, and their ends."""
        asked = self._asked
        at_once = asked.scores_only or (asked.echo and asked.params.logprobs != "none")
        return self._at_once() if at_once else self._as_they_come()

    async def _as_they_come(self) -> AsyncGenerator[_Choice, None]:
        front, asked = self._front, self._asked
        began = asyncio.get_running_loop().time()
        names = self._names
        echo = _prompt_text(front, asked, names) if asked.echo else None
        samples = [
            _Growing(
                self._first + index, asked.form.of_sample(), echo, names,
                TextOffsets(names, specials=asked.form.specials),
            )
            for index in range(asked.params.n)
        ]  # fmt: skip
        # the prompt's log-probs go with the ends of its samples, and come at the end of the request
        is_scored = asked.body.prompt_logprobs is not None
        scores: dict[str, Any] = {}
        with asked.names.told_to_client():
            async with front.generate(asked.prompt, asked.params, **asked.options) as stream:
                async for item in read(stream, at_end=is_scored):
                    growing = samples[item.index]
                    if isinstance(item, Delta):
                        self._heads.add(item)
                        yield growing.choice(asked, item), []
                        continue
                    choice = growing.last(item)
                    if is_scored:
                        scores = scores or await prompt_scores_of(asked, stream.result, names)
                        choice |= scores
                    spent = Spent(len(stream.prompt_token_ids), asyncio.get_running_loop().time() - began)
                    yield self._end(choice, item, spent)
                self.result = stream.result

    async def _at_once(self) -> AsyncGenerator[_Choice, None]:
        front, asked = self._front, self._asked
        result = self.result = await result_of(front, asked)
        echo = await echo_of(front, asked, result, self._names)
        scores = await prompt_scores_of(asked, result, self._names)
        for sample in result.samples:
            text, logprobs = with_echo(asked, echo, asked.form.of_sample(), sample, self._names)
            choice = choice_of(self._first + sample.index, text, logprobs, None)
            if asked.body.return_token_ids:
                choice |= {"token_ids": sample.token_ids, "prompt_token_ids": result.prompt_token_ids}
            self._heads.add(sample)
            yield choice, []
            ended = choice_of(self._first + sample.index, "", None, finish_of(sample))
            yield self._end(ended | scores, sample, Spent.of(result))

    def _end(self, choice: dict[str, Any], sample: Sample, spent: Spent) -> _Choice:
        parts: list[Part] = []
        put_extras(self._front, self._asked, sample, choice, parts, spent)
        return choice, parts


async def streamed(front: Front, asked: list[Asked]) -> AsyncIterator[bytes]:
    """The events of a stream, then one with the usage where it was asked for."""
    heads = Heads(front, asked, KIND)
    names = TokenNames(front, as_ids=asked[0].body.return_tokens_as_token_ids)
    prompts = [_Prompt(front, one, number * one.params.n, names, heads) for number, one in enumerate(asked)]
    all_choices = [prompt.choices() for prompt in prompts]
    with front.place(), front.group(common_name(asked), [one.request_id for one in asked]):
        async with aclosing(all_choices[0] if len(asked) == 1 else interleaved(all_choices)) as choices:
            async for choice, parts in choices:
                event = heads.event(choice)
                if not parts:
                    yield event_of(msgspec.json.encode(event))
                    continue
                async for piece in event_with(event, parts):
                    yield piece
    if (last := heads.last([prompt.result for prompt in prompts])) is not None:
        yield event_of(msgspec.json.encode(last))
