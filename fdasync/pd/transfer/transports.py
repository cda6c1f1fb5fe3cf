"""All transports of an instance: what others need to read from it, and which one to read another by.

Memory of the same machine is mapped (`shm`) before a socket is asked (`tcp`). Where mapping fails for good (another
user's process, another container), that source is read over the socket from then on. Knows no messages and no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.base import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.messages import Source
    from fdasync.pd.transfer.base import Receipt, Transport

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
        ways = [
            (transport, theirs[name])
            for name, transport in self._transports.items()
            if name in theirs and (name != "shm" or theirs[name].machine == transport.source().machine)
        ]
        for number, (transport, source) in enumerate(ways):
            last = number == len(ways) - 1
            if source.token in self._unfit and not last:
                continue
            outcomes = await transport.receive(source, receipts, deadline)
            hopeless = all(outcome.status == "failed" and not outcome.transient for outcome in outcomes)
            if last or not receipts or not hopeless:
                # where there is no other way, what failed were these blocks: taken back meanwhile, say
                return outcomes
            self._unfit.add(source.token)
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
