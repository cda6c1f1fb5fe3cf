"""Keeps calls on the same keys apart: a key has any number of readers, or one writer. For one event loop.

The pool does not do so: a second put of a key that is being put answers "done" before the object can be read, and a
forced remove frees memory under a reader. The gate keeps such calls of one store object apart; between machines the
checksums of the block format find the damage. Knows no pool and no clock. Used by `store.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable


class KeyGate:
    """Takes all keys of a call at once or none, so no two calls wait for each other."""

    def __init__(self) -> None:
        self._readers: dict[str, int] = {}
        self._writers: set[str] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def reading(self, keys: Iterable[str]) -> AsyncIterator[None]:
        """Enter when no call writes these keys."""
        mine = frozenset(keys)
        while not self._writers.isdisjoint(mine):
            await self._change()
        for key in mine:
            self._readers[key] = self._readers.get(key, 0) + 1
        try:
            yield
        finally:
            for key in mine:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]
            self._wake()

    @asynccontextmanager
    async def writing(self, keys: Iterable[str]) -> AsyncIterator[None]:
        """Enter when no call reads or writes these keys."""
        mine = frozenset(keys)
        while not (self._writers.isdisjoint(mine) and self._readers.keys().isdisjoint(mine)):
            await self._change()
        self._writers |= mine
        try:
            yield
        finally:
            self._writers -= mine
            self._wake()

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
