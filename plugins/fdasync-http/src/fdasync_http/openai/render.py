"""`POST /v1/chat/completions/render`: a chat as the body of `/inference/v1/generate` that would answer it.

vLLM's: its `ServingRender.render_chat_request` (vllm/entrypoints/scale_out/render/serving.py, as of v0.32) answers with
its own `GenerateRequest`. vime sends that to `/inference/v1/generate` as it comes, SkyRL and routers read `token_ids`.
Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.bodies import read_json
from fdasync_http.calls import reply
from fdasync_http.failures import unserved
from fdasync_http.grammars import field_of
from fdasync_http.openai.asked import asks_for_stops
from fdasync_http.openai.chat import prepared
from fdasync_http.openai.types import ChatBody
from fdasync_http.sampling import texts_of
from fdasync_http.vllm.sampling import Sampling

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync import Grammar
    from fdasync_http.front import Front

# vLLM's word for the kind of a grammar
_KINDS = {"json_schema": "json", "regex": "regex", "gbnf": "grammar"}


async def render(request: Request, front: Front) -> Response:
    """`POST /v1/chat/completions/render`: a chat as the body of /inference/v1/generate that would answer it: vLLM's."""
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
    same = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    if body.routed_experts_prompt_start is None:
        del same["routed_experts_prompt_start"]
    return {
        **same,
        "max_tokens": max_tokens,
        "logit_bias": body.logit_bias or None,
        "stop": texts_of(body.stop),
        "logprobs": body.top_logprobs if body.logprobs else None,
        "include_stop_str_in_output": asks_for_stops(body),
        "structured_outputs": _outputs_of(body, grammar),
    }


def _outputs_of(body: ChatBody, grammar: Grammar | None) -> dict[str, Any] | None:
    """vLLM's `structured_outputs`."""
    if grammar is None:
        return None
    if grammar.kind in _KINDS:
        return {_KINDS[grammar.kind]: grammar.text}
    choice = body.guided_choice or (body.structured_outputs or {}).get("choice")
    if choice is None:
        field = field_of(body) or "tool_choice"
        raise unserved(field, "calls are forced by a grammar that sampling_params have no word for")
    return {"choice": choice}
