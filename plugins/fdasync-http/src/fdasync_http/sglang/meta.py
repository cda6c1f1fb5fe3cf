"""SGLang's `meta_info`: what its clients read of a sample beside text and ids.

`/generate` puts it into every answer, OpenAI's paths where a body asks for it. Knows no request and no stream. Called
by `generate.py` and `openai/answers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http import rows
from fdasync_http.parts import MARK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync import DraftCounts, Result, Sample, TopLogprobs
    from fdasync_http.openai.logprobs import TokenNames
    from fdasync_http.replies import Part

#: log-prob, token id, and the token's text where it was asked for
Entry = tuple[float | None, int, str | None]


def meta_of(
    sample: Sample,
    *,
    request_id: str,
    prompt_tokens: int,
    version: str,
    max_tokens: int,
    total_s: float,
    names: TokenNames | None = None,
) -> dict[str, Any]:
    """The fields of a sample that has ended, with its log-probs if it has some.

    Args:
        version: label of the weights in use, for a sample without tokens.
        max_tokens: most tokens that the client asked for.
        total_s: seconds that the request took.
        names: give log-probs the text of their tokens; None: they have none.
    """
    spans = sample.weight_version
    meta: dict[str, Any] = {
        "id": request_id,
        "finish_reason": finish_of(sample, max_tokens),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": sample.cached_tokens,
        "weight_version": spans[-1].version if spans else version,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.stop} for span in spans],
        "e2e_latency": total_s,
    }
    if sample.drafts is not None:
        meta.update(drafts_of(sample.drafts))
    if sample.logprobs is not None:
        meta["output_token_logprobs"] = logprobs_of(sample.logprobs.tolist(), sample.token_ids, names)
    if sample.top_logprobs is not None:
        meta["output_top_logprobs"] = [top_of(top, names) for top in sample.top_logprobs]
    return meta


def drafts_of(drafts: DraftCounts) -> dict[str, int]:
    """Counts of speculative decoding: slime, verl and older Miles read the first names, newer Miles the last two."""
    return {
        "spec_verify_ct": drafts.steps,
        "spec_accept_token_num": drafts.accepted,
        "spec_draft_token_num": drafts.drafted,
        "spec_num_correct_drafts": drafts.accepted,
        "spec_num_proposed_drafts": drafts.drafted,
    }


def finish_of(sample: Sample, max_tokens: int) -> dict[str, Any]:
    """How a sample ended. A deadline is an abort: SGLang's clients know no deadline."""
    reason = sample.finish_reason
    if reason == "stop":
        return {"type": "stop", "matched": sample.stop_reason}
    if reason == "length":
        return {"type": "length", "length": max_tokens}
    words = "the deadline passed" if reason == "deadline" else "aborted"
    # AReaL reads the longer words: a sample that has no log-probs
    return {"type": "abort", "message": words if sample.token_ids else f"Abort before prefill: {words}"}


def logprobs_of(
    values: Iterable[float | None], token_ids: Iterable[int], names: TokenNames | None = None
) -> list[Entry]:
    """Log-probs beside their tokens. `names`: see `meta_of`."""
    return [
        (value, token, None if names is None else names.text(token))
        for value, token in zip(values, token_ids, strict=True)
    ]


def top_of(top: TopLogprobs | None, names: TokenNames | None = None) -> list[Entry] | None:
    """The alternatives at one position."""
    return None if top is None else logprobs_of(top.logprobs, top.token_ids, names)


def prompt_meta_of(result: Result, start: int | None, names: TokenNames | None = None) -> dict[str, Any]:
    """Log-probs of the prompt's tokens, if they were asked for; the first token of all has none.

    Args:
        start: position from which they were; None: they were not.
        names: see `meta_of`.
    """
    if result.prompt_logprobs is None or start is None:
        return {}
    values = [None if value != value else value for value in result.prompt_logprobs.tolist()]
    # of a request that was aborted, a part is scored
    tokens = result.prompt_token_ids[start : start + len(values)]
    meta: dict[str, Any] = {"input_token_logprobs": logprobs_of(values, tokens, names)}
    if result.prompt_top_logprobs is not None:
        meta["input_top_logprobs"] = [top_of(top, names) for top in result.prompt_top_logprobs]
    return meta


def first_row(prompt: object, start: int | None) -> int:
    """Position from which rows are asked of the engine, which takes those inside the prompt: a client may name the one
    behind it as well, and `put_rows` leaves the row between out."""
    start = start or 0
    return start - 1 if isinstance(prompt, list) and 0 < start == len(prompt) else start


def put_chosen(sample: Sample, place: dict[str, Any], parts: list[Part]) -> None:
    """Put what indexers chose for a sample's tokens into `place`, with the number of their layers; no rows, no key."""
    chosen = sample.chosen_positions
    if chosen is not None and len(chosen.array) and not rows.ended_in_prompt(sample):
        place["indexer_topk"] = MARK
        place["indexer_topk_num_layers"] = len(chosen.layer_ids)
        parts.append(rows.chosen(chosen))


def put_rows(
    sample: Sample, start: int | None, place: dict[str, Any], parts: list[Part], num_hidden_layers: int
) -> None:
    """Put a sample's rows, and where they begin, into `place`.

    No rows, no key: slime cannot read an empty text. A client that names a start itself reads one (Miles' session merge
    needs it). Rows of a part of a prompt, of a sample that was ended in it, count as none: slime and AReaL make an
    array of as many rows as there are tokens but one.

    Args:
        start: position that the client named for the first row; None: it named none.
    """
    routing = None if rows.ended_in_prompt(sample) else sample.routing
    place["routed_experts_start_len"] = sample.start if start is None else start
    if routing is not None and start is not None and start > sample.start:
        routing = msgspec.structs.replace(routing, array=routing.array[start - sample.start :], start=start)
    if routing is not None and len(routing.array):
        place["routed_experts"] = MARK
        parts.append(rows.sglang(routing, num_hidden_layers))
    elif start is not None:
        place["routed_experts"] = ""
