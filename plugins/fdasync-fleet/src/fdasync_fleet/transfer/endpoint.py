"""What transports between processes share: their own source and offers, and the frame of a receive.

Knows no way to a sender. `shm.py`, `tcp.py` and `device.py` extend it.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync_fleet.transfer.base import Transport
from fdasync_fleet.transfer.transfers import Transfers
from fdasync_fleet.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    TOKEN_NBYTES,
    Offers,
    check_copy_specs,
    check_source,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part
    from fdasync_fleet.messages import Source
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer
    from fdasync_fleet.transfer.validation import Region


class Endpoint(Transport):
    """See the module. `open` sets the source and the regions.

    Args:
        token: token of its source, 16 random bytes; None: drawn.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._token = token or os.urandom(TOKEN_NBYTES)
        self._source: Source | None = None
        self._closed = False
        self._regions: Sequence[Region] = ()
        self._offers = Offers()
        self._transfers = Transfers()

    def _check_new(self) -> None:
        if self._source is not None or self._closed:
            raise InvariantBroken("a transport is opened once")

    def source(self) -> Source:
        if self._source is None or self._closed:
            raise InvariantBroken("only an open transport has a source")
        return self._source

    def offer(self, parts: Sequence[Part]) -> None:
        self._offers.add(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        self._offers.remove(parts)

    def forget(self, source: Source) -> None:
        if not check_source(source):
            self._transfers.end(FORGOTTEN, source.token)
            self._drop(source.token)

    @abstractmethod
    def _drop(self, token: bytes) -> None:
        """Drop mappings and connections of a sender, whose receives were ended."""

    async def receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        if self._source is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(copy_specs)
        problem = check_source(source)
        refusal = refused(problem) if problem else self._refusal(source)
        if refusal is not None:
            return [refusal] * len(copy_specs)
        transfer = self._transfers.start(source.token, deadline)
        try:
            outcomes = await check_copy_specs(source, copy_specs, self._regions, self.checksum(b""))
            if None in outcomes and not transfer.check():
                await self._copy(transfer, source, copy_specs, outcomes)
        finally:
            self._transfers.finish(transfer)
        return [outcome or transfer.over or LATE for outcome in outcomes]

    def _refusal(self, source: Source) -> Outcome | None:  # noqa: ARG002 - for the kinds
        """Why nothing can be read from a well-formed source; None where that is to be seen."""
        return None

    @abstractmethod
    async def _copy(
        self, transfer: Transfer, source: Source, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]
    ) -> None:
        """Fill in the outcomes that are None, or end the transfer with what becomes of the rest."""
