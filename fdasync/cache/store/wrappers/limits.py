"""A bound on calls and bytes at a time, first come first served; batches are cut to the size that the store takes."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome
from fdasync.cache.store.wrappers.base import Wrapper, nbytes_of
from fdasync.errors import StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.deadlines import DeadlineTimer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Store
    from fdasync.events.catalog import StoreVerb

_MAX_BATCH = 1 << 16


class Limits(Wrapper):
    """Calls wait in line. A large batch is cut into runs; each run waits in line, and begins after the one before.

    A call that timed out further inside keeps its place until it has really ended. When a run of a batch fails for now,
    its items and the items of later runs are each "failed".

    Args:
        max_calls: most calls of the inner store at a time.
        max_nbytes: most bytes of their parts; a single item that is larger runs alone.
        max_wait_s: longest wait in line, in seconds; then the call raises StoreBusy.
    """

    def __init__(self, inner: Store, *, max_calls: int, max_nbytes: int, max_wait_s: float) -> None:
        super().__init__(inner)
        self._max_calls = max_calls
        self._max_nbytes = max_nbytes
        self._max_wait_s = max_wait_s
        self._line: deque[tuple[asyncio.Future[None], int]] = deque()
        self._calls = 0
        self._nbytes = 0

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The capabilities of the store inside, with batches of almost any size."""
        return msgspec.structs.replace(self.inner.capabilities, max_batch=_MAX_BATCH)

    @property
    def calls(self) -> int:
        """Inner calls that have not ended."""
        return self._calls

    @property
    def waiting(self) -> int:
        """Calls in line."""
        return len(self._line)

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        if len(argument) > _MAX_BATCH:
            hint = f"at most {_MAX_BATCH} are taken"
            raise StoreRejected(self.name, f"{len(argument)} items in one call", hint)
        era = self.era
        if verb in ("get_into", "put"):
            return await self._items(verb, argument, era)
        if verb == "usage":
            return await self._run(verb, argument, era)
        size = self.inner.capabilities.max_batch
        found = 0
        for start in range(0, max(len(argument), 1), size):
            keys = argument[start : start + size]
            count = await self._run(verb, keys, era)
            found += count
            if verb == "exists_prefix" and count < len(keys):
                break
        return found

    async def _items(self, verb: StoreVerb, items: Sequence[Item], era: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for run in self._cut(items):
            try:
                outcomes += await self._run(verb, run, era)
            except StoreTimeout:
                raise
            except StoreUnavailable as error:
                if not outcomes or era != self.era:
                    raise
                failed = Outcome("failed", error.problem, transient=True)
                return [*outcomes, *[failed] * (len(items) - len(outcomes))]
        return outcomes

    def _cut(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Runs that the store takes and that may be in flight at once; no items make one empty run."""
        size = self.inner.capabilities.max_batch
        if len(items) <= size and nbytes_of("put", items) <= self._max_nbytes:
            return [items]
        runs: list[list[Item]] = [[]]
        nbytes = 0
        for item in items:
            if runs[-1] and (len(runs[-1]) == size or nbytes + item.nbytes > self._max_nbytes):
                runs.append([])
                nbytes = 0
            runs[-1].append(item)
            nbytes += item.nbytes
        return list(runs)

    async def _run(self, verb: StoreVerb, argument: Sequence[Any], era: int) -> Any:
        nbytes = nbytes_of(verb, argument)
        await self._enter(nbytes)
        ended: asyncio.Future[Any] | None = None
        try:
            return await self.ask(verb, argument, era)
        except StoreTimeout as error:
            ended = error.ended
            raise
        finally:
            if ended is None or ended.done():
                self._leave(nbytes)
            else:
                ended.add_done_callback(lambda _: self._leave(nbytes))

    # -- the line -------------------------------------------------------------------------------------

    async def _enter(self, nbytes: int) -> None:
        if not self._line and self._fits(nbytes):
            self._take(nbytes)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (future, nbytes)
        self._line.append(place)
        loop = asyncio.get_running_loop()
        timer = DeadlineTimer(loop, loop.time() + self._max_wait_s, partial(self._too_late, place))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # its turn had come
                self._leave(nbytes)
            elif place in self._line:
                self._line.remove(place)
                self._next()
            raise
        finally:
            timer.cancel()

    def end(self) -> None:
        super().end()
        while self._line:
            future, _ = self._line.popleft()
            if not future.done():
                future.set_exception(StoreUnavailable(self.name, "the call was ended while it waited in line"))

    def _too_late(self, place: tuple[asyncio.Future[None], int]) -> None:
        if place in self._line and not place[0].done():
            self._line.remove(place)
            problem = f"{self._calls} calls before this one did not end within {self._max_wait_s:g} s"
            place[0].set_exception(StoreBusy(self.name, problem))
            self._next()

    def _fits(self, nbytes: int) -> bool:
        return self._calls == 0 or (self._calls < self._max_calls and self._nbytes + nbytes <= self._max_nbytes)

    def _take(self, nbytes: int) -> None:
        self._calls += 1
        self._nbytes += nbytes

    def _leave(self, nbytes: int) -> None:
        self._calls -= 1
        self._nbytes -= nbytes
        self._next()

    def _next(self) -> None:
        """Begin the calls at the front of the line while there is room; no call overtakes another."""
        while self._line and self._fits(self._line[0][1]):
            future, nbytes = self._line.popleft()
            if not future.done():
                self._take(nbytes)
                future.set_result(None)
