"""The app: every path of every dialect over one generator.

    from fdasync_http import app
    service = app(engine)                      # or a router; the embedder starts and closes it
    Starlette(routes=[Mount("/llm", service)])

A path is a coroutine `(request, front) -> response`, listed in the table of its dialect. Paths that control the engine
stand in tables of their own, because they may need another key. Called by embedders and `server.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fdasync_http.access import NeedsKey
from fdasync_http.access_log import AccessLog
from fdasync_http.anthropic.envelope import Envelopes
from fdasync_http.anthropic.serve import PATHS as MESSAGES
from fdasync_http.budget import BUDGET
from fdasync_http.config import HttpConfig
from fdasync_http.contract import HTML, Path
from fdasync_http.docs_page import HEADERS, page
from fdasync_http.failures import JSON, Refused, answer, on_error
from fdasync_http.fields import IGNORED
from fdasync_http.front import Front
from fdasync_http.known import check_query
from fdasync_http.openapi import description
from fdasync_http.paths import CONTROL, USE
from fdasync_http.tracing import Traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Tracer
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from fdasync import Generator
    from fdasync.engine.tokenizer import Tokenizer

_PAGE = "/"


def app(
    generator: Generator,
    config: HttpConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    is_draining: Callable[[], bool] = lambda: False,
    tracer: Tracer | None = None,
) -> ASGIApp:
    """An ASGI app over an engine or a router.

    Args:
        generator: has been started before the first request comes, and is closed by its owner.
        config: settings.
        tokenizer: for text as clients ask for it, and for chats; None: the generator's own, if it has one.
        is_draining: whether the owner is about to end: requests that generate are then refused with 503, and `/ready`
            is 503.
        tracer: OpenTelemetry's, makes a span of each request; None: callers' spans are handed on to engines.

    Raises ConfigError.
    """
    config = config or HttpConfig()
    front = Front(generator, config, tokenizer or getattr(generator, "tokenizer", None), is_draining)
    use = (config.api_key,) if config.api_key else ()
    control = (config.admin_key,) if config.admin_key else use
    routes = [_route(path, front, use, (), tracer) for path in (*USE, *_own_paths())]
    routes += [_route(path, front, control, use, tracer) for path in CONTROL]
    inner = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _on_http_error, Exception: on_error},
    )
    # paths that are not there ask for a key as well; the page, which has no data, asks its reader for one
    keyed = NeedsKey(inner, tuple(dict.fromkeys([*use, *control])), opens=_PAGE)
    return AccessLog(Envelopes(keyed, MESSAGES))


def _route(path: Path, front: Front, keys: tuple[str, ...], known: tuple[str, ...], tracer: Tracer | None) -> Route:
    opened = () if path.path == _PAGE else keys
    return Route(
        path.path,
        NeedsKey(Traced(_Endpoint(path, front), path.path, tracer), opened, known),
        methods=list(path.methods),
    )


def _own_paths() -> tuple[Path, ...]:
    """Paths that tell what the app is; both are made once, since any client may ask for them often."""

    async def openapi(_request: Request, _front: Front) -> Response:
        """`GET /openapi.json`: this description."""
        return Response(described, media_type=JSON)

    async def docs(_request: Request, _front: Front) -> Response:
        """`GET /docs`: this description as a page that loads nothing from other hosts."""
        return Response(shown, headers=HEADERS, media_type=HTML)

    own = (Path("/openapi.json", ("GET",), openapi, needs_engine=False),
           Path("/docs", ("GET",), docs, media=(HTML,), needs_engine=False))  # fmt: skip
    told = description([*USE, *own], CONTROL)
    described, shown = msgspec.json.encode(told), page(told)
    return own


class _Endpoint:
    """Calls a path's function, answers its errors, and counts the answers."""

    def __init__(self, path: Path, front: Front) -> None:
        self._path = path
        self._front = front
        self._query = path.keys
        self._ignore = partial(front.ignore, path.path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._front.answers[self._path.path, message["status"]] += 1
            await send(message)

        request = Request({**scope, BUDGET: self._front.bodies, IGNORED: self._ignore}, receive, counted)
        try:
            if self._query is not None:
                check_query(request.query_params.keys(), self._query)
            response = await self._path.serve(request, self._front)
        except Exception as error:
            response = await on_error(request, error)
        await response(scope, receive, counted)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: f"there is no path {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
    response = answer(Refused(error.status_code, words.get(error.status_code, error.detail)))
    # 405 names the methods that there are
    response.headers.update(error.headers or {})
    return response
