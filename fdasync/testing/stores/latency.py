"""A slower store: a delay before every call, fixed and by the call's bytes; and the waits of this file and `faults.py`.

Used by tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.testing.stores.wrapper import GIB, Wrapper, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from fdasync.cache.store.base import Store
    from fdasync.events.catalog import StoreVerb


class Naps:
    """Waits of known length; all can be ended at once."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    def begin(self) -> asyncio.Future[None]:
        """A wait without a length: it ends with `end`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    async def nap(self, seconds: float) -> None:
        future = self.begin()
        # bare timer: a pause, with no answer to wait for
        timer = future.get_loop().call_later(seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def end(self) -> None:
        for future in list(self._futures):
            _wake(future)


class Latency(Wrapper):
    """Waits, then calls the store inside. A cancelled, killed or closed call stops waiting at once.

    Args:
        inner: the store.
        call_s: of each call, in seconds.
        gib_s: of each GiB of the call's parts, in seconds.
        jitter: a delay is drawn from (1 - jitter) to (1 + jitter) of its length; 0 to 1.
        random: the source of the jitter, and needed for it.
    """

    def __init__(
        self,
        inner: Store,
        *,
        call_s: float,
        gib_s: float = 0.0,
        jitter: float = 0.0,
        random: Random | None = None,
    ) -> None:
        super().__init__(inner)
        self._naps = Naps()
        self._call_s = call_s
        self._gib_s = gib_s
        self._jitter = jitter
        self._random = random

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        era = self.era
        delay_s = self._call_s + self._gib_s * nbytes_of(verb, argument) / GIB
        if self._random is not None:
            delay_s *= 1.0 + self._jitter * self._random.uniform(-1.0, 1.0)
        await self._naps.nap(delay_s)
        return await self.ask(verb, argument, era)

    def end(self) -> None:
        super().end()
        self._naps.end()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
