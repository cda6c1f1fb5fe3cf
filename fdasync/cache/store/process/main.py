"""The store's process: performs an engine's calls on a loop of its own, all at the same time.

Whatever the store does here (block, start threads, hold the GIL, crash), the engine's loop goes on. Memory is shared
by fd: no byte of a block is sent. The process dies with the engine's; when the channel ends in any other way it closes
the store and exits. It knows no engine. `process/proxy.py` starts it and calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fdasync import errors
from fdasync.cache.store.base import Capabilities, Store
from fdasync.cache.store.block_format import BlockSchema
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.plugins import make_store
from fdasync.errors import FdasyncError, ProtocolError, StoreUnavailable
from fdasync.ipc.child import settle
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import remote
from fdasync.ipc.service import Service, serve
from fdasync.ipc.shared_memory import SharedRegion

if TYPE_CHECKING:
    from fdasync.ipc.remote import Method


class StoreService(Service):
    """One store, called by one engine."""

    serves = (Store,)
    errors = ErrorTable(
        errors.BadInput, errors.ConfigError, errors.PluginError, errors.StoreRejected, errors.StoreUnavailable
    )

    def __init__(self) -> None:
        self._name = ""
        self._store: Store | None = None
        self._is_open = False

    @remote()
    async def open(
        self, name: str, config: dict[str, Any], schema: BlockSchema | None, regions: Sequence[SharedRegion]
    ) -> Capabilities:
        """Make a store and open it; other calls follow once this was answered.

        Args:
            name: of the plugin.
            config: raw; decoded into the store's `config_type`.
            schema: of the block objects that the store keeps; None: it keeps plain bytes.
        """
        self._name = name
        store = make_store(name, config)
        # from now on it is closed, whether it opens or not
        self._store = store if schema is None else CheckedStore(store, schema)
        await self._store.open(regions)
        self._is_open = True
        settle()
        return self._store.capabilities

    def target(self, method: Method[Any]) -> object:
        if method.name == "open":
            return self
        if not self._is_open:
            raise ProtocolError("a verb came before the store was open")
        return self._store

    def error_of(self, message: Any, error: BaseException) -> FdasyncError:
        if isinstance(error, StoreUnavailable) and error not in self.errors:
            return self.otherwise(message, error.problem)
        if isinstance(error, asyncio.CancelledError):
            return self.otherwise(message, str(error))
        return super().error_of(message, error)

    def otherwise(self, message: Any, problem: str) -> StoreUnavailable:  # noqa: ARG002 - the contract's
        return StoreUnavailable(self._name, problem)

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
    serve(StoreService())
