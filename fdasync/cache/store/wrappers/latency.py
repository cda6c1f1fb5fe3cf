"""A slower store, for tests and figures: a delay before every call, by the call and by its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.cache.store.wrappers.base import GIB, Verb, Wrapper, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from fdasync.cache.store.base import Store


class Latency(Wrapper):
    """Waits, then asks the store inside. A cancelled, killed or closed call stops waiting at once.

    Args:
        call_s: of each call, in seconds.
        gib_s: of each GiB of the call's parts, in seconds.
        jitter: the share of a delay, 0 to 1, that is drawn: it is then between (1 - jitter) and (1 + jitter) of it.
        random: what it is drawn from; needed with a jitter.
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
        self._call_s = call_s
        self._gib_s = gib_s
        self._jitter = jitter
        self._random = random

    async def around(self, verb: Verb, argument: Sequence[Any]) -> Any:
        era = self.era
        delay_s = self._call_s + self._gib_s * nbytes_of(verb, argument) / GIB
        if self._random is not None:
            delay_s *= 1.0 + self._jitter * self._random.uniform(-1.0, 1.0)
        await self.naps.nap(delay_s)
        return await self.ask(verb, argument, era)
