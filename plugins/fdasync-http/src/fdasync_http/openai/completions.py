"""`POST /v1/completions`: what a body asks for, and whole answers; `completion_stream.py` makes the streams.

A body with several prompts is answered with the choices of each in a row: choice `i * n + k` is sample k of prompt i.
Called by `application.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fdasync_http.bodies import read_json
from fdasync_http.failures import wrong
from fdasync_http.grammars import field_of, grammar_of
from fdasync_http.openai.answers import Spent, finish_of, head_of, prompt_scores_of, put_extras, usage_of, version_of
from fdasync_http.openai.asked import Asked, check_common
from fdasync_http.openai.completion_stream import KIND, choice_of, echo_of, result_of, streamed, with_echo
from fdasync_http.openai.heads import common_name
from fdasync_http.openai.logprobs import TokenNames
from fdasync_http.openai.types import CompletionBody
from fdasync_http.parts import assembled
from fdasync_http.replies import Events, Part, Parts, all_of, whole
from fdasync_http.sampling import count_of
from fdasync_http.text import prompt_tokens

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

# OpenAI's default, which SGLang and vLLM keep
_MAX_TOKENS = 16


async def completions(request: Request, front: Front) -> Response:
    """`POST /v1/completions`: OpenAI's completions, whole or as events."""
    body = await read_json(request, CompletionBody, front.config)
    check_common(front, body)
    asked = _asked_of(front, body)
    if not body.stream:
        return await whole(request, _answer(front, asked))
    return Events(streamed(front, asked))


def _asked_of(front: Front, body: CompletionBody) -> list[Asked]:
    prompts = _prompts_of(body)
    tops = count_of(body.logprobs)
    asked = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and _early(body):
            prompt = prompt_tokens(front, "prompt", prompt, add_special_tokens=body.add_special_tokens)
        asked.append(
            Asked(
                front,
                body,
                prompt,
                prefix="cmpl",
                max_tokens=_MAX_TOKENS,
                with_logprobs=tops is not None,
                top_logprobs=tops or 0,
                number=number if len(prompts) > 1 else None,
                grammar=grammar_of(body),
                grammar_field=partial(field_of, body),
                echo=body.echo,
            )
        )
    return asked


def _early(body: CompletionBody) -> bool:
    """Whether a prompt is made tokens here: the first event tells of them before the engine does, or they are others
    than the engine's."""
    tells = body.return_token_ids or (body.stream and body.stream_options.continuous_usage_stats)
    return tells or not body.add_special_tokens


def _prompts_of(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        if len(ids) < len(prompt):
            raise wrong("prompt", "mixes token ids with texts or lists")
        return [ids]
    if not prompt:
        raise wrong("prompt", "is empty")
    return [part for part in prompt if not isinstance(part, int)]


async def _answer(front: Front, asked: list[Asked]) -> Response:
    with front.place(), front.group(common_name(asked), [one.request_id for one in asked]):
        results = await all_of([result_of(front, one) for one in asked])
    names = TokenNames(front, as_ids=asked[0].body.return_tokens_as_token_ids)
    choices: list[dict[str, Any]] = []
    parts: list[Part] = []
    for one, result in zip(asked, results, strict=True):
        echo = await echo_of(front, one, result, names)
        scores = await prompt_scores_of(one, result, names)
        for sample in result.samples:
            text, logprobs = with_echo(one, echo, one.form.of_sample(), sample, names)
            choice = choice_of(len(choices), text, logprobs, finish_of(sample))
            if one.body.return_token_ids:
                choice["token_ids"] = sample.token_ids
                choice["prompt_token_ids"] = result.prompt_token_ids
            choice |= scores
            put_extras(front, one, sample, choice, parts, Spent.of(result))
            choices.append(choice)
    answer = head_of(front, common_name(asked), KIND, asked[0].body.model)
    answer |= {"choices": choices, "usage": usage_of(results), "weight_version": version_of(front, results[-1])}
    return Parts(assembled(answer, parts))
