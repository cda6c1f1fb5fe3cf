"""Holds all transports of an instance, and chooses the one by which it reads from another instance.

Memory of the same machine is mapped (`shm`) rather than read over a socket (`tcp`). If mapping fails for good (another
user's process, another container), that sender is read over the socket from then on. Knows no messages and no blocks.
Called by the services of `pd/instance`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.base import Outcome
from fdasync.errors import PluginError
from fdasync.pd.transfer.base import Transport
from fdasync.registry.registry import TRANSPORTS, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.messages import Source
    from fdasync.pd.transfer.base import CopySpec

Sources = tuple[tuple[str, "Source"], ...]


def make_transport(name: str) -> Transport:
    """A transport of the plugin of this name. Raises PluginError."""
    # mypy takes an abstract base for a class that is going to be made
    transport = Registry().load(TRANSPORTS, name, Transport)  # type: ignore[type-abstract]
    try:
        return transport()
    except TypeError as error:
        raise PluginError(TRANSPORTS, name, "", f"it cannot be made without arguments: {error}") from error


class Transports:
    """See the module.

    Args:
        transports: the transports, in order of preference; this object closes them.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._unfit: set[bytes] = set()

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """See `Transport.open`."""
        for transport in self._transports.values():
            await transport.open(regions)

    def sources(self) -> Sources:
        """The sources of all transports, for `Hello`."""
        return tuple([(name, transport.source()) for name, transport in self._transports.items()])

    def offer(self, parts: Sequence[Part]) -> None:
        """See `Transport.offer`."""
        for transport in self._transports.values():
            transport.offer(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        """See `Transport.withdraw`."""
        for transport in self._transports.values():
            transport.withdraw(parts)

    async def receive(self, sources: Sources, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        """See `Transport.receive`; all outcomes are "failed" if no transport fits."""
        theirs = dict(sources)
        outcomes = [Outcome("failed", f"no transport in common: it has {', '.join(theirs) or 'none'}")] * len(
            copy_specs
        )
        ways = [
            (transport, theirs[name])
            for name, transport in self._transports.items()
            if name in theirs and (name != "shm" or theirs[name].machine == transport.source().machine)
        ]
        for number, (transport, source) in enumerate(ways):
            last = number == len(ways) - 1
            if source.token in self._unfit and not last:
                continue
            outcomes = await transport.receive(source, copy_specs, deadline)
            hopeless = all(outcome.status == "failed" and not outcome.transient for outcome in outcomes)
            if last or not copy_specs or not hopeless:
                # on the last way, or after any success, the failure is of these blocks: say, withdrawn meanwhile
                return outcomes
            self._unfit.add(source.token)
        return outcomes

    def forget(self, sources: Sources) -> None:
        """See `Transport.forget`."""
        for name, source in sources:
            self._unfit.discard(source.token)
            transport = self._transports.get(name)
            if transport is not None:
                transport.forget(source)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()
