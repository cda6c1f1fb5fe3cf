"""SGLang's `POST /generate`: tokens or text in; text, ids, log-probs and expert rows out, whole or as events.

Answers have the fields of SGLang's, as slime, Miles and AReaL read them. Events are cumulative, and the last one alone
carries rows. Aborts and deadlines are results with `finish_reason.type` "abort", because these clients send every
failed call again. Called by `application.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import Result, Sample
from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused, unserved
from fdasync_http.openai.logprobs import TokenNames
from fdasync_http.parts import assembled, event_with
from fdasync_http.prompt_scores import without_output
from fdasync_http.replies import Events, Part, Parts, all_of, event_of, whole
from fdasync_http.sglang.asked import Asked, GenerateBody, asked_of
from fdasync_http.sglang.meta import logprobs_of, meta_of, prompt_meta_of, put_chosen, put_rows, top_of
from fdasync_http.streams import read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Delta, DeltaStream
    from fdasync_http.front import Front
    from fdasync_http.text import SampleText


async def generate(request: Request, front: Front) -> Response:
    """`POST /generate`: SGLang's: tokens or text in; text, ids, log-probs and expert rows out, whole or as events."""
    body = await read_json(request, GenerateBody, front.config)
    asked, many = asked_of(front, body)
    names = _names_of(front, body)
    if body.stream:
        if many:
            raise Refused(400, "a list of prompts cannot be streamed; send a request for each", param="stream")
        return Events(_streamed(front, asked[0], names))
    return await whole(request, _answer(front, asked, many, names))


def _names_of(front: Front, body: GenerateBody) -> TokenNames | None:
    """Gives log-probs the text of their tokens; None: it is not asked for. Raises Refused."""
    if not body.return_text_in_logprobs:
        return None
    if front.tokenizer is None:
        raise unserved("return_text_in_logprobs", "this server has no tokenizer")
    return TokenNames(front, as_ids=False)


async def _answer(front: Front, asked: list[Asked], many: bool, names: TokenNames | None) -> Response:
    rid = asked[0].body.rid
    requests = [one.options["request_id"] for one in asked]
    with front.place(), front.group(rid if isinstance(rid, str) else None, requests):
        results = await all_of([_result_of(front, one) for one in asked])
    answers: list[dict[str, Any]] = []
    parts: list[Part] = []
    for one, result in zip(asked, results, strict=True):
        result = without_output(result) if one.scores_only else result
        for sample in result.samples:
            payload, more = _payload(front, one, result, sample, one.form.of_sample(), names)
            answers.append(payload)
            parts += more
    single = not many and len(answers) == 1
    return Parts(assembled(answers[0] if single else answers, parts))


async def _result_of(front: Front, asked: Asked) -> Result:
    with asked.names.told_to_client():
        return await front.complete(asked.prompt, asked.params, **asked.options)


class _Growing:
    """One sample of a stream: what its cumulative events repeat, encoded once.

    Attributes:
        text: makes its text.
        names: give its log-probs the text of their tokens; None: they have none.
        told: the inside of a JSON string: its text so far.
        ids, logprobs, tops: elements of JSON lists.
        count: how many tokens came.
    """

    def __init__(self, text: SampleText, names: TokenNames | None) -> None:
        self.text = text
        self.names = names
        self.told = bytearray()
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.tops = bytearray()
        self.count = 0

    def add(self, delta: Delta) -> None:
        if delta.finish_reason is None:
            # the last text comes with the sample, which knows what stopped it
            self.told += msgspec.json.encode(self.text.add(delta.text, delta.token_ids))[1:-1]
        self.count += len(delta.token_ids)
        _extend(self.ids, delta.token_ids)
        values = delta.raw_logprobs if delta.processed_logprobs is None else delta.processed_logprobs
        if values is not None:
            _extend(self.logprobs, logprobs_of(values, delta.token_ids, self.names))
        if delta.top_logprobs is not None:
            _extend(self.tops, [top_of(top, self.names) for top in delta.top_logprobs])


def _extend(encoded: bytearray, values: Any) -> None:
    more = msgspec.json.encode(values)[1:-1]
    if more:
        if encoded:
            encoded += b","
        encoded += more


async def _streamed(front: Front, asked: Asked, names: TokenNames | None) -> AsyncIterator[bytes]:
    growing = [_Growing(asked.form.of_sample(), names) for _ in range(asked.params.n)]
    # the prompt's log-probs stand in the last events, and come at the end of the request; so do chosen positions, which
    # are copied meanwhile
    comes_late = asked.params.prompt_logprobs_start is not None or asked.body.return_indexer_topk
    began = asyncio.get_running_loop().time()
    with front.place(), asked.names.told_to_client():
        async with front.generate(asked.prompt, asked.params, **asked.options) as stream:
            version = front.generator.facts().weight_version
            prompt_tokens = 0
            async for item in read(stream, at_end=comes_late):
                # known from the first delta on
                prompt_tokens = prompt_tokens or len(stream.prompt_token_ids)
                state = growing[item.index]
                if isinstance(item, Sample):
                    result = (
                        msgspec.structs.replace(stream.result, samples=(item,))
                        if comes_late
                        else _ended_result(stream, item, asyncio.get_running_loop().time() - began)
                    )
                    result = without_output(result) if asked.scores_only else result
                    payload, parts = _payload(front, asked, result, result.samples[0], state.text, names)
                    if len(growing) > 1:
                        payload["index"] = item.index
                    async for event in event_with(payload, parts):
                        yield event
                    continue
                state.add(item)
                if item.finish_reason is None:
                    told = _so_far(asked, state, item.index, stream.request_id, prompt_tokens, version)
                    yield event_of(msgspec.json.encode(told))


def _ended_result(stream: DeltaStream, sample: Sample, total_s: float) -> Result:
    """The result of one sample that has ended; others may go on."""
    return Result(
        request_id=stream.request_id, prompt_token_ids=stream.prompt_token_ids, samples=(sample,), total_s=total_s
    )


def _so_far(
    asked: Asked, state: _Growing, index: int, request_id: str, prompt_tokens: int, version: str
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request_id,
        "finish_reason": None,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": state.count,
        "cached_tokens": 0,
        "weight_version": version,
    }
    if asked.body.return_logprob:
        meta["output_token_logprobs"] = msgspec.Raw(b"[" + state.logprobs + b"]")
    if asked.params.top_logprobs:
        meta["output_top_logprobs"] = msgspec.Raw(b"[" + state.tops + b"]")
    payload: dict[str, Any] = {
        "text": msgspec.Raw(b'"' + state.told + b'"'),
        "output_ids": msgspec.Raw(b"[" + state.ids + b"]"),
        "meta_info": meta,
    }
    if asked.params.n > 1:
        payload["index"] = index
    return payload


def _payload(
    front: Front, asked: Asked, result: Result, sample: Sample, text: SampleText, names: TokenNames | None
) -> tuple[dict[str, Any], list[Part]]:
    """The answer of a sample that has ended, with marks for its parts."""
    meta = meta_of(
        sample,
        request_id=result.request_id,
        prompt_tokens=len(result.prompt_token_ids),
        version=front.generator.facts().weight_version,
        max_tokens=0 if asked.scores_only else asked.params.max_tokens,
        total_s=result.total_s,
        names=names,
    )
    if asked.body.return_logprob:
        # a sample that ended before its first token has none
        meta.setdefault("output_token_logprobs", [])
    meta.update(prompt_meta_of(result, asked.params.prompt_logprobs_start, names))
    parts: list[Part] = []
    if asked.body.return_routed_experts:
        put_rows(sample, asked.body.routed_experts_start_len, meta, parts, front.num_hidden_layers)
    put_chosen(sample, meta, parts)
    payload: dict[str, Any] = {
        "text": text.end(sample),
        "output_ids": sample.token_ids,
        "meta_info": meta,
    }
    if asked.body.return_prompt_token_ids:
        meta["prompt_token_ids"] = result.prompt_token_ids
    return payload, parts
