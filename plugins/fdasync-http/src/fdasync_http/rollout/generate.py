"""`POST /v1/rollout`: a prompt in; token ids, log-probs and rows of each sample out, in their own dtypes.

One sample is one safetensors file. Several are files one behind the other, each with its length before it as a
little-endian u64. No base64, no JSON of numbers. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import SamplingParams
from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused
from fdasync_http.replies import Part, Parts, whole
from fdasync_http.rollout.tensors import sample_file

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync.request import GenerateOptions
    from fdasync_http.front import Front

ONE = "application/vnd.fdasync.rollout+safetensors"
MANY = "application/vnd.fdasync.rollouts"


class RolloutBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of `/v1/rollout`.

    Attributes:
        token_ids, text: the prompt; one of the two.
        sampling: fields of `fdasync.SamplingParams`.
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
    """`POST /v1/rollout`."""
    body = await read_json(request, RolloutBody, front.config)
    if (body.token_ids is None) == (body.text is None):
        raise Refused(400, "one of token_ids and text is needed", param="token_ids")
    params = SamplingParams.from_mapping({"logprobs": "raw", **body.sampling})
    return await whole(request, _answer(front, body, params))


async def _answer(front: Front, body: RolloutBody, params: SamplingParams) -> Response:
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
    with front.place():
        result = await front.generator.complete(prompt, params, **options)
    files = [sample_file(result, sample, front.model) for sample in result.samples]
    if params.n == 1:
        return Parts(files[0], ONE)
    body_parts: list[bytes | Part] = []
    for file in files:
        nbytes = sum(part.nbytes if isinstance(part, Part) else len(part) for part in file)
        body_parts += [nbytes.to_bytes(8, "little"), *file]
    return Parts(body_parts, MANY)
