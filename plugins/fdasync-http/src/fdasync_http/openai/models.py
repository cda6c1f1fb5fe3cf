"""`GET /v1/models` and `/v1/models/{id}`. Called by `application.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fdasync_http.calls import reply
from fdasync_http.openai.asked import no_model

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

_STARTED = int(time.time())


async def models(_request: Request, front: Front) -> Response:
    """`GET /v1/models`: the model that is served."""
    return reply({"object": "list", "data": [_card(front)]})


async def model(request: Request, front: Front) -> Response:
    """`GET /v1/models/{id}`: the same, by its name. Raises Refused (404)."""
    name = request.path_params["model"]
    if name != front.model:
        raise no_model(front, name)
    return reply(_card(front))


def _card(front: Front) -> dict[str, Any]:
    facts = front.generator.facts()
    return {
        "id": front.model,
        "object": "model",
        "created": _STARTED,
        # gateways tell by it whose paths a server has
        "owned_by": front.config.dialect,
        "root": facts.model_path or front.model,
        "parent": None,
        "max_model_len": facts.max_context_tokens,
    }
