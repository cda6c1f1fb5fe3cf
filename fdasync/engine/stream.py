"""What `Engine.generate` gives: an async context manager around a stream of deltas.

Knows the request's output and the door; nothing of scheduling.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.engine.frontend import Door
    from fdasync.engine.inputs import Ask
    from fdasync.engine.output import RequestOutput
    from fdasync.result import Delta, Result


class TokenStream:
    """Async iterator of `Delta`s of all samples of a request; ends when every sample ended.

    One reader at a time. A slow reader gets longer deltas; the request never waits for it.
    """

    def __init__(self, door: Door, request: RequestOutput) -> None:
        self._door = door
        self._request = request
        self._next = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def result(self) -> Result:
        """The whole result; once the iteration has ended, or the block was left. Raises RuntimeError before."""
        if not self._request.done.done():
            raise RuntimeError("the request is still running: read the stream to its end first")
        return self._door.result(self._request)

    def abort(self) -> None:
        """End it now; the stream then ends normally, with finish_reason "abort"."""
        self._door.abort(self._request)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        request = self._request
        while True:
            samples = request.samples
            for _ in samples:
                sample = samples[self._next]
                self._next = (self._next + 1) % len(samples)
                delta = sample.delta()
                if request.spoiled is not None:
                    self._door.abort(request)
                elif delta is not None:
                    return delta
            if request.done.done():
                if request.failure is not None or request.spoiled is not None:
                    self._door.result(request)  # raises what the stream ends with
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
        """Wait for the end and return the result, whatever was read of the deltas. Raises EngineFailed."""
        await asyncio.shield(self._request.done)
        await self._request.decode()
        return self.result


class Generation:
    """`async with` around a request: entering submits it, leaving early aborts it."""

    def __init__(self, door: Door, ask: Ask) -> None:
        self._door = door
        self._ask = ask
        self._request: RequestOutput | None = None

    async def __aenter__(self) -> TokenStream:
        if self._request is not None:
            raise RuntimeError("a generation is entered once")
        self._request = await self._door.submit(self._ask)
        return TokenStream(self._door, self._request)

    async def __aexit__(self, *exc: object) -> None:
        assert self._request is not None
        await self._door.leave(self._request)
