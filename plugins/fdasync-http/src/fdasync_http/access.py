"""Keys: every path asks for a key if one is set, and paths that control the engine may ask for another key. Without a
key pages of other sites, which a user's browser shows, are refused.

Plain ASGI, so that nothing of a request is read before its key was. Knows no paths: `application.py` wraps them.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import TYPE_CHECKING

from fdasync_http.failures import Refused, answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class NeedsKey:
    """Lets requests with one of `keys` through to `inner`, and answers others with 401, or 403 for a key of `known`.

    Args:
        keys: keys that open `inner`.
        known: keys that open other paths.
        opens: a path that needs no key; "": there is none.
    """

    def __init__(self, inner: ASGIApp, keys: tuple[str, ...], known: tuple[str, ...] = (), *, opens: str = "") -> None:
        self._inner = inner
        self._keys = tuple([key.encode() for key in keys])
        self._known = tuple([key.encode() for key in known])
        self._opens = opens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys and _is_cross_site(scope):
            why = "a web page of another site asked, and this server has no key: start it with one"
            await answer(Refused(403, why, code="cross_site"))(scope, receive, send)
            return
        if scope["type"] == "http" and self._keys and not self._is_open(scope):
            given = _given(scope)
            if not _is_one_of(given, self._keys):
                if _is_one_of(given, self._known):
                    refused = Refused(403, "this path needs the admin key", code="needs_admin_key")
                else:
                    refused = Refused(
                        401, "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="needs_key"
                    )
                await answer(refused)(scope, receive, send)
                return
        await self._inner(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return bool(self._opens) and path.removeprefix(scope.get("root_path", "")) == self._opens


def _is_cross_site(scope: Scope) -> bool:
    """Browsers say so of every request to a loopback address; pages cannot leave it out (W3C Fetch Metadata)."""
    return (b"sec-fetch-site", b"cross-site") in scope["headers"]


def _given(scope: Scope) -> list[bytes]:
    """The keys of a request: OpenAI's clients send theirs as Authorization, Anthropic's as x-api-key or either."""
    given = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                given.append(key.strip())
        elif name == b"x-api-key":
            given.append(value.strip())
    return given


def _is_one_of(given: list[bytes], keys: tuple[bytes, ...]) -> bool:
    # every key is compared, in a time that does not tell how much of it is right
    return sum([compare_digest(one, key) for one in given for key in keys]) > 0
