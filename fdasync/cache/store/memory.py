"""A store in this process's memory: the model that the conformance suite trusts, so it is as simple as can be.

Objects are `bytes` in a dict, copied in and out on the loop, which gets a turn after every MiB; an object of many MiB
is copied in one go. Good for tests, simulations and small caches. It knows the contract (`store/base.py`) only. It is
the plugin `memory` of `fdasync.stores`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.base import DONE, EXISTS, MISS, Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.validation import check_items, check_keys
from fdasync.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import SharedRegion

_TURN_NBYTES = 1 << 20


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the store keeps.

    Attributes:
        max_nbytes: most bytes of all values; the values used longest ago are dropped for new ones.
    """

    max_nbytes: int = 1 << 30


class MemoryStore(Store):
    """See the module. Its objects end with it."""

    config_type = MemoryConfig

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self._max_nbytes = config.max_nbytes
        self.capabilities = Capabilities(name="memory", durability="none", capacity_nbytes=config.max_nbytes)
        self._regions: Sequence[SharedRegion] = ()
        self._objects: dict[str, bytes] = {}  # used longest ago first
        self._nbytes = 0
        self._moved_nbytes = 0
        self._closed = False
        self._era = 0  # rises when `kill` or `aclose` ends all running verbs

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._regions = tuple(regions)

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        self._check_era(self._era)
        check_keys(keys, self.capabilities)
        for place, key in enumerate(keys):
            if key not in self._objects:
                return place
        return len(keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        era = self._era
        self._check_era(era)
        check_items(items, self.capabilities, self._regions)
        outcomes = []
        for item in items:
            outcomes.append(self._get(item))
            await self._turn(item, era)
        return outcomes

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        era = self._era
        self._check_era(era)
        check_items(items, self.capabilities, self._regions)
        outcomes = []
        for item in items:
            outcomes.append(self._put(item))
            await self._turn(item, era)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        self._check_era(self._era)
        check_keys(keys, self.capabilities)
        return sum(self._drop(key) for key in keys)

    async def usage(self) -> StoreUsage:
        self._check_era(self._era)
        return StoreUsage(objects=len(self._objects), nbytes=self._nbytes)

    async def kill(self, why: str) -> bool:
        del why
        self._era += 1
        return True

    async def aclose(self) -> None:
        self._closed = True
        self._era += 1
        self._objects.clear()
        self._nbytes = 0
        self._regions = ()

    def _get(self, item: Item) -> Outcome:
        value = self._objects.get(item.key)
        if value is None:
            return MISS
        if len(value) != item.nbytes:
            return Outcome("damaged", f"{len(value)} bytes are stored, {item.nbytes} were asked for")
        self._touch(item.key)
        place = 0
        for part in item.parts:
            self._regions[part.region].view(part.offset, part.nbytes)[:] = value[place : place + part.nbytes]
            place += part.nbytes
        return DONE

    def _put(self, item: Item) -> Outcome:
        if item.key in self._objects:
            self._touch(item.key)
            return EXISTS
        if item.nbytes > self._max_nbytes:
            return Outcome("full", f"{item.nbytes} bytes never fit in {self._max_nbytes}")
        while self._nbytes + item.nbytes > self._max_nbytes:
            self._drop(next(iter(self._objects)))
        views = [self._regions[part.region].view(part.offset, part.nbytes) for part in item.parts]
        self._objects[item.key] = b"".join(views)
        self._nbytes += item.nbytes
        return DONE

    def _touch(self, key: str) -> None:
        self._objects[key] = self._objects.pop(key)

    def _drop(self, key: str) -> bool:
        value = self._objects.pop(key, None)
        self._nbytes -= len(value or b"")
        return value is not None

    async def _turn(self, item: Item, era: int) -> None:
        """Let others run after every MiB. Raises StoreUnavailable if this verb was ended meanwhile."""
        self._moved_nbytes += item.nbytes
        if self._moved_nbytes >= _TURN_NBYTES:
            self._moved_nbytes = 0
            await asyncio.sleep(0)
            self._check_era(era)

    def _check_era(self, era: int) -> None:
        if self._closed or era != self._era:
            raise StoreUnavailable("memory", "it is closed" if self._closed else "the call was ended")
