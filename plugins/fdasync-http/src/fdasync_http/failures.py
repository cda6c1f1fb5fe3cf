"""Errors as answers: every error has a status, and one shape, which the clients of all dialects but one read.

`{"error": {"message", "type", "param", "code"}}` is OpenAI's, which SGLang's `/generate` shares; for the clients of
Anthropic's path `anthropic/envelope.py` puts it into their form. Nothing here ever answers a request that ended:
aborts, deadlines and pauses are results (contracts of slime and Miles: their clients send every failed call again,
sixty times). Called by `application.py` for all paths.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from fdasync.errors import (
    Asleep,
    BadInput,
    DuplicateRequestId,
    EngineBusy,
    EngineClosed,
    FdasyncError,
    GrammarFailed,
    PeerBusy,
    TooLong,
    TransientError,
    UpdateUnderWay,
    WeightsRejected,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

log = logging.getLogger("fdasync.http")

JSON = "application/json"
# seconds after which a client that met a full server may try again
RETRY_AFTER_S = 1
# SGLang's words, by which litellm and agents on top of it know that a conversation must be cut
TOO_LONG = "The request is longer than the model's context length"


class Refused(Exception):
    """A request that is answered with an error before anything was started.

    Attributes:
        status: HTTP status.
        words: what is wrong, the limit and the way out; without the field.
        param: the field that is wrong, as the client named it; "": none.
        code: a word for programs; where vLLM's clients read it, the status.
        retry_after_s: when to try again, in seconds; 0: not at all.
    """

    def __init__(
        self, status: int, words: str, *, param: str = "", code: str | int = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(words)
        self.status = status
        self.words = words
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """What the client is told."""
        return f"{self.param}: {self.words}" if self.param else self.words


def wrong(field: str, words: str) -> Refused:
    """The answer to a field that has not its form."""
    return Refused(400, words, param=field, code="bad_input")


def unserved(field: str, why: str = "", *, code: str = "not_served") -> Refused:
    """The answer to a field that asks for something that is not served."""
    return Refused(400, f"is not served{why and ': '}{why}", param=field, code=code)


class ErrorInfo(msgspec.Struct, frozen=True):
    """See `Refused`.

    Attributes:
        message, type, param, code: OpenAI's fields.
    """

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error.

    Attributes:
        error: what went wrong.
    """

    error: ErrorInfo


_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 411: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 501: "not_supported_error",
    503: "service_unavailable",
}  # fmt: skip


def body_of(refused: Refused) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(refused.status, "server_error")
    return msgspec.json.encode(ErrorBody(ErrorInfo(refused.message, kind, refused.param or None, refused.code or None)))


def answer(refused: Refused) -> Response:
    """The whole answer."""
    headers = {}
    if refused.retry_after_s:
        headers["retry-after"] = str(refused.retry_after_s)
    if refused.status == 501:
        # OpenAI's client repeats every status from 500 on unless it is told
        headers["x-should-retry"] = "false"
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body_of(refused), refused.status, headers, JSON)


def refused_of(error: Exception) -> Refused:
    """What a client is told of an error of the engine."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TooLong):
        return Refused(400, f"{TOO_LONG}: {error.text}", param=error.field, code="context_length_exceeded")
    if isinstance(error, DuplicateRequestId):
        return Refused(409, str(error), code="duplicate_request_id")
    if isinstance(error, UpdateUnderWay):
        return Refused(409, str(error), code="update_under_way", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, Asleep):
        return Refused(409, str(error), code="asleep", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, BadInput):
        return wrong(error.field, error.text)
    if isinstance(error, WeightsRejected):
        return Refused(400, str(error), code="weights_rejected")
    if isinstance(error, GrammarFailed):
        return Refused(400, str(error), code="grammar_failed")
    if isinstance(error, EngineBusy | PeerBusy):
        return Refused(429, str(error), code="overloaded", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, TransientError | EngineClosed):
        return Refused(503, str(error), code=type(error).__name__, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, FdasyncError):
        return Refused(503, str(error), code=type(error).__name__)
    log.error("a defect of the front", exc_info=error)
    return Refused(500, f"a defect of the front: {type(error).__name__}", code="defect")


@contextmanager
def numbered() -> Iterator[None]:
    """Errors have their status as code, which vLLM's models of answers ask for."""
    try:
        yield
    except Exception as error:
        refused = refused_of(error)
        refused.code = refused.status
        raise refused from error


async def on_error(_request: Request, error: Exception) -> Response:
    """Starlette's handler for every error of an endpoint."""
    return answer(refused_of(error))
