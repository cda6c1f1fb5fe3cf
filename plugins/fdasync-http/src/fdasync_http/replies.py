"""Answers that take a while: they end early when their client goes away.

A body may have parts that are made while they are sent (`Parts`), so that rows of hundreds of megabytes take no memory
of their own. Knows no dialects. Called by every endpoint that generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from fdasync_http.failures import JSON, answer, body_of, refused_of
from fdasync_http.lines import one_line

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

#: the status of an answer that the client never reads: it went away
CLIENT_GONE = 499
DONE = b"data: [DONE]\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """The outcome of `work`; None: the client went away first, and `work` was cancelled and has ended.

    Cancelling it cancels `work`.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        # bounded by the request's own deadline, which ends it
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()  # of a task that is done
        return None
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The outcomes of all, which run at the same time; the first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]  # of tasks that are done


async def interleaved(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come, at most one of each waiting to be taken. The first error ends the others,
    and is raised as it is; so does closing this."""
    streams = list(streams)
    waiting: dict[asyncio.Task[T | None], AsyncGenerator[T, None]] = {}

    def wait_for(stream: AsyncGenerator[T, None]) -> None:
        waiting[asyncio.ensure_future(_next_of(stream))] = stream

    try:
        for stream in streams:
            wait_for(stream)
        while waiting:
            # bounded by the requests' own deadlines, which end their streams
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                item = task.result()  # of a task that is done
                if item is not None:
                    yield item
                    wait_for(stream)
    finally:
        for task in waiting:
            task.cancel()
        # an error that came beside the raised one is dropped
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next_of(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def whole(request: Request, work: Awaitable[Response]) -> Response:
    """The answer that `work` makes; the work is cancelled where the client goes away."""
    reply = await while_there(request.receive, work)
    return Response(status_code=CLIENT_GONE) if reply is None else reply


class Streamed(Response):
    """A body that is sent while it is made.

    Args:
        pieces: bytes of the body; closed when the client goes away. An error before the first one is an answer with its
            status. A later one breaks the connection off, so that the client does not take the body for whole.
        media_type: of the body.
    """

    def __init__(self, pieces: AsyncIterator[bytes], media_type: str) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self._pieces = pieces
        # nginx and its like must not collect pieces
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def _last(self, error: Exception | None) -> bytes:
        """The end of the body, after an error too. Raises where an error breaks the connection off."""
        if error is not None:
            raise error
        return b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_there(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = None
        # asynchronous generators alone come here
        async with aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            try:
                # a request that is refused is refused by its status
                piece = await anext(pieces, b"")
            except Exception as error:
                await answer(refused_of(error))(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                while piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = await anext(pieces, b"")
            except Exception as error:
                failure = error
        await send({"type": "http.response.body", "body": self._last(failure), "more_body": False})


class Events(Streamed):
    """Server-sent events.

    Args:
        events: whole events, as bytes; see `Streamed`. An error after the first one becomes an event of its own, and
            the stream ends without `[DONE]`.
        closing: sent at the end.
    """

    def __init__(self, events: AsyncIterator[bytes], closing: bytes = DONE) -> None:
        super().__init__(events, "text/event-stream")
        self._closing = closing

    def _last(self, error: Exception | None) -> bytes:
        return self._closing if error is None else event_of(body_of(refused_of(error)))


def event_of(data: bytes) -> bytes:
    """One event that carries this JSON."""
    return b"data: " + one_line(data) + b"\n\n"


#: makes the bytes of a part, which are `nbytes` long, piece by piece
Pieces = Callable[[], AsyncIterator[bytes]]


class Part(msgspec.Struct, frozen=True):
    """A part of a body that is made while it is sent.

    Attributes:
        nbytes: its length.
        pieces: makes its bytes.
    """

    nbytes: int
    pieces: Pieces


class Parts(Response):
    """A body of bytes and `Part`s, whose length is known before it is made."""

    def __init__(self, parts: list[bytes | Part], media_type: str = JSON) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self._parts = parts
        nbytes = sum(part.nbytes if isinstance(part, Part) else len(part) for part in parts)
        self.init_headers({"content-length": str(nbytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            if isinstance(part, Part):
                async for piece in part.pieces():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
