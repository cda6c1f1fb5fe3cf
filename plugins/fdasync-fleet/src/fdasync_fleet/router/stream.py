"""`RoutedStream`: the deltas of one request of a router.

A slow reader gets fewer, longer deltas, and holds nothing up. Knows the request and `Dispatch`, which serves it, and no
instances. Made by `router/router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.generator import DeltaStream

if TYPE_CHECKING:
    from fdasync.result import Delta, Result, Sample
    from fdasync_fleet.router.dispatch import Dispatch
    from fdasync_fleet.router.request import RoutedRequest


class RoutedStream(DeltaStream):
    """See `DeltaStream`."""

    _request: RoutedRequest

    def __init__(self, dispatch: Dispatch, request: RoutedRequest) -> None:
        super().__init__(request, len(request.outputs))
        self._dispatch = dispatch

    @classmethod
    async def open(cls, dispatch: Dispatch, request: RoutedRequest) -> RoutedStream:
        """Submit a request. Raises as `Dispatch.submit` says."""
        await dispatch.submit(request)
        return cls(dispatch, request)

    def abort(self) -> None:
        self._dispatch.abort(self._request)

    async def leave(self) -> None:
        await self._dispatch.leave(self._request)

    def _take(self, index: int) -> Delta | None:
        return self._request.take(index)

    def _sample(self, index: int) -> Sample | None:
        return self._request.samples[index]

    def _prompt(self) -> tuple[int, ...]:
        return self._request.prompt

    def _failed(self) -> bool:
        return self._request.error is not None

    def _whole(self) -> Result:
        return self._request.outcome()
