"""How a request is read, on an engine and on a router.

`engine/stream.py` and `fdasync_fleet/router/stream.py` add where deltas and results come from. Knows no scheduling and
no links.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Self

    from fdasync.result import Delta, Result, Sample


class StreamedRequest(Protocol):
    """A request that a `DeltaStream` reads.

    Attributes:
        request_id: the caller's name for it, or else a drawn name.
        done: set when the request has ended.
        waiter: the stream sets it while its reader waits; the request resolves it when there is something to read.
    """

    request_id: str
    done: asyncio.Future[None]
    waiter: asyncio.Future[None] | None


class DeltaStream(ABC):
    """An async iterator of `Delta`s of all samples of one request; ends when every sample ended.

    One reader at a time. A slow reader gets fewer, longer deltas; the request never waits for it. A sample that has
    ended is whole from its last delta on (`sample`), while others go on.
    """

    def __init__(self, request: StreamedRequest, num_samples: int) -> None:
        self._request = request
        self._num_samples = num_samples
        # the sample that is looked at first: each has its turn
        self._next = 0
        # samples whose last delta was read
        self._ended: set[int] = set()

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or else a drawn name."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt: known from the first delta on; before, () is possible for text."""
        return self._prompt()

    def sample(self, index: int) -> Sample:
        """A sample that has ended, whole: with all its log-probs and rows. It is there from its last delta on (the
        delta with a `finish_reason`), and without deltas at the request's end. It equals the result's sample, which may
        share its arrays. It stays there when the request fails later, or is aborted.

        Raises IndexError for a number that no sample has, RuntimeError before its last delta was read, and the error
        that the request ended with where that error has cut it short.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        whole = self._sample(index) if index in self._ended else None
        if whole is not None:
            return whole
        if not self._request.done.done():
            raise RuntimeError(f"sample {index} is still running, or its last delta was not read yet")
        return self._whole().samples[index]

    @property
    def result(self) -> Result:
        """The whole result, once the iteration ended or the block was left. Raises RuntimeError before, and the error
        that the request ended with."""
        if not self._request.done.done():
            raise RuntimeError("the request is still running: read the stream to its end first")
        return self._whole()

    @abstractmethod
    def abort(self) -> None:
        """End the request now; the stream then ends normally, with finish_reason "abort"."""

    @abstractmethod
    async def leave(self) -> None:
        """Abort the request if it has not ended, and wait until it has. Called when its block is left."""

    @abstractmethod
    def _take(self, index: int) -> Delta | None:
        """All that is new of a sample."""

    @abstractmethod
    def _sample(self, index: int) -> Sample | None:
        """A sample whose last delta was taken; None: the request failed before all of the sample was there."""

    @abstractmethod
    def _prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt, as far as known."""

    @abstractmethod
    def _failed(self) -> bool:
        """Whether the request, which has ended, ended with an error."""

    @abstractmethod
    def _whole(self) -> Result:
        """The result of the request, which has ended. Raises the error that it ended with."""

    def __aiter__(self) -> Self:
        return self

    async def _settle(self) -> None:  # noqa: B027 - a result that is there as the request ends needs no work
        """Do the work that an ended request's result still takes, without holding up the loop."""

    async def __anext__(self) -> Delta:
        request = self._request
        while True:
            for _ in range(self._num_samples):
                index, self._next = self._next, (self._next + 1) % self._num_samples
                delta = self._take(index)
                if delta is not None:
                    if delta.finish_reason is not None:
                        self._ended.add(index)
                    return delta
            if request.done.done():
                if self._failed():
                    self._whole()  # raises
                await self._settle()
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


S_co = TypeVar("S_co", bound=DeltaStream, covariant=True)


class Generation(Generic[S_co]):
    """A request, which is submitted as it is entered or iterated; either is done once.

    `async with it as stream` gives the stream, with its result; leaving early aborts the request and waits until it has
    ended. `async for delta in it` gives the deltas alone; a loop that is left early aborts the request, which then ends
    by itself.

    Args:
        submit: submits the request and returns its stream.
    """

    def __init__(self, submit: Callable[[], Awaitable[S_co]]) -> None:
        self._submit = submit
        self._entered = False

    async def __aenter__(self) -> S_co:
        if self._entered:
            raise RuntimeError("a generation is entered once")
        self._entered = True
        self._stream = await self._submit()
        return self._stream

    async def __aexit__(self, *exc: object) -> None:
        await self._stream.leave()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        # left early, an async generator is closed by its loop
        async with self as stream:
            async for delta in stream:
                yield delta
