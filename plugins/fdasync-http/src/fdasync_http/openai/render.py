"""`POST /v1/chat/completions/render`: a chat as the body of `/inference/v1/generate` that would answer it.

vLLM's: its `ServingRender.render_chat_request` (vllm/entrypoints/scale_out/render/serving.py, as of v0.32) answers with
its own `GenerateRequest`. vime sends that to `/inference/v1/generate` as it comes, SkyRL and routers read `token_ids`.
Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused
from fdasync_http.grammars import field_of
from fdasync_http.openai.chat import prepared
from fdasync_http.openai.types import ChatBody
from fdasync_http.sglang.control import reply

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Grammar
    from fdasync_http.front import Front

# vLLM's word for the kind of a grammar
_KINDS = {"json_schema": "json", "regex": "regex", "gbnf": "grammar"}


async def render(request: Request, front: Front) -> Response:
    """`POST /v1/chat/completions/render`."""
    body = await read_json(request, ChatBody, front.config)
    asked = prepared(front, body).asked
    return reply(
        {
            "request_id": asked.request_id,
            "token_ids": asked.prompt,
            "features": None,
            "sampling_params": _sampling_of(body, asked.params.max_tokens, asked.params.grammar),
            "model": body.model or None,
            "stream": body.stream,
            "stream_options": msgspec.to_builtins(body.stream_options) if body.stream else None,
            "cache_salt": asked.options["cache_salt"] or None,
            # as vLLM counts them, whatever the dialect
            "priority": -asked.options["priority"],
        }
    )


def _sampling_of(body: ChatBody, max_tokens: int, grammar: Grammar | None) -> dict[str, Any]:
    """vLLM's `sampling_params`. Raises Refused (400)."""
    sampling = {
        "n": body.n,
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in body.logit_bias.items()} or None,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "logprobs": body.top_logprobs if body.logprobs else None,
        "prompt_logprobs": body.prompt_logprobs,
        "include_stop_str_in_output": body.include_stop_str_in_output or body.no_stop_trim,
        "skip_special_tokens": body.skip_special_tokens,
        "structured_outputs": _outputs_of(body, grammar),
    }
    if body.routed_experts_prompt_start is not None:
        sampling["routed_experts_prompt_start"] = body.routed_experts_prompt_start
    return sampling


def _outputs_of(body: ChatBody, grammar: Grammar | None) -> dict[str, Any] | None:
    """vLLM's `structured_outputs`."""
    if grammar is None:
        return None
    if grammar.kind in _KINDS:
        return {_KINDS[grammar.kind]: grammar.text}
    choice = body.guided_choice or (body.structured_outputs or {}).get("choice")
    if choice is None:
        field = field_of(body) or "tool_choice"
        words = f"{field}: calls are forced by a grammar that sampling_params have no word for"
        raise Refused(400, words, param=field, code="not_served")
    return {"choice": choice}
