"""Log-probs of a prompt's own tokens in vLLM's form, and results without the token that scoring costs. Pure.

The engine samples at least one token for every request (`SamplingParams.max_tokens`). A client that asks for none, and
so for the prompt's log-probs alone, gets the answer without it. Called by the rooms of paths.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync import Result, Sample, TopLogprobs

#: of a prompt, that become JSON's values at a time
SLICE_TOKENS = 512
# vLLM's word for a log-prob that was lost; JSON has no -inf
_LOST = -9999.0


def finite(value: float) -> float:
    """A log-prob as JSON can have it."""
    # numpy's own float is none of JSON's
    return float(value) if value > _LOST else _LOST


async def prompt_logprobs_of(
    result: Result, *, top: int, name_of: Callable[[int], str] | None = None
) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt `{"<id>": {"logprob", "rank", "decoded_token"}}`, the token itself first, as vLLM
    has it (prime-rl reads the first entry), then the alternatives; None for the first token, which has none. None: no
    log-probs were asked for. Other requests run in between: a prompt may be long.

    Args:
        top: how many alternatives each has.
        name_of: text of a token; None: the field is null.
    """
    if result.prompt_logprobs is None:
        return None
    tops = result.prompt_top_logprobs or (None,) * len(result.prompt_logprobs)
    # of a request that was aborted, a part is scored
    scored = list(zip(result.prompt_token_ids, result.prompt_logprobs.tolist(), tops, strict=False))
    told: list[dict[str, Any] | None] = []
    for first in range(0, len(scored), SLICE_TOKENS):
        told += [
            None if value != value else _entry(token, value, best, top, name_of)
            for token, value, best in scored[first : first + SLICE_TOKENS]
        ]
        await asyncio.sleep(0)
    return told


def _entry(
    token: int, value: float, best: TopLogprobs | None, top: int, name_of: Callable[[int], str] | None
) -> dict[str, Any]:
    ranked = [] if best is None else list(zip(best.token_ids, best.logprobs, strict=True))
    rank = next((rank for rank, (other, _) in enumerate(ranked, 1) if other == token), None)
    told = {str(token): {"logprob": finite(value), "rank": rank, "decoded_token": name_of and name_of(token)}}
    for number, (other, one) in enumerate(ranked[:top], 1):
        told.setdefault(
            str(other), {"logprob": finite(one), "rank": number, "decoded_token": name_of and name_of(other)}
        )
    return told


def without_output(result: Result) -> Result:
    """A result whose one token was asked of the engine, and not by the client."""
    samples = tuple([_without_output(result, sample) for sample in result.samples])
    return msgspec.structs.replace(result, samples=samples)


def _without_output(result: Result, sample: Sample) -> Sample:
    routing = sample.routing
    if routing is not None:
        rows = max(len(result.prompt_token_ids) - 1 - sample.start, 0)
        routing = msgspec.structs.replace(routing, array=routing.array[:rows])
    chosen = sample.chosen_positions
    if chosen is not None:
        own = chosen.array[: max(len(result.prompt_token_ids) - 1 - chosen.start, 0)]
        chosen = msgspec.structs.replace(chosen, array=own)
    empty = {
        name: None if values is None else values[:0]
        for name, values in (("raw_logprobs", sample.raw_logprobs), ("processed_logprobs", sample.processed_logprobs))
    }
    return msgspec.structs.replace(
        sample, token_ids=(), text="", top_logprobs=None if sample.top_logprobs is None else (), routing=routing,
        chosen_positions=chosen, weight_version=(), stop_token_id=None, stop_string="",
        finish_reason="length" if sample.finish_reason == "stop" else sample.finish_reason, **empty,
    )  # fmt: skip
