"""SGLang's `POST /generate`: tokens or text in; text, ids, log-probs and expert rows out, whole or as events.

Fields are those of SGLang's `GenerateReqInput` and of its answers, as slime, Miles and AReaL send and read them. Events
are cumulative, and the last one alone carries rows. Aborts and deadlines are results with `finish_reason.type` "abort",
because these clients send every failed call again. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http import rows
from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused
from fdasync_http.parts import MARK, assembled
from fdasync_http.replies import Events, Part, Parts, all_of, event_of, whole
from fdasync_http.sglang.sampling import Sampling, params_of
from fdasync_http.text import SampleText, TextForm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Delta, Result, Sample, SamplingParams
    from fdasync.request import GenerateOptions
    from fdasync_http.front import Front

# values with which a field asks for nothing
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, -1)
# fields of engines that this one is not, whose values change nothing in an answer
_IGNORED = (
    "log_metrics", "session_id", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "http_worker_ipc", "routing_key", "external_trace_header", "validation_time",
    "received_time", "background", "conversation_id", "no_logs", "modalities", "bootstrap_pair_key", "decode_tp_size",
    "kv_router_hint", "custom_labels", "num_items_assigned", "encoder_urls",
    # SGLang's gateway adds it to every body
    "model",
)  # fmt: skip
# fields that ask for something that is not served
_UNSERVED = (
    "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "lora_id", "return_hidden_states",
    "return_indexer_topk", "token_ids_logprob", "return_sampling_mask", "custom_logit_processor", "session_params",
    "positional_embed_overrides", "need_wait_for_mm_inputs", "multi_item_delimiter", "return_entropy", "return_bytes",
    "multi_item_delimiter_indices", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "mm_hashes",
    "mm_content_hashes", "use_audio_in_video", "video_config", "images_config", "require_reasoning",
    "max_thinking_tokens", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch",
    "video_max_dynamic_patch",
)  # fmt: skip


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields on the wire; see SGLang's documentation. `_IGNORED` and `_UNSERVED` list others that it knows."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    top_logprobs_num: int | None = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    return_prompt_token_ids: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


_KNOWN = set(GenerateBody.__struct_fields__)


class _Asked:
    """One prompt of a body, checked.

    Attributes:
        prompt: text or token ids.
        params: of the engine.
        options: of the engine.
        body: as it came.
        form: how its text is made.
        scores_only: it asks for no new tokens.
    """

    def __init__(self, front: Front, body: GenerateBody, prompt: Any, sampling: Sampling, rid: str | None) -> None:
        facts = front.generator.facts()
        room = facts.max_context_tokens - (len(prompt) if isinstance(prompt, list) else 0)
        start = body.logprob_start_len
        scores = bool(body.return_logprob) and start is not None and start >= 0
        self.scores_only = sampling.max_new_tokens == 0
        self.prompt = prompt
        self.body = body
        self.params: SamplingParams = params_of(
            sampling,
            logprobs=bool(body.return_logprob),
            top_logprobs=body.top_logprobs_num or 0,
            score_from=start if scores else None,
            room_tokens=room,
        )
        self.options: GenerateOptions = {
            "request_id": rid,
            "priority": body.priority or 0,
            "routing": body.return_routed_experts,
            "aux": False,
            "start": _start(prompt, body),
            "cache_salt": body.extra_key or body.cache_salt or "",
        }
        if body.return_routed_experts and not facts.captures_routing:
            raise Refused(400, "this engine captures no expert routing", param="return_routed_experts")
        self.form = TextForm(
            front,
            specials=sampling.skip_special_tokens is False,
            keeps_stop=sampling.no_stop_trim,
            stop=self.params.stop,
        )


def asked_of(front: Front, body: GenerateBody) -> tuple[list[_Asked], bool]:
    """The prompts of a body, and whether it asks for a list of answers. Raises Refused."""
    prompts: list[Any]
    if (body.text is None) == (body.input_ids is None):
        raise Refused(400, "one of text and input_ids is needed", param="input_ids")
    if body.text is not None:
        many = isinstance(body.text, list)
        prompts = list(body.text) if isinstance(body.text, list) else [body.text]
    else:
        assert body.input_ids is not None
        many = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        prompts = list(body.input_ids) if many else [body.input_ids]
        if any(isinstance(prompt, list) is not True for prompt in prompts):
            raise Refused(400, "input_ids mixes ids and lists of ids", param="input_ids")
    if not prompts:
        raise Refused(400, "no prompts", param="input_ids")
    samplings = body.sampling_params or Sampling()
    rids = body.rid
    if isinstance(samplings, list) and len(samplings) != len(prompts):
        raise Refused(400, f"{len(samplings)} sampling_params for {len(prompts)} prompts", param="sampling_params")
    if isinstance(rids, list) and len(rids) != len(prompts):
        raise Refused(400, f"{len(rids)} rids for {len(prompts)} prompts", param="rid")
    asked = []
    for number, prompt in enumerate(prompts):
        sampling = samplings[number] if isinstance(samplings, list) else samplings
        rid = rids[number] if isinstance(rids, list) else rids
        if many and isinstance(rids, str):
            rid = f"{rids}_{number}"
        asked.append(_Asked(front, body, prompt, sampling, rid))
    return asked, many


async def read_generate(request: Request, front: Front) -> GenerateBody:
    """The body of a request. Raises Refused, which names a field that is unknown or not served."""
    raw = await read_json(request, dict[str, msgspec.Raw], front.config)
    for name in [name for name in raw if name not in _KNOWN]:
        value = msgspec.json.decode(raw.pop(name))
        if name in _IGNORED:
            continue
        if name in _UNSERVED:
            if value not in _EMPTY:
                raise Refused(400, f"{name} is not served", param=name, code="not_served")
            continue
        raise Refused(400, f"unknown field {name!r}", param=name, code="unknown_field")
    try:
        return msgspec.json.decode(msgspec.json.encode(raw), type=GenerateBody)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise Refused(400, f"{field}: {words}" if field else words, param=field, code="bad_input") from None


async def generate(request: Request, front: Front) -> Response:
    """`POST /generate`."""
    body = await read_generate(request, front)
    asked, many = asked_of(front, body)
    if body.stream:
        if many:
            raise Refused(400, "a list of prompts cannot be streamed; send a request for each", param="stream")
        return Events(_streamed(front, asked[0]))
    return await whole(request, _answer(front, asked, many))


async def _answer(front: Front, asked: list[_Asked], many: bool) -> Response:
    with front.place():
        results = await all_of([front.generator.complete(one.prompt, one.params, **one.options) for one in asked])
    answers: list[dict[str, Any]] = []
    parts: list[Part] = []
    for one, result in zip(asked, results, strict=True):
        for sample in result.samples:
            payload, more = _payload(front, one, result, sample, one.form.of_sample())
            answers.append(payload)
            parts += more
    single = not many and len(answers) == 1
    return Parts(assembled(answers[0] if single else answers, parts))


class _Growing:
    """One sample of a stream: what its cumulative events repeat, encoded once.

    Attributes:
        text: makes its text.
        ids, logprobs, tops: elements of JSON lists.
        count: how many tokens came.
        ended: its last delta came.
    """

    def __init__(self, text: SampleText) -> None:
        self.text = text
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.tops = bytearray()
        self.count = 0
        self.ended = False

    def add(self, delta: Delta) -> None:
        if delta.finish_reason is None:
            # the last text comes with the result, which knows what stopped it
            self.text.add(delta.text, delta.token_ids)
        self.count += len(delta.token_ids)
        _extend(self.ids, delta.token_ids)
        values = delta.raw_logprobs if delta.processed_logprobs is None else delta.processed_logprobs
        if values is not None:
            _extend(self.logprobs, [(value, token, None) for value, token in zip(values, delta.token_ids, strict=True)])
        if delta.top_logprobs is not None:
            _extend(self.tops, [_top(top) for top in delta.top_logprobs])
        self.ended = delta.finish_reason is not None


def _extend(encoded: bytearray, values: Any) -> None:
    more = msgspec.json.encode(values)[1:-1]
    if more:
        if encoded:
            encoded += b","
        encoded += more


def _top(top: Any) -> list[tuple[float, int, None]] | None:
    if top is None:
        return None
    return [(value, token, None) for token, value in zip(top.token_ids, top.logprobs, strict=True)]


async def _streamed(front: Front, asked: _Asked) -> AsyncIterator[bytes]:
    growing = [_Growing(asked.form.of_sample()) for _ in range(asked.params.n)]
    # the last event of a sample waits for the result: it has rows and versions
    with front.place():
        async with front.generator.generate(asked.prompt, asked.params, **asked.options) as stream:
            version = front.generator.facts().weight_version
            async for delta in stream:
                sample = growing[delta.index]
                sample.add(delta)
                if not sample.ended:
                    yield event_of(msgspec.json.encode(_so_far(asked, sample, delta.index, stream.request_id, version)))
            result = stream.result
    for ended, state in zip(result.samples, growing, strict=True):
        payload, parts = _payload(front, asked, result, ended, state.text)
        if len(growing) > 1:
            payload["index"] = ended.index
        yield b"data: "
        for piece in assembled(payload, parts):
            if isinstance(piece, Part):
                async for some in piece.pieces():
                    yield some
            else:
                yield piece
        yield b"\n\n"


def _so_far(asked: _Asked, state: _Growing, index: int, request_id: str, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request_id,
        "finish_reason": None,
        "prompt_tokens": len(asked.prompt) if isinstance(asked.prompt, list) else 0,
        "completion_tokens": state.count,
        "cached_tokens": 0,
        "weight_version": version,
    }
    if asked.body.return_logprob:
        meta["output_token_logprobs"] = msgspec.Raw(b"[" + state.logprobs + b"]")
    if asked.params.top_logprobs:
        meta["output_top_logprobs"] = msgspec.Raw(b"[" + state.tops + b"]")
    payload: dict[str, Any] = {
        "text": state.text.settled(),
        "output_ids": msgspec.Raw(b"[" + state.ids + b"]"),
        "meta_info": meta,
    }
    if asked.params.n > 1:
        payload["index"] = index
    return payload


def _payload(
    front: Front, asked: _Asked, result: Result, sample: Sample, text: SampleText
) -> tuple[dict[str, Any], list[Part]]:
    """The answer of a sample that has ended, with marks for its parts."""
    if asked.scores_only:
        sample = _without_output(result, sample)
    spans = sample.weight_version
    meta: dict[str, Any] = {
        "id": result.request_id,
        "finish_reason": _finish(asked, sample),
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": sample.cached_tokens,
        "weight_version": spans[-1].version if spans else front.generator.facts().weight_version,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.stop} for span in spans],
        "e2e_latency": result.total_s,
    }
    if asked.body.return_logprob:
        meta["output_token_logprobs"] = _logprobs(sample)
    if asked.params.top_logprobs and sample.top_logprobs is not None:
        meta["output_top_logprobs"] = [_top(top) for top in sample.top_logprobs]
    if result.prompt_logprobs is not None:
        _put_prompt(result, meta)
    parts: list[Part] = []
    if asked.body.return_routed_experts:
        _put_rows(front, asked, sample, meta, parts)
    payload: dict[str, Any] = {
        "text": text.end(sample.text, sample.token_ids, sample.stop_token_id),
        "output_ids": sample.token_ids,
        "meta_info": meta,
    }
    if asked.body.return_prompt_token_ids:
        meta["prompt_token_ids"] = result.prompt_token_ids
    return payload, parts


def _logprobs(sample: Sample) -> Any:
    values = sample.processed_logprobs if sample.raw_logprobs is None else sample.raw_logprobs
    if values is None:
        return []
    return [(value, token, None) for value, token in zip(values.tolist(), sample.token_ids, strict=True)]


def _put_prompt(result: Result, meta: dict[str, Any]) -> None:
    """Log-probs of the prompt's tokens; the first token of all has none."""
    assert result.prompt_logprobs is not None
    values = [None if value != value else value for value in result.prompt_logprobs.tolist()]
    tokens = result.prompt_token_ids[len(result.prompt_token_ids) - len(values) :]
    meta["input_token_logprobs"] = [(value, token, None) for value, token in zip(values, tokens, strict=True)]
    if result.prompt_top_logprobs is not None:
        meta["input_top_logprobs"] = [_top(top) for top in result.prompt_top_logprobs]


def _without_output(result: Result, sample: Sample) -> Sample:
    """A sample whose one token was asked of the engine, and not by the client."""
    routing = sample.routing
    if routing is not None:
        rows = max(len(result.prompt_token_ids) - 1 - sample.start, 0)
        routing = msgspec.structs.replace(routing, array=routing.array[:rows])
    empty = {
        name: None if values is None else values[:0]
        for name, values in (("raw_logprobs", sample.raw_logprobs), ("processed_logprobs", sample.processed_logprobs))
    }
    return msgspec.structs.replace(
        sample, token_ids=(), text="", top_logprobs=(), routing=routing, weight_version=(), stop_token_id=None,
        finish_reason="length" if sample.finish_reason == "stop" else sample.finish_reason, **empty,
    )  # fmt: skip


def _start(prompt: Any, body: GenerateBody) -> int:
    """Position from which rows are asked of the engine: inside the prompt. Miles also names the position behind it."""
    start = body.routed_experts_start_len or 0 if body.return_routed_experts else 0
    return start - 1 if isinstance(prompt, list) and 0 < start == len(prompt) else start


def _put_rows(front: Front, asked: _Asked, sample: Sample, meta: dict[str, Any], parts: list[Part]) -> None:
    """Rows, and where they begin. No rows, no key: slime cannot read an empty text. A client that names a start itself
    reads one (Miles' session merge needs it)."""
    routing = sample.routing
    start = asked.body.routed_experts_start_len
    named = start is not None
    meta["routed_experts_start_len"] = sample.start if start is None else start
    if routing is not None and start is not None and start > sample.start:
        routing = msgspec.structs.replace(routing, array=routing.array[start - sample.start :], start=start)
    if routing is None or not len(routing.array):
        if named:
            meta["routed_experts"] = ""
        return
    meta["routed_experts"] = MARK
    parts.append(rows.sglang(routing, front.num_hidden_layers))


def _finish(asked: _Asked, sample: Sample) -> dict[str, Any]:
    reason = sample.finish_reason
    if reason == "stop":
        matched: int | str | None = sample.stop_token_id
        return {"type": "stop", "matched": matched}
    if reason == "length":
        return {"type": "length", "length": 0 if asked.scores_only else asked.params.max_tokens}
    words = "the deadline passed" if reason == "deadline" else "aborted"
    if not sample.token_ids:
        # AReaL reads these words: a sample that has no log-probs
        return {"type": "abort", "message": f"Abort before prefill: {words}"}
    return {"type": "abort", "message": words}
