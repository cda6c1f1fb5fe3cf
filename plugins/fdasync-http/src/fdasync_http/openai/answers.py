"""Parts of answers that completions and chats share: usage, finish reasons, rows.

Called by `completions.py`, `chat.py`, `chat_stream.py` and `translated/answers.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync_http import rows
from fdasync_http.parts import MARK
from fdasync_http.prompt_scores import prompt_logprobs_of
from fdasync_http.sglang.meta import meta_of, put_chosen, put_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync import Result, Sample
    from fdasync_http.front import Front
    from fdasync_http.openai.asked import Asked
    from fdasync_http.openai.logprobs import TokenNames
    from fdasync_http.replies import Part


def head_of(front: Front, request_id: str, kind: str, model: str = "") -> dict[str, Any]:
    """The fields that every answer and every event begins with.

    Args:
        model: its name as the client asked for it; "": it named none.
    """
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model or front.model}


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


class Spent(NamedTuple):
    """What a request took up to the end of a sample.

    Attributes:
        prompt_tokens: of its prompt.
        total_s: seconds since the call.
    """

    prompt_tokens: int
    total_s: float

    @classmethod
    def of(cls, result: Result) -> Spent:
        """What a whole request took."""
        return cls(len(result.prompt_token_ids), result.total_s)


def put_extras(
    front: Front,
    asked: Asked,
    sample: Sample,
    choice: dict[str, Any],
    parts: list[Part],
    spent: Spent,
) -> None:
    """Add what SGLang's and vLLM's clients read beside OpenAI's fields; only a finished choice has it."""
    # SGLang's name of it, and vLLM's
    choice["matched_stop"] = choice["stop_reason"] = sample.stop_reason
    # SGLang's clients read rows in `meta_info`
    place = choice
    if asked.body.return_meta_info:
        place = choice["meta_info"] = meta_of(
            sample,
            request_id=asked.request_id,
            prompt_tokens=spent.prompt_tokens,
            version=front.generator.facts().weight_version,
            max_tokens=0 if asked.scores_only else asked.params.max_tokens,
            total_s=spent.total_s,
        )
    put_chosen(sample, place, parts)
    routing = sample.routing
    if asked.rows == "sglang":
        put_rows(sample, asked.body.routed_experts_start_len, place, parts, front.num_hidden_layers)
    elif asked.rows == "none" or routing is None or not len(routing.array) or rows.ended_in_prompt(sample):
        # no rows, no key
        return
    elif front.config.rows == "prime_rl":
        payload, part = rows.packed(routing, front.num_hidden_layers, ("uint8", "uint16"))
        place["routed_experts"] = {**payload, "start": routing.start}
        parts.append(part)
    else:
        place["routed_experts"] = MARK
        parts.append(rows.npy(routing, front.num_hidden_layers))


async def prompt_scores_of(asked: Asked, result: Result, names: TokenNames) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, if the body asks for them."""
    top = asked.body.prompt_logprobs
    if top is None:
        return {}
    return {"prompt_logprobs": await prompt_logprobs_of(result, top=top, name_of=names.text)}
