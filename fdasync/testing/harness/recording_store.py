"""A store that records for `PassModel` which host block was put and got under which key, and that outlives engines.

Wraps the innermost store, and knows nothing of the faults, timeouts and checks around it. Used by simulations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.testing.stores.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Item, Outcome, Store
    from fdasync.testing.harness.pass_model import PassModel


class RecordingStore(Wrapper):
    """Reports every block that was put and every block that was got to `passes`.

    Attributes:
        stride_nbytes: distance of host blocks, whose header page is the first part of an item; set it before use.
    """

    def __init__(self, inner: Store, passes: PassModel, *, closes: bool = False) -> None:
        """`closes`: the inner store ends with this engine, and the next engine opens another one on the same place."""
        super().__init__(inner)
        self._closes = closes
        self.stride_nbytes = 1
        self._passes = passes
        self._kept: dict[str, None] = {}

    async def aclose(self) -> None:
        """Unless `closes` is set the inner store stays as it is: the next engine opens it again."""
        if self._closes:
            await self.inner.aclose()

    async def forget(self) -> None:
        """Delete every object, as a store may."""
        keys = list(self._kept)
        self._kept.clear()
        await self.inner.delete(keys)

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.inner.put(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status == "done":
                self._passes.stored(item.key, item.parts[0].offset // self.stride_nbytes)
                self._kept[item.key] = None
        return outcomes

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.inner.get_into(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status == "done":
                self._passes.fetched(item.key, item.parts[0].offset // self.stride_nbytes)
        return outcomes
