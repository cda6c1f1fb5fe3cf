"""What the caller of a router reads: looks like what `Engine.generate` gives; `dispatch.py` serves it.

A reader that is slow gets fewer, longer deltas; nothing waits for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.pd.router.dispatch import Dispatch
    from fdasync.pd.router.request import Routed
    from fdasync.result import Delta, Result


class RoutedStream:
    """Async iterator of `Delta`s of all samples, as `TokenStream` is; ends when every sample ended."""

    def __init__(self, dispatch: Dispatch, request: Routed) -> None:
        self._dispatch = dispatch
        self._request = request
        self._next = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def result(self) -> Result:
        """The whole result, once the iteration ended or the block was left. Raises RuntimeError before, and what the
        request failed with."""
        request = self._request
        if not request.done.done():
            raise RuntimeError("the request is still running: read the stream to its end first")
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def abort(self) -> None:
        """End it now; the stream then ends normally, with finish_reason "abort"."""
        self._dispatch.abort(self._request)

    def __aiter__(self) -> RoutedStream:
        return self

    async def __anext__(self) -> Delta:
        request = self._request
        while True:
            for _ in request.pending:
                index, self._next = self._next, (self._next + 1) % len(request.pending)
                delta = request.take(index)
                if delta is not None:
                    return delta
            if request.done.done():
                if request.error is not None:
                    raise request.error
                raise StopAsyncIteration
            if request.waiter is not None:
                raise RuntimeError("a stream has one reader at a time")
            request.waiter = asyncio.get_running_loop().create_future()
            try:
                # bounded by the request's own deadline, which ends it
                await request.waiter
            finally:
                request.waiter = None

    async def finished(self) -> Result:
        """Wait for the end and return the result, whatever was read of the deltas."""
        await asyncio.shield(self._request.done)
        return self.result


class RoutedGeneration:
    """`async with` around a request: entering submits it, leaving early aborts it."""

    def __init__(self, dispatch: Dispatch, request: Routed) -> None:
        self._dispatch = dispatch
        self._request = request
        self._entered = False

    async def __aenter__(self) -> RoutedStream:
        if self._entered:
            raise RuntimeError("a generation is entered once")
        self._entered = True
        await self._dispatch.submit(self._request)
        return RoutedStream(self._dispatch, self._request)

    async def __aexit__(self, *exc: object) -> None:
        await self._dispatch.leave(self._request)
