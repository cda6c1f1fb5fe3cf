"""Control calls: the type of a path says what its call takes, what is done, and how that is answered.

    class ContinueGeneration(Call):
        async def do(self, front: Front) -> Any:
            await front.generator.resume()
            return {"status": "ok"}

One function serves every such path. Knows no dialect. Called by `paths.py`; the rooms of dialects have the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
from starlette.responses import Response

from fdasync.errors import FdasyncError
from fdasync_http.bodies import decode_query, read_json
from fdasync_http.failures import JSON, Refused, refused_of
from fdasync_http.replies import whole

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.front import Front


def reply(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


class Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """See the module. Fields are the body's; unknown keys are refused: what a client meant by one would not happen.

    Attributes:
        QUERY: fields that the query may have; its words go before the body's.
        STRICT: the query may have no other keys: a misspelt one would mean all that is there.
        BODY: whether a body is read.
        ENDS_WITH_CLIENT: it is cancelled where its client goes away.
    """

    QUERY: ClassVar[tuple[str, ...]] = ()
    STRICT: ClassVar[bool] = True
    BODY: ClassVar[bool] = True
    ENDS_WITH_CLIENT: ClassVar[bool] = False

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        """The call that a client makes. Raises Refused."""
        call = await read_json(request, cls, front.config) if cls.BODY else cls()
        return decode_query(request, call, cls.QUERY) if cls.QUERY else call

    async def do(self, front: Front) -> Any:
        """What is called. Returns what `reply` takes, or a whole answer."""
        # every call has its own; the class of structs does not go with `ABC`
        raise NotImplementedError

    async def answer(self, front: Front) -> Response:
        """The answer."""
        done = await self.do(front)
        return done if isinstance(done, Response) else reply(done)


class Updated(msgspec.Struct, frozen=True):
    """The answer to every update, and to a pull.

    Attributes:
        success: the new weights are in use, or were pulled.
        message: why not, or which they are.
        num_paused_requests: always 0: no request is held back for an update.
    """

    success: bool
    message: str
    num_paused_requests: int = 0


class UpdateCall(Call):
    """A call of SGLang's for weights: where it fails, `success` is false; see `Updated`. `do` returns the message of a
    success; None: which weights these are."""

    async def answer(self, front: Front) -> Response:
        try:
            told = await self.do(front)
        except (Refused, FdasyncError) as error:
            refused = refused_of(error)
            return reply(Updated(False, refused.message), refused.status)
        return reply(Updated(True, told or f"version {front.generator.facts().weight_version}"))


async def served(kind: type[Call], request: Request, front: Front) -> Response:
    """The answer to a call."""
    call = await kind.read(request, front)
    work = call.answer(front)
    return await (whole(request, work) if kind.ENDS_WITH_CLIENT else work)
