"""Parts of answers that completions and chats share: usage, finish reasons, rows, and SGLang's `meta_info`.

Called by `completions.py`, `chat.py` and `chat_stream.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http import rows
from fdasync_http.openai.logprobs import values_of
from fdasync_http.parts import MARK, assembled
from fdasync_http.replies import Part, event_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from fdasync import Result, Sample
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked


def head_of(front: Front, request_id: str, kind: str) -> dict[str, Any]:
    """The fields that every answer and every event begins with."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": front.model}


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of all prompts together."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in results)},
    }


def finish_of(sample: Sample, *, calls_tools: bool = False) -> str:
    """OpenAI's word for how a sample ended; its clients know no deadline."""
    if sample.finish_reason == "deadline":
        return "abort"
    return "tool_calls" if calls_tools and sample.finish_reason == "stop" else sample.finish_reason


def version_of(front: Front, result: Result) -> str:
    """The weights that the last token was sampled with."""
    spans = [span for sample in result.samples for span in sample.weight_version]
    return spans[-1].version if spans else front.generator.facts().weight_version


def put_extras(
    front: Front, asked: Asked, result: Result, sample: Sample, choice: dict[str, Any], parts: list[Part]
) -> None:
    """Add what SGLang's and vLLM's clients ask for beside OpenAI's fields; only a finished choice has it."""
    meta = _meta(front, asked, result, sample) if asked.body.return_meta_info else None
    if meta is not None:
        choice["meta_info"] = meta
    if asked.rows == "none":
        return
    # SGLang's clients read rows in `meta_info`
    place = choice if meta is None else meta
    routing = sample.routing
    if asked.rows == "sglang":
        place["routed_experts_start_len"] = sample.start
    if routing is None or not len(routing.array):
        # no rows, no key; a client that names a start itself reads an empty text (Miles' session merge)
        if asked.rows == "sglang" and asked.body.routed_experts_start_len is not None:
            place["routed_experts"] = ""
    elif asked.rows == "sglang":
        place["routed_experts"] = MARK
        parts.append(rows.sglang(routing, front.num_hidden_layers))
    elif front.config.rows == "prime_rl":
        payload, part = rows.packed(routing, front.num_hidden_layers, ("uint8", "uint16"))
        place["routed_experts"] = {**payload, "start": routing.start}
        parts.append(part)
    else:
        place["routed_experts"] = MARK
        parts.append(rows.npy(routing, front.num_hidden_layers))


def _meta(front: Front, asked: Asked, result: Result, sample: Sample) -> dict[str, Any]:
    """SGLang's `meta_info`, as `/generate` has it."""
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
    values = values_of(sample)
    if values is not None:
        meta["output_token_logprobs"] = [
            (value, token, None) for value, token in zip(values, sample.token_ids, strict=True)
        ]
    if sample.top_logprobs is not None and asked.params.top_logprobs:
        meta["output_top_logprobs"] = [
            top and [(value, token, None) for token, value in zip(top.token_ids, top.logprobs, strict=True)]
            for top in sample.top_logprobs
        ]
    return meta


def _finish(asked: Asked, sample: Sample) -> dict[str, Any]:
    if sample.finish_reason == "stop":
        return {"type": "stop", "matched": sample.stop_token_id}
    if sample.finish_reason == "length":
        return {"type": "length", "length": asked.params.max_tokens}
    words = "the deadline passed" if sample.finish_reason == "deadline" else "aborted"
    return {"type": "abort", "message": words if sample.token_ids else f"Abort before prefill: {words}"}


async def event_with(payload: dict[str, Any], parts: list[Part]) -> AsyncIterator[bytes]:
    """One event, whose parts are made while it is sent."""
    if not parts:
        yield event_of(msgspec.json.encode(payload))
        return
    yield b"data: "
    for piece in assembled(payload, parts):
        if isinstance(piece, Part):
            async for some in piece.pieces():
                yield some
        else:
            yield piece
    yield b"\n\n"
