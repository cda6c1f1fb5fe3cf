"""What `Engine.generate` gives: an async context manager around a stream of deltas.

Knows the request's output and the engine's front door; nothing of scheduling.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.engine import Engine
    from fdasync.output import RequestOutput
    from fdasync.request import SamplingParams
    from fdasync.result import Delta, Result


class TokenStream:
    """Async iterator of `Delta`s of all samples of a request; ends when every sample ended.

    One reader at a time. A slow reader gets longer deltas; the request never waits for it.
    """

    def __init__(self, engine: Engine, request: RequestOutput) -> None:
        self._engine = engine
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
        if self._request.failure is not None:
            raise self._engine.failed(self._request)
        return self._engine.result_of(self._request)

    def abort(self) -> None:
        """End it now; the stream then ends normally, with finish_reason "abort"."""
        self._engine.abort_request(self._request)

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
                if delta is not None:
                    return delta
            if request.done.done():
                if request.failure is not None:
                    raise self._engine.failed(request)
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

    def __init__(
        self, engine: Engine, prompt: Any, params: SamplingParams, *, streams: bool, options: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._streams = streams
        self._options = options
        self._request: RequestOutput | None = None

    async def __aenter__(self) -> TokenStream:
        if self._request is not None:
            raise RuntimeError("a generation is entered once")
        self._request = await self._engine.submit(self._prompt, self._params, streams=self._streams, **self._options)
        return TokenStream(self._engine, self._request)

    async def __aexit__(self, *exc: object) -> None:
        request = self._request
        assert request is not None
        if not request.done.done():
            self._engine.abort_request(request)
            # one turn of the driver; an engine that fails or closes ends it as well
            await asyncio.shield(request.done)
