"""The transfer process: copies and hashes an instance's blocks on a loop of its own.

The transports are the same that an instance could have on its own loop. Memory is shared by fd: no byte of a block is
sent to the instance. The process dies with the instance's. Knows no blocks and no requests. `process/proxy.py` starts
it and calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fdasync import errors
from fdasync.cache.store.base import Outcome
from fdasync.errors import FdasyncError, PluginError, ProtocolError, RunnerError
from fdasync.ipc.child import settle
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import one_each, remote
from fdasync.ipc.service import Service, serve
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import CopySpec, checksum_parts
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport

if TYPE_CHECKING:
    from fdasync_fleet.transfer.base import Transport


class TransferService(Service):
    """The transports of one instance; calls name one by its place.

    A clock of one process says nothing in another, so limits cross as seconds that are left.
    """

    errors = ErrorTable(errors.BadInput, errors.InvariantBroken, errors.PluginError, errors.RunnerError)

    def __init__(self) -> None:
        self._transports: list[Transport] = []
        self._regions: Sequence[SharedRegion] = ()

    @remote(fits=lambda sources, specs, _: len(sources) == len(specs))
    async def open(self, specs: Sequence[TransportSpec], regions: Sequence[SharedRegion]) -> list[Source | str]:
        """Make these transports and open them: the source of each, in order, or why an optional one does not open."""
        self._regions = regions
        sources: list[Source | str] = []
        for spec in specs:
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

    # these three wait for nothing, so they are in force before a later call begins

    @remote()
    def offer(self, place: int, parts: Sequence[Part]) -> None:
        """`Transport.offer`."""
        self._at(place).offer(parts)

    @remote()
    def withdraw(self, place: int, parts: Sequence[Part]) -> None:
        """`Transport.withdraw`."""
        self._at(place).withdraw(parts)

    @remote()
    def forget(self, place: int, source: Source) -> None:
        """`Transport.forget`."""
        self._at(place).forget(source)

    @remote(fits=lambda outcomes, _place, _source, copy_specs, _limit_s: len(outcomes) == len(copy_specs))
    async def receive(
        self, place: int, source: Source, copy_specs: Sequence[CopySpec], limit_s: float
    ) -> list[Outcome]:
        """`Transport.receive`, with the seconds until its deadline."""
        deadline = asyncio.get_running_loop().time() + limit_s
        return await self._at(place).receive(source, copy_specs, deadline)

    @remote(fits=one_each)
    async def checksums(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """`checksum_parts`."""
        return await checksum_parts(self._regions, parts)

    def _at(self, place: int) -> Transport:
        if not place < len(self._transports):
            raise ProtocolError("a verb came before its transport was open")
        return self._transports[place]

    def otherwise(self, message: Any, problem: str) -> RunnerError:  # noqa: ARG002 - the contract's
        return RunnerError(problem)

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
    serve(TransferService())
