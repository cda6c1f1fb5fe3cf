"""The transfer process: copies and hashes an instance's blocks on a loop of its own.

The transports are the same that an instance could have on its own loop. Memory is shared by fd: no byte of a block is
sent to the instance. The process dies with the instance's. Knows no blocks and no requests. `process/proxy.py` starts
it and sends it the calls of `process/messages.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.errors import FdasyncError, PluginError, ProtocolError
from fdasync.ipc.child import settle
from fdasync.ipc.service import Service, serve
from fdasync.ipc.shared_memory import SharedRegion
from fdasync_fleet.transfer.base import checksum_parts
from fdasync_fleet.transfer.plugins import make_transport
from fdasync_fleet.transfer.process.messages import (
    ERRORS,
    Checksums,
    Forget,
    Offer,
    Open,
    Verb,
    Withdraw,
    error_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.messages import Source
    from fdasync_fleet.transfer.base import Transport


class _TransferService(Service):
    """The transports of one instance."""

    messages = Open | Verb
    errors = ERRORS

    def __init__(self) -> None:
        self._transports: list[Transport] = []
        self._regions: list[SharedRegion] = []

    async def perform(self, message: Open | Verb, fds: list[int]) -> object:
        if isinstance(message, Open):
            return await self._open(message, fds)
        if isinstance(message, Checksums):
            return await checksum_parts(self._regions, message.parts)
        if not message.place < len(self._transports):
            raise ProtocolError("a verb came before its transport was open")
        transport = self._transports[message.place]
        # nothing waits before these three: they are in force before a later call begins
        if isinstance(message, Offer):
            return transport.offer(message.parts)
        if isinstance(message, Withdraw):
            return transport.withdraw(message.parts)
        if isinstance(message, Forget):
            return transport.forget(message.source)
        deadline = asyncio.get_running_loop().time() + message.limit_s
        return await transport.receive(message.source, message.copy_specs, deadline)

    async def _open(self, message: Open, fds: list[int]) -> list[Source | str]:
        if len(fds) != len(message.region_nbytes):
            raise ProtocolError(f"{len(fds)} fds came for {len(message.region_nbytes)} regions")
        for nbytes in message.region_nbytes:
            self._regions.append(SharedRegion(fds.pop(0), nbytes))
        sources: list[Source | str] = []
        for spec in message.specs:
            transport = make_transport(spec)
            # from now on it is closed, whether it opens or not
            self._transports.append(transport)
            try:
                await transport.open(self._regions)
                sources.append(transport.source())
            except (FdasyncError, OSError) as error:
                if not spec.optional:
                    raise
                await transport.aclose()
                sources.append(error.problem if isinstance(error, PluginError) else str(error))
        settle()
        return sources

    def error_of(self, message: Open | Verb, error: BaseException) -> FdasyncError:  # noqa: ARG002 - the contract's
        return error_of(error)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        for transport in self._transports:
            await transport.aclose()
        # receives have ended with their transports; checksums may go on
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)


def main() -> None:
    """The child's program."""
    serve(_TransferService())
