"""`TokenStream`: the deltas of one request of an engine.

Knows the request's output and the frontend; nothing of scheduling. Called by `engine/engine.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.generator import DeltaStream

if TYPE_CHECKING:
    from fdasync.engine.frontend import Frontend
    from fdasync.engine.request_state import RequestState
    from fdasync.request import GenerateRequest
    from fdasync.result import Delta, Result, Sample


class TokenStream(DeltaStream):
    """See `DeltaStream`; it ends with EngineFailed or DecodeFailed, which carry what there is."""

    _request: RequestState

    def __init__(self, frontend: Frontend, request: RequestState) -> None:
        super().__init__(request, len(request.samples))
        self._frontend = frontend

    @classmethod
    async def open(cls, frontend: Frontend, ask: GenerateRequest) -> TokenStream:
        """Submit a request. Raises as `Engine.generate` says."""
        return cls(frontend, await frontend.submit(ask))

    def abort(self) -> None:
        self._frontend.abort(self._request)

    async def leave(self) -> None:
        await self._frontend.leave(self._request)

    async def finished(self) -> Result:
        await asyncio.shield(self._request.done)
        await self._settle()
        return self.result

    async def _settle(self) -> None:
        await self._request.settle()

    def _take(self, index: int) -> Delta | None:
        delta = self._request.samples[index].delta()
        if self._request.spoiled is not None:
            self._frontend.abort(self._request)
            return None
        return delta

    def _sample(self, index: int) -> Sample:
        return self._frontend.sample(self._request, index)

    def _prompt(self) -> tuple[int, ...]:
        return self._request.prompt

    def _failed(self) -> bool:
        return self._request.failure is not None or self._request.spoiled is not None

    def _whole(self) -> Result:
        return self._frontend.result(self._request)
