"""Again, a little later, for what may work then: whole calls and single items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.wrappers.base import Verb, Wrapper
from fdasync.errors import StoreTimeout, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from fdasync.cache.store.base import Outcome, Store


class Retry(Wrapper):
    """Repeats what failed for now; never after a StoreTimeout, whose call is still under way.

    Of a batch only the items that failed are asked for again. A put that failed may have kept its object: the next
    attempt is then "exists". A repeated delete may count less than were there.

    Args:
        random: for the jitter; each wait is between half of the backoff and all of it.
        attempts: calls in all, at least 1.
        first_s: backoff before the second attempt, in seconds; it doubles.
        max_s: never longer than this, in seconds.
    """

    def __init__(
        self, inner: Store, *, random: Random, attempts: int = 3, first_s: float = 0.05, max_s: float = 2.0
    ) -> None:
        super().__init__(inner)
        self._random = random
        self._attempts = attempts
        self._first_s = first_s
        self._max_s = max_s

    async def around(self, verb: Verb, argument: Sequence[Any]) -> Any:
        era = self.era
        if verb in ("get_into", "put"):
            return await self._items(verb, argument, era)
        for attempt in range(1, self._attempts):
            try:
                return await self.ask(verb, argument, era)
            except StoreTimeout:
                raise
            except StoreUnavailable:
                if era != self.era:
                    raise
            await self._back_off(attempt)
        return await self.ask(verb, argument, era)

    async def _items(self, verb: Verb, items: Sequence[Any], era: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        todo = list(range(len(items)))
        for attempt in range(1, self._attempts + 1):
            try:
                answer = await self.ask(verb, [items[place] for place in todo], era)
            except StoreTimeout:
                raise
            except StoreUnavailable as error:
                last = attempt == self._attempts
                if era != self.era or (last and not outcomes):
                    raise
                if last:
                    told = msgspec.structs.replace(outcomes[todo[0]], problem=error.problem) if outcomes else None
                    outcomes.update((place, told) for place in todo if told is not None)
            else:
                outcomes.update(zip(todo, answer, strict=True))
                todo = [place for place in todo if outcomes[place].status == "failed" and outcomes[place].transient]
            if not todo:
                break
            if attempt < self._attempts:
                await self._back_off(attempt)
        return [outcomes[place] for place in range(len(items))]

    async def _back_off(self, attempt: int) -> None:
        backoff_s = min(self._max_s, self._first_s * 2.0 ** (attempt - 1))
        await self.naps.nap(backoff_s * (0.5 + self._random.random() / 2))
