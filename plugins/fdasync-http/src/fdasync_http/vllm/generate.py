"""vLLM's `POST /inference/v1/generate`, and SkyRL's `/skyrl/v1/generate`: tokens in, tokens, log-probs and rows out.

Fields are as in vLLM's token-in-token-out protocol, as verifiers (prime-rl), SkyRL and vime send and read them. The two
paths differ in the form of the rows alone. Called by `application.py`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from fdasync import Sample
from fdasync_http import rows
from fdasync_http.bodies import read_json
from fdasync_http.client_names import Names
from fdasync_http.failures import Refused, numbered
from fdasync_http.fields import Table, asked_by, engine, not_served
from fdasync_http.grammars import field_of, grammar_of
from fdasync_http.openai.asked import check_model
from fdasync_http.openai.types import StreamOptions
from fdasync_http.parts import MARK, assembled, event_with
from fdasync_http.prompt_scores import finite, prompt_logprobs_of
from fdasync_http.replies import Events, Part, Parts, event_of, whole
from fdasync_http.sampling import count_of, params_of
from fdasync_http.streams import read
from fdasync_http.text import TextForm
from fdasync_http.vllm.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Delta, Result
    from fdasync.request import GenerateOptions
    from fdasync_http.front import Front

RowForm = Literal["npy", "prime_rl", "skyrl", "none"]


GENERATE: Table = {
    "token_ids": engine("prompt"),
    **not_served("images, sound and video are not read", "features", "content_parts", "mm_processor_kwargs"),
    **not_served("instances hand blocks to each other by themselves", "kv_transfer_params", "ec_transfer_params"),
    **not_served("LoRA adapters are not served", "lora_request"),
}


class GenerateBody(msgspec.Struct):
    """The fields on the wire; see vLLM's documentation."""

    RULES: ClassVar[Table] = GENERATE
    OBJECTS: ClassVar[Any] = {"sampling_params": Sampling, "stream_options": StreamOptions}

    token_ids: list[int]
    sampling_params: Sampling = Sampling()
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0


class _Asked:
    """A body, checked.

    Attributes:
        body: as it came.
        params, options: of the engine.
        names: of its fields in errors.
        form: how its text is made.
        rows: how its rows are written.
    """

    def __init__(self, front: Front, body: GenerateBody, form: RowForm) -> None:
        facts = front.generator.facts()
        check_model(front, body.model or "", "vllm")
        sampling = body.sampling_params
        self.body = body
        self.names = Names(asked_by(type(body)), body, partial(field_of, sampling, "sampling_params."))
        room = max(facts.max_context_tokens - len(body.token_ids), 1)
        tops, scored = count_of(sampling.logprobs), count_of(sampling.prompt_logprobs)
        self.params = params_of(
            sampling,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            grammar=grammar_of(sampling, "sampling_params."),
            # the model's own, as vLLM's are unless it is told otherwise
            logprobs="none" if tops is None else "raw",
            top_logprobs=max(tops or 0, 0),
            prompt_logprobs_start=None if scored is None else 0,
            prompt_top_logprobs=max(scored or 0, 0),
        )
        self.rows: RowForm = form if facts.captures_routing else "none"
        if form == "skyrl" and not facts.captures_routing:
            raise Refused(400, "this engine captures no expert routing; use /inference/v1/generate", code="not_served")
        self.options: GenerateOptions = {
            "request_id": body.request_id,
            # vLLM serves low numbers first
            "priority": -body.priority,
            "routing": self.rows != "none",
            "aux": False,
            "start": sampling.routed_experts_prompt_start or 0,
            "cache_salt": body.cache_salt or "",
        }
        self.form = TextForm(
            front,
            # which decides nothing where no text is given out; renderers send false with every request
            specials=not sampling.skip_special_tokens and body.output_mode == "text",
            keeps_stop=sampling.include_stop_str_in_output,
            stop=self.params.stop,
        )


async def generate(request: Request, front: Front) -> Response:
    """`POST /inference/v1/generate`: tokens in; tokens, log-probs and expert rows out, whole or as events: vLLM's."""
    return await _generate(request, front, front.config.rows)


async def skyrl_generate(request: Request, front: Front) -> Response:
    """`POST /skyrl/v1/generate`: SkyRL's: as /inference/v1/generate, with rows in the form that SkyRL reads."""
    return await _generate(request, front, "skyrl")


async def _generate(request: Request, front: Front, form: RowForm) -> Response:
    with numbered():
        body = await read_json(request, GenerateBody, front.config)
        asked = _Asked(front, body, form)
        if body.stream:
            return Events(_streamed(front, asked))
        return await whole(request, _answer(front, asked))


async def _answer(front: Front, asked: _Asked) -> Response:
    with front.place(), asked.names.told_to_client():
        result = await front.complete(asked.body.token_ids, asked.params, **asked.options)
    parts: list[Part] = []
    choices = [_choice(front, asked, sample, parts) for sample in result.samples]
    usage = result.usage
    answer: dict[str, Any] = {
        "request_id": result.request_id,
        "model": asked.body.model or front.model,
        "created": int(time.time()),
        "output_mode": asked.body.output_mode,
        "choices": choices,
        "usage": _usage(len(result.prompt_token_ids), usage.completion_tokens, usage.cached_tokens),
        "weight_version": _version(front, result),
    }
    told = await prompt_logprobs_of(result, top=asked.params.prompt_top_logprobs)
    if told is not None:
        answer["prompt_logprobs"] = told
    if asked.body.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_token_ids
    return Parts(assembled(answer, parts))


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _version(front: Front, result: Result) -> str:
    spans = [span for sample in result.samples for span in sample.weight_version]
    return spans[-1].version if spans else front.generator.facts().weight_version


def _choice(front: Front, asked: _Asked, sample: Sample, parts: list[Part]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": sample.index,
        "token_ids": sample.token_ids,
        # vLLM's clients know no deadline
        "finish_reason": "abort" if sample.finish_reason == "deadline" else sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.stop} for span in sample.weight_version
        ],
    }
    if asked.body.output_mode == "text":
        choice["text"] = asked.form.of_sample().end(sample)
    values = sample.raw_logprobs
    choice["logprobs"] = None
    if values is not None:
        tops = sample.top_logprobs or (None,) * len(sample.token_ids)
        choice["logprobs"] = {
            "content": [
                _logprob(token, value, top)
                for token, value, top in zip(sample.token_ids, values.tolist(), tops, strict=True)
            ]
        }
    if asked.rows != "none":
        choice["routed_experts"] = _rows(front, asked.rows, sample, parts)
    return choice


def _logprob(token: int, value: float, top: Any) -> dict[str, Any]:
    tops: list[dict[str, Any]] = []
    if top is not None:
        tops = [
            {"token": f"token_id:{other}", "token_id": other, "logprob": finite(one), "rank": rank}
            for rank, (other, one) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
        ]
    rank = next((entry["rank"] for entry in tops if entry["token_id"] == token), None)
    return {
        "token": f"token_id:{token}", "token_id": token, "logprob": finite(value), "rank": rank, "bytes": None,
        "top_logprobs": tops,
    }  # fmt: skip


def _rows(front: Front, form: RowForm, sample: Sample, parts: list[Part]) -> Any:
    """The rows of a sample; None where it has none."""
    routing = sample.routing
    if routing is None or not len(routing.array) or rows.ended_in_prompt(sample):
        return None
    layers = front.num_hidden_layers
    if form == "npy":
        parts.append(rows.npy(routing, layers))
        return MARK
    if form == "skyrl":
        payload, part = rows.packed(routing, layers, ("uint8", "int16", "int32"))
    else:
        payload, part = rows.packed(routing, layers, ("uint8", "uint16"))
        payload["start"] = routing.start
    parts.append(part)
    return payload


async def _streamed(front: Front, asked: _Asked) -> AsyncIterator[bytes]:
    """Deltas as events; the last event of each sample has its finish reason and its rows."""
    with numbered(), front.place(), asked.names.told_to_client():
        async with front.generate(asked.body.token_ids, asked.params, **asked.options) as stream:
            texts = [asked.form.of_sample() for _ in range(asked.params.n)]
            # once, not for every event
            head = {
                "request_id": stream.request_id,
                "model": asked.body.model or front.model,
                "created": int(time.time()),
            }
            async for item in read(stream):
                text = texts[item.index]
                if isinstance(item, Sample):
                    parts: list[Part] = []
                    choice = _choice(front, asked, item, parts)
                    # tokens and log-probs were given
                    choice["token_ids"], choice["logprobs"] = [], None
                    if asked.body.output_mode == "text":
                        choice["text"] = text.rest(item)
                    async for told in event_with({**head, "choices": [choice]}, parts):
                        yield told
                    continue
                said = ""
                if item.finish_reason is None:
                    # the last text comes with the sample, which knows what stopped it
                    said = text.add(item.text, item.token_ids)
                yield event_of(msgspec.json.encode({**head, "choices": [_delta(asked, item, said)]}))
            result = stream.result
    if asked.body.stream_options.include_usage:
        usage = result.usage
        counted = _usage(len(result.prompt_token_ids), usage.completion_tokens, usage.cached_tokens)
        yield event_of(msgspec.json.encode({**head, "choices": [], "usage": counted}))


def _delta(asked: _Asked, delta: Delta, text: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": delta.index, "token_ids": delta.token_ids, "finish_reason": None}
    if asked.body.output_mode == "text":
        choice["text"] = text
    if delta.raw_logprobs is not None:
        tops = delta.top_logprobs or (None,) * len(delta.token_ids)
        choice["logprobs"] = {
            "content": [
                _logprob(token, value, top)
                for token, value, top in zip(delta.token_ids, delta.raw_logprobs, tops, strict=True)
            ]
        }
    return choice
