"""The store's process: performs an engine's calls on a loop of its own, all at the same time.

Whatever the store does here (block, start threads, hold the GIL, crash), the engine's loop goes on. Memory is shared
by fd: no byte of a block is sent. The process dies with the engine's; when the channel ends in any other way it closes
the store and exits. It knows no engine. `process/proxy.py` starts it and sends it the calls of `process/messages.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.plugins import make_store
from fdasync.cache.store.process.messages import ERRORS, Delete, ExistsPrefix, GetInto, Open, Put, Verb, error_of
from fdasync.errors import FdasyncError, ProtocolError, StoreUnavailable
from fdasync.ipc.child import settle
from fdasync.ipc.service import Service, serve
from fdasync.ipc.shared_memory import SharedRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Capabilities, Store


class _StoreService(Service):
    """One store, called by one engine."""

    messages = Open | Verb
    errors = ERRORS

    def __init__(self) -> None:
        self._name = ""
        self._store: Store | None = None
        self._is_open = False
        self._regions: list[SharedRegion] = []

    async def perform(self, message: Open | Verb, fds: list[int]) -> object:
        if isinstance(message, Open):
            return await self._open(message, fds)
        if self._store is None or not self._is_open:
            raise ProtocolError("a verb came before the store was open")
        if isinstance(message, ExistsPrefix):
            return await self._store.exists_prefix(message.keys)
        if isinstance(message, GetInto):
            return await self._store.get_into(message.items)
        if isinstance(message, Put):
            return await self._store.put(message.items)
        if isinstance(message, Delete):
            return await self._store.delete(message.keys)
        return await self._store.usage()

    async def _open(self, message: Open, fds: list[int]) -> Capabilities:
        self._name = message.store
        if len(fds) != len(message.region_nbytes):
            raise ProtocolError(f"{len(fds)} fds came for {len(message.region_nbytes)} regions")
        for nbytes in message.region_nbytes:
            self._regions.append(SharedRegion(fds.pop(0), nbytes))
        store = make_store(message.store, message.config)
        # from now on it is closed, whether it opens or not
        self._store = store if message.schema is None else CheckedStore(store, message.schema)
        await self._store.open(self._regions)
        self._is_open = True
        settle()
        return self._store.capabilities

    def error_of(self, message: Open | Verb, error: BaseException) -> FdasyncError:  # noqa: ARG002 - the contract's
        if isinstance(error, asyncio.CancelledError):
            return StoreUnavailable(self._name, str(error))
        return error_of(self._name, error)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        if calls and not self._is_open:
            for opening in calls:
                opening.cancel()
            await asyncio.wait(calls)
        if self._store is not None:
            # the store lets running verbs end first
            await self._store.aclose()
        if calls:
            await asyncio.wait(calls)


def main() -> None:
    """The child's program."""
    serve(_StoreService())
