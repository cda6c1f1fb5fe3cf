"""Errors in Anthropic's form, `{"type": "error", "error": {"type", "message", "details"}}`, whoever refuses.

A missing key, a method that is not there and a body that is too large are refused before the path is called, so the
answers of these paths are read where they leave the app. Plain ASGI. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync_http.failures import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
    429: "rate_limit_error", 501: "invalid_request_error", 503: "overloaded_error",
}  # fmt: skip


class MessagesErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong.

    Attributes:
        type: Anthropic's word for the status.
        message: what is wrong, the limit and the way out; it names the field that is wrong.
        details: `error_code` is a word for programs.
    """

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesError(msgspec.Struct, frozen=True):
    """The body of every error of `/v1/messages`.

    Attributes:
        error: what went wrong.
        type: the one kind there is.
    """

    error: MessagesErrorInfo
    type: str = "error"


def error_of(status: int, message: str, code: str | int | None) -> MessagesError:
    """An error in Anthropic's form. `code`: a word for programs, if there is one."""
    details = {"error_code": str(code)} if code else None
    return MessagesError(MessagesErrorInfo(_TYPES.get(status, "api_error"), message, details))


class Envelopes:
    """Puts the errors of `paths` into Anthropic's form.

    Args:
        inner: the whole app, whose errors are each sent in one piece.
    """

    def __init__(self, inner: ASGIApp, paths: Collection[str]) -> None:
        self._inner = inner
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if path not in self._paths:
            await self._inner(scope, receive, send)
            return
        held: list[Message] = []

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held.append(message)
                return
            if held:
                start = held.pop()
                if not message.get("body"):
                    # to a client that went away
                    await send(start)
                    await send(message)
                    return
                error = msgspec.json.decode(message["body"], type=ErrorBody).error
                body = msgspec.json.encode(error_of(start["status"], error.message, error.code))
                length = (b"content-length", str(len(body)).encode())
                headers = [length if name == b"content-length" else (name, value) for name, value in start["headers"]]
                await send({**start, "headers": headers})
                message = {**message, "body": body}
            await send(message)

        await self._inner(scope, receive, told)
