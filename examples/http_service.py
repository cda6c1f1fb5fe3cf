"""For embedders: an application of one's own with fdasync's HTTP paths mounted in it.

    python examples/http_service.py [CHECKPOINT]

Serves `/hello` of its own and everything of `fdasync_http` under `/llm`, in one process with the engine. Errors of the
engine become statuses by the table below, in paths of one's own too. Without CHECKPOINT it serves the synthetic runner.
Plays one request against itself and ends; `serve()` would run on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import TYPE_CHECKING

from fdasync_http import HttpConfig, app
from fdasync_http.server import Listen, serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import BadInput, EngineClosed, EngineFailed, TransientError

if TYPE_CHECKING:
    from starlette.requests import Request

# what a caller of the application is told; the first class that fits counts
STATUSES = ((BadInput, 400), (TransientError, 503), (EngineClosed, 503), (EngineFailed, 500))
KEY = "sk-change-me-please-0"


async def on_error(_request: Request, error: Exception) -> Response:
    status = next(status for kind, status in STATUSES if isinstance(error, kind))
    return JSONResponse({"error": str(error)}, status)


def service(engine: Engine) -> Starlette:
    """The application: a path of its own beside the engine's."""

    async def hello(request: Request) -> Response:
        count = int(request.query_params.get("tokens", "4"))
        result = await engine.complete([1, 2, 3], SamplingParams(max_tokens=count, temperature=0.0))
        return JSONResponse({"tokens": result.token_ids})

    return Starlette(
        routes=[Route("/hello", hello), Mount("/llm", app(engine, HttpConfig(api_key=KEY)))],
        exception_handlers={kind: on_error for kind, _ in STATUSES},  # type: ignore[misc]  # handlers by kind of error
    )


def call(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """What any HTTP client does."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return dict(json.load(answer))


async def main(model: str) -> None:
    config = EngineConfig(model=model) if model else EngineConfig(runner="synthetic")
    async with Engine(config) as engine, serving(service(engine), Listen(port=0)) as served:
        hello = await asyncio.to_thread(call, f"{served.url}/hello?tokens=3")
        print(f"/hello: {hello}")
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 3, "temperature": 0},
            "return_logprob": True,
            "return_routed_experts": True,
        }
        answer = await asyncio.to_thread(call, f"{served.url}/llm/generate", body)
        meta = answer["meta_info"]
        assert isinstance(meta, dict)
        print(f"/llm/generate: {answer['output_ids']}, {len(meta['routed_experts'])} characters of rows")
        assert answer["output_ids"] == hello["tokens"]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
