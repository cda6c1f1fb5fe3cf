"""A transport in one process, for virtual time: bytes really move between regions, and faults are drawn from a seed.

`SimFabric` knows all transports and which of them are cut off from each other, stopped or dead, and draws latencies and
faults. `SimTransport` keeps the whole contract (`transfer/base.py`), offers included, as over a socket. Knows nothing
of instances and messages. Used by simulations and tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import xxhash

from fdasync.cache.store.base import DONE
from fdasync.errors import InvariantBroken
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import SLICE_NBYTES, Transport
from fdasync_fleet.transfer.transfers import Transfer, Transfers
from fdasync_fleet.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    Offers,
    broken,
    check_copy_specs,
    check_source,
    damaged,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync_fleet.transfer.base import CopySpec

_MACHINE = "simulated"


class SimFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, from 0 to 1, that a fault strikes a copy spec; and the speed of copies.

    Attributes:
        corrupt: a bit of the receiver's copy flips.
        fail: the copy fails, transient.
        stall: neither this copy nor a later one of its receive is done before the deadline.
        latency_s: least and most seconds before a copy begins, drawn evenly.
        nbytes_per_s: speed of a copy that has begun.
    """

    corrupt: float = 0.0
    fail: float = 0.0
    stall: float = 0.0
    latency_s: tuple[float, float] = (0.0002, 0.002)
    nbytes_per_s: float = 4e9


class SimFabric:
    """See the module.

    Attributes:
        faults: may be replaced at any time.
        counts: how often each fault has struck, by name.
    """

    def __init__(self, rng: Random, faults: SimFaults | None = None) -> None:
        self.faults = faults or SimFaults()
        self.counts = {"corrupt": 0, "fail": 0, "stall": 0}
        self._rng = rng
        self._opened: dict[bytes, SimTransport] = {}
        self._cut: set[frozenset[SimTransport]] = set()
        self._dead: set[SimTransport] = set()
        self._frozen: set[SimTransport] = set()

    def partition(self, one: SimTransport, other: SimTransport) -> None:
        """Cut two transports off from each other: receives between them wait for `heal` or their deadline."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: SimTransport, other: SimTransport) -> None:
        """The opposite of `partition`."""
        self._cut.discard(frozenset((one, other)))
        self._changed()

    def freeze(self, transport: SimTransport) -> None:
        """Stop a transport like its process: receives from it and by it wait; deadlines still end them."""
        self._frozen.add(transport)

    def thaw(self, transport: SimTransport) -> None:
        """The opposite of `freeze`."""
        self._frozen.discard(transport)
        self._changed()

    def kill(self, transport: SimTransport) -> None:
        """Kill a transport like its process: its memory can be read no more, and its own receives end."""
        self._dead.add(transport)
        transport.transfers.end(CLOSED)
        self._changed()

    def assert_struck(self, *kinds: str) -> None:
        """Raise AssertionError unless each of these faults ("corrupt", "fail", "stall") has struck at least once;
        without names, each fault of a probability above 0."""
        wanted = kinds or tuple([kind for kind in self.counts if getattr(self.faults, kind) > 0])
        missing = [kind for kind in wanted if not self.counts[kind]]
        if not wanted:
            raise AssertionError("no fault of transports was planned")
        if missing:
            struck = ", ".join(f"{kind} {count}" for kind, count in self.counts.items())
            raise AssertionError(f"faults of transports never struck: {', '.join(missing)} (struck: {struck})")

    # -- for SimTransport -----------------------------------------------------------------------------

    def token(self) -> bytes:
        return self._rng.randbytes(16)

    def add(self, token: bytes, transport: SimTransport) -> None:
        self._opened[token] = transport

    def drop(self, token: bytes) -> None:
        self._opened.pop(token, None)
        self._changed()

    def sender(self, token: bytes) -> SimTransport | None:
        """The transport that is read under this token; None: it is gone."""
        found = self._opened.get(token)
        return None if found in self._dead else found

    def silent(self, one: SimTransport, other: SimTransport) -> bool:
        """Whether nothing gets through between these two now."""
        return one in self._frozen or other in self._frozen or frozenset((one, other)) in self._cut

    def strikes(self, fault: str) -> bool:
        """Whether this fault strikes now. A fault of probability 0 draws nothing."""
        chance: float = getattr(self.faults, fault)
        hit = chance > 0 and self._rng.random() < chance
        self.counts[fault] += hit
        return hit

    def latency_s(self) -> float:
        return self._rng.uniform(*self.faults.latency_s)

    def below(self, limit: int) -> int:
        return self._rng.randrange(limit)

    def _changed(self) -> None:
        for transport in list(self._opened.values()):
            transport.transfers.wake()


class SimTransport(Transport):
    """See the module.

    Attributes:
        transfers: receives that are running.
        offers: parts of its regions that can be read.
        regions: of its own instance, while it is open.
    """

    name: ClassVar[str] = "sim"

    def __init__(self, fabric: SimFabric, address: str = "") -> None:
        """`address`: stands in its source, for people."""
        self._fabric = fabric
        self._address = address
        self._source: Source | None = None
        self._closed = False
        self.transfers = Transfers()
        self.offers = Offers()
        self.regions: Sequence[SharedRegion] = ()

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._source is not None or self._closed:
            raise InvariantBroken("a transport is opened once")
        sizes = tuple((place, region.nbytes) for place, region in enumerate(regions))
        self._source = Source(machine=_MACHINE, pid=0, regions=sizes, token=self._fabric.token(), address=self._address)
        self.regions = regions
        self.offers.open(regions)
        self._fabric.add(self._source.token, self)

    def source(self) -> Source:
        if self._source is None or self._closed:
            raise InvariantBroken("only an open transport has a source")
        return self._source

    def offer(self, parts: Sequence[Part]) -> None:
        self.offers.add(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        self.offers.remove(parts)

    def forget(self, source: Source) -> None:
        if not check_source(source):
            self.transfers.end(FORGOTTEN, source.token)

    async def aclose(self) -> None:
        self._closed = True
        self.offers.close()
        if self._source is not None:
            self._fabric.drop(self._source.token)
        self.transfers.end(CLOSED)
        await self.transfers.idle()
        self.regions = ()

    async def receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        if self._source is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(copy_specs)
        problem = check_source(source)
        if not problem and source.machine != _MACHINE:
            problem = "the source is not simulated"
        if problem:
            return [refused(problem)] * len(copy_specs)
        transfer = self.transfers.start(source.token, deadline)
        try:
            outcomes = await check_copy_specs(source, copy_specs, self.regions)
            return [
                outcome or transfer.check() or await self._take(transfer, copy_spec)
                for outcome, copy_spec in zip(outcomes, copy_specs, strict=True)
            ]
        finally:
            self.transfers.finish(transfer)

    async def _take(self, transfer: Transfer, copy_spec: CopySpec) -> Outcome:
        """Copy and check one block. The end of the receive ends all its later blocks too."""
        fabric = self._fabric
        ready_at = transfer.now() + fabric.latency_s()
        if fabric.strikes("stall"):
            ready_at = transfer.deadline
        while True:
            sender = self._sender(transfer)
            if sender is None:
                return transfer.over or LATE
            silent = fabric.silent(self, sender)
            if not silent and transfer.now() >= ready_at:
                break
            await transfer.wait(transfer.deadline if silent else ready_at)
        if fabric.strikes("fail"):
            return broken("a fault was drawn")
        return await self._copy(transfer, copy_spec, spoil=fabric.strikes("corrupt"))

    def _sender(self, transfer: Transfer) -> SimTransport | None:
        """The transport that this receive reads from; None: the receive is over."""
        sender = self._fabric.sender(transfer.token)
        if sender is None:
            transfer.end(broken("the sender is gone"))
        return None if transfer.check() else sender

    async def _copy(self, transfer: Transfer, copy_spec: CopySpec, *, spoil: bool) -> Outcome:
        spoil_at = self._fabric.below(max(sum(part.nbytes for part in copy_spec.parts), 1)) if spoil else -1
        for place, (theirs, part) in enumerate(zip(copy_spec.ref_parts, copy_spec.parts, strict=True)):
            whole = xxhash.xxh3_64()
            for at in range(0, part.nbytes, SLICE_NBYTES):
                sender = self._sender(transfer)
                if sender is None:
                    return transfer.over or LATE
                if theirs not in sender.offers:
                    return refused("a part of the sender's is not on offer")
                nbytes = min(SLICE_NBYTES, part.nbytes - at)
                ours = self.regions[part.region].view(part.offset + at, nbytes)
                with ours, sender.regions[theirs.region].view(theirs.offset + at, nbytes) as from_:
                    ours[:] = from_
                    if 0 <= spoil_at < nbytes:
                        ours[spoil_at] ^= 1 << self._fabric.below(8)
                    whole.update(ours)
                spoil_at -= nbytes
                if nbytes == SLICE_NBYTES:
                    # time passes, so that other events fall into the middle of a copy
                    await transfer.wait(transfer.now() + nbytes / self._fabric.faults.nbytes_per_s)
            if whole.intdigest() != copy_spec.checksums[place]:
                return damaged(place)
        return DONE
