"""One line for each answer, in the logger `fdasync.http.access`: client, method, path, status, seconds and bytes.

    2026-03-01T12:00:00.123Z INFO fdasync.http.access: 127.0.0.1 POST /v1/chat/completions 200 1.234 s 5120 bytes

Bodies, queries and headers never appear: they may hold prompts and keys. Wraps the app outermost, so that what was
refused has a line as well; a request costs nothing while the logger is off. Called by `application.py`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = "fdasync.http.access"
# of a client's path: a line stays one
_MAX_PATH_CHARS = 200


class AccessLog:
    """See the module."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner
        self._logger = logging.getLogger(LOGGER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._logger.isEnabledFor(logging.INFO):
            await self._inner(scope, receive, send)
            return
        began, status, nbytes, whole = time.monotonic(), 0, 0, False

        async def counted(message: Message) -> None:
            nonlocal status, nbytes, whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                nbytes += len(message.get("body", b""))
                whole = not message.get("more_body", False)

        try:
            await self._inner(scope, receive, counted)
        finally:
            client, path = (scope.get("client") or ("-",))[0], scope["path"]
            seconds = time.monotonic() - began
            fields = {
                "client": client, "method": scope["method"], "path": path[:_MAX_PATH_CHARS], "status": status,
                "seconds": round(seconds, 6), "nbytes": nbytes, "whole": whole,
            }  # fmt: skip
            words = "%s %s %s %d %.3f s %d bytes%s"
            shown = path[:_MAX_PATH_CHARS].encode("unicode_escape").decode()
            cut = "" if whole else ", cut short"
            self._logger.info(
                words, client, scope["method"], shown, status, seconds, nbytes, cut, extra={"fields": fields}
            )
