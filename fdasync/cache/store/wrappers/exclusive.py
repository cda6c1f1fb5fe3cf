"""A store object that an engine was given: while one engine has it open no other engine gets it, or ends it.

A store keeps the regions that it was opened with, so a second engine would move its blocks through the first one's
memory. For the second engine it is a store that cannot be reached for now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.wrappers.base import Wrapper
from fdasync.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.cache.store.base import Store
    from fdasync.ipc.shared_memory import SharedRegion


class Exclusive(Wrapper):
    """See the module. Stores inside of wrappers count, too."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._has_it = False

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Open the store inside. Raises StoreUnavailable while another engine has it."""
        if not self._has_it:
            if any(store.in_use for store in self._inside()):
                raise StoreUnavailable(self.name, "another engine has this object open; each needs one of its own")
            self._has_it = True
            self._mark(in_use=True)
        await super().open(regions)

    async def kill(self, why: str) -> bool:
        return self._has_it and await super().kill(why)

    async def aclose(self) -> None:
        if self._has_it:
            try:
                await super().aclose()
            finally:
                self._has_it = False
                self._mark(in_use=False)

    def _inside(self) -> Iterator[Store]:
        store: Store = self
        while isinstance(store, Wrapper):
            store = store.inner
            yield store

    def _mark(self, *, in_use: bool) -> None:
        for store in self._inside():
            store.in_use = in_use
