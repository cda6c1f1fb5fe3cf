"""`POST /v1/rollout`: a prompt in; token ids, log-probs and rows of each sample out, in their own dtypes.

One sample is one safetensors file. Several are files one behind the other, each with its length before it as a
little-endian u64, and each is sent when its sample ends. No base64, no JSON of numbers. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import Sample, SamplingParams
from fdasync_http.bodies import read_json
from fdasync_http.client_names import Names
from fdasync_http.failures import Refused
from fdasync_http.replies import Part, Parts, Streamed, whole
from fdasync_http.rollout.tensors import sample_file
from fdasync_http.streams import read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync.request import GenerateOptions
    from fdasync_http.client_names import Table
    from fdasync_http.front import Front

ONE = "application/vnd.fdasync.rollout+safetensors"
MANY = "application/vnd.fdasync.rollouts"


# by the engine's field: the body's fields that ask for it
_FIELDS: Table = {
    **{name: (f"sampling.{name}",) for name in SamplingParams.__struct_fields__},
    "params": ("sampling",),
    "prompt": ("text", "token_ids"),
}


class RolloutBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/v1/rollout`.

    Attributes:
        token_ids, text: the prompt; one of the two.
        sampling: fields of `fdasync.SamplingParams`; null is the default.
        request_id, priority, deadline_s, routing, aux, start, cache_salt: as in `fdasync.GenerateOptions`.
    """

    token_ids: list[int] | None = None
    text: str | None = None
    sampling: dict[str, Any] = {}
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    routing: bool | None = None
    aux: bool | list[str] | None = None
    start: int = 0
    cache_salt: str = ""


async def rollout(request: Request, front: Front) -> Response:
    """`POST /v1/rollout`: a prompt in; for each sample a file of token ids, log-probs and expert rows out."""
    body = await read_json(request, RolloutBody, front.config)
    if (body.token_ids is None) == (body.text is None):
        raise Refused(400, "one of token_ids and text is needed", param="token_ids")
    with _names(body, within="sampling.").told_to_client():
        told = {name: value for name, value in body.sampling.items() if value is not None}
        params = SamplingParams.from_mapping({"logprobs": "raw", **told})
    if params.n > 1:
        return Streamed(_files(front, body, params), MANY)
    return await whole(request, _answer(front, body, params))


def _names(body: RolloutBody, *, within: str = "") -> Names:
    return Names(_FIELDS, body, lambda: "sampling.grammar", within=within)


def _asked_of(body: RolloutBody) -> tuple[str | list[int], GenerateOptions]:
    options: GenerateOptions = {
        "request_id": body.request_id,
        "priority": body.priority,
        "deadline_s": body.deadline_s,
        "routing": body.routing,
        "aux": body.aux,
        "start": body.start,
        "cache_salt": body.cache_salt,
    }
    prompt = body.token_ids if body.text is None else body.text
    assert prompt is not None
    return prompt, options


async def _answer(front: Front, body: RolloutBody, params: SamplingParams) -> Response:
    prompt, options = _asked_of(body)
    with front.place(), _names(body).told_to_client():
        result = await front.complete(prompt, params, **options)
    told = {"request_id": result.request_id, "model": front.model}
    return Parts(sample_file(result.samples[0], result.prompt_token_ids, **told), ONE)


async def _files(front: Front, body: RolloutBody, params: SamplingParams) -> AsyncIterator[bytes]:
    """The files of all samples, in the order in which they end."""
    prompt, options = _asked_of(body)
    with front.place(), _names(body).told_to_client():
        async with front.generate(prompt, params, **options) as stream:

            def pieces_of(sample: Sample) -> AsyncIterator[bytes]:
                told = {"request_id": stream.request_id, "model": front.model}
                return _pieces_of(sample_file(sample, stream.prompt_token_ids, **told))

            # chosen positions are copied at the end of the request
            async for item in read(stream, at_end=params.chosen_positions_start is not None):
                if isinstance(item, Sample):
                    async for piece in pieces_of(item):
                        yield piece


async def _pieces_of(file: list[bytes | Part]) -> AsyncIterator[bytes]:
    """A file behind its length."""
    nbytes = sum(part.nbytes if isinstance(part, Part) else len(part) for part in file)
    yield nbytes.to_bytes(8, "little")
    for part in file:
        if isinstance(part, Part):
            async for piece in part.pieces():
                yield piece
        else:
            yield part
