"""`GET /v1/sight`, what there is to see, and `GET /`, a page that shows it to people.

The page is one file that loads nothing but `/v1/sight`; it has no data in itself, so it needs no key, and asks its
reader for the key that `/v1/sight` asks for. Called by `application.py`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from fdasync.errors import BadInput
from fdasync.telemetry.sight.summary import summary_of
from fdasync_http.failures import JSON

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.front import Front

_PAGE = (Path(__file__).parent / "page.html").read_bytes()
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_LEAST_S, _MOST_S = 5.0, 600.0


def _policy(page: bytes) -> str:
    """What a browser lets the page do: run its own script and style, known by their hashes, and ask its own host."""
    hashes = {
        tag: f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)) is not None
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "content-security-policy": _policy(_PAGE),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(_request: Request, _front: Front) -> Response:
    """`GET /`: a page that shows what engines do, the experts they chose, and what is wrong."""
    return Response(_PAGE, headers=HEADERS, media_type="text/html; charset=utf-8")


async def sight(request: Request, front: Front) -> Response:
    """`GET /v1/sight`: what all engines do, in rates and latencies of the last seconds, as `fdasync top --json`."""
    query = request.query_params
    watched = await front.generator.watch()
    told = summary_of(
        watched,
        model=front.model,
        window_s=_seconds(query.get("window_s", "60")),
        history=_flag("history", query.get("history", "true")),
        experts=_flag("experts", query.get("experts", "true")),
    )
    return Response(msgspec.json.encode(told), media_type=JSON, headers={"cache-control": "no-store"})


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise BadInput("window_s", f"{given!r:.100} is out of range", limit=f"{_LEAST_S:g} to {_MOST_S:g} seconds")
    return seconds


def _flag(name: str, given: str) -> bool:
    flag = _FLAGS.get(given.lower())
    if flag is None:
        raise BadInput(name, f"{given!r:.100} is no flag", limit="true or false")
    return flag
