"""All transports of an instance: what others need to read from it, and which one to read another by.

Memory of the same machine is mapped (`shm`) before a socket is asked (`tcp`). Where mapping fails for good (another
user's process, another container), that source is read over the socket from then on. Knows no messages and no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.region import SharedRegion
    from fdasync.cache.store import Part
    from fdasync.pd.messages import Source
    from fdasync.pd.transport import Receipt, Transport

Sources = tuple[tuple[str, "Source"], ...]


class Carriers:
    """See the module.

    Args:
        transports: in order of preference; owned by this object.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._unfit: set[bytes] = set()

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """See `Transport.open`."""
        for transport in self._transports.values():
            await transport.open(regions)

    def sources(self) -> Sources:
        """For `Hello`."""
        return tuple([(name, transport.source()) for name, transport in self._transports.items()])

    def offer(self, parts: Sequence[Part]) -> None:
        for transport in self._transports.values():
            transport.offer(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        for transport in self._transports.values():
            transport.withdraw(parts)

    async def receive(self, sources: Sources, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        """See `Transport.receive`; "failed" where no transport fits."""
        theirs = dict(sources)
        outcomes = [Outcome("failed", f"no transport in common: it has {', '.join(theirs) or 'none'}")] * len(receipts)
        for name, transport in self._transports.items():
            source = theirs.get(name)
            if source is None or source.token in self._unfit:
                continue
            if name == "shm" and source.machine != transport.source().machine:
                continue
            outcomes = await transport.receive(source, receipts, deadline)
            if receipts and all(outcome.status == "failed" and not outcome.transient for outcome in outcomes):
                # it cannot be read this way: others may
                self._unfit.add(source.token)
                continue
            return outcomes
        return outcomes

    def forget(self, sources: Sources) -> None:
        """A sender went away."""
        for name, source in sources:
            self._unfit.discard(source.token)
            transport = self._transports.get(name)
            if transport is not None:
                transport.forget(source)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()
