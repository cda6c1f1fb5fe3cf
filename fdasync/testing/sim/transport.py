"""A transport in one process, for virtual time: bytes really move between regions, and what fails is drawn from a seed.

`SimFabric` is the machine room: it knows which transports there are, who is cut off from whom, who is stopped or dead,
and draws latencies and faults. `SimTransport` keeps the whole contract (`transfer/base.py`), offers included, as over a
socket. Knows nothing of instances and messages. Used by simulations and by tests of what stands on a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import xxhash

from fdasync.cache.store.base import DONE
from fdasync.errors import InvariantBroken
from fdasync.pd.messages import Source
from fdasync.pd.transfer.base import SLICE_NBYTES, Transport
from fdasync.pd.transfer.transfers import Call, Calls
from fdasync.pd.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    Offers,
    broken,
    check_receipts,
    check_source,
    damaged,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.transfer.base import Receipt

_MACHINE = "simulated"


class SimFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely what is, for each receipt, from 0 to 1.

    Attributes:
        corrupt: a bit of our copy flips.
        fail: it fails, transient.
        stall: nothing of it and of what follows in its call comes before the deadline.
        latency_s: from and to, for each receipt, in seconds; drawn evenly.
        nbytes_per_s: how fast a receive copies, once it does.
    """

    corrupt: float = 0.0
    fail: float = 0.0
    stall: float = 0.0
    latency_s: tuple[float, float] = (0.0002, 0.002)
    nbytes_per_s: float = 4e9


class SimFabric:
    """See the module.

    Attributes:
        faults: in force; may be replaced at any time.
        counts: faults so far, by name.
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
        """Nothing gets through between the two, either way: receives wait until it is healed, or for their deadline."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: SimTransport, other: SimTransport) -> None:
        """The opposite of `partition`."""
        self._cut.discard(frozenset((one, other)))
        self._changed()

    def freeze(self, transport: SimTransport) -> None:
        """As a stopped process: nothing goes on from it or to it; deadlines still end what waits."""
        self._frozen.add(transport)

    def thaw(self, transport: SimTransport) -> None:
        """The opposite of `freeze`."""
        self._frozen.discard(transport)
        self._changed()

    def kill(self, transport: SimTransport) -> None:
        """As a killed process: nobody reads its memory any more, and its own receives end."""
        self._dead.add(transport)
        transport.calls.end(CLOSED)
        self._changed()

    def assert_struck(self, *kinds: str) -> None:
        """Raise AssertionError unless each of these faults ("corrupt", "fail", "stall") has struck at least once;
        without names, all that can happen now."""
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
        """Who can be read under this token; None: nobody."""
        found = self._opened.get(token)
        return None if found in self._dead else found

    def silent(self, one: SimTransport, other: SimTransport) -> bool:
        """Nothing gets through between these now."""
        return one in self._frozen or other in self._frozen or frozenset((one, other)) in self._cut

    def strikes(self, fault: str) -> bool:
        """Whether this fault happens now. A fault that cannot happen draws nothing."""
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
            transport.calls.wake()


class SimTransport(Transport):
    """See the module.

    Attributes:
        calls: receives that are running.
        offers: parts of its regions that can be read.
        regions: its own, while it is open.
    """

    name: ClassVar[str] = "sim"

    def __init__(self, fabric: SimFabric, address: str = "") -> None:
        """`address`: what its source shows, for people."""
        self._fabric = fabric
        self._address = address
        self._source: Source | None = None
        self._closed = False
        self.calls = Calls()
        self.offers = Offers()
        self.regions: Sequence[SharedRegion] = ()

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._source is not None or self._closed:
            raise InvariantBroken("a transport is opened once")
        sizes = tuple((place, region.nbytes) for place, region in enumerate(regions))
        self._source = Source(_MACHINE, 0, sizes, self._fabric.token(), self._address)
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
            self.calls.end(FORGOTTEN, source.token)

    async def aclose(self) -> None:
        self._closed = True
        self.offers.close()
        if self._source is not None:
            self._fabric.drop(self._source.token)
        self.calls.end(CLOSED)
        await self.calls.idle()
        self.regions = ()

    async def receive(self, source: Source, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        if self._source is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(receipts)
        problem = check_source(source)
        if not problem and source.machine != _MACHINE:
            problem = "the source is not simulated"
        if problem:
            return [refused(problem)] * len(receipts)
        call = self.calls.start(source.token, deadline)
        try:
            outcomes = await check_receipts(source, receipts, self.regions)
            return [
                outcome or call.check() or await self._take(call, receipt)
                for outcome, receipt in zip(outcomes, receipts, strict=True)
            ]
        finally:
            self.calls.finish(call)

    async def _take(self, call: Call, receipt: Receipt) -> Outcome:
        """Copy and check one block. What ends the call ends all that follow too."""
        fabric = self._fabric
        ready_at = call.now() + fabric.latency_s()
        if fabric.strikes("stall"):
            ready_at = call.deadline
        while True:
            sender = self._sender(call)
            if sender is None:
                return call.over or LATE
            silent = fabric.silent(self, sender)
            if not silent and call.now() >= ready_at:
                break
            await call.wait(call.deadline if silent else ready_at)
        if fabric.strikes("fail"):
            return broken("a fault was drawn")
        return await self._copy(call, receipt, spoil=fabric.strikes("corrupt"))

    def _sender(self, call: Call) -> SimTransport | None:
        """Whom this call reads from; None: the call is over."""
        sender = self._fabric.sender(call.token)
        if sender is None:
            call.end(broken("nobody answers there"))
        return None if call.check() else sender

    async def _copy(self, call: Call, receipt: Receipt, *, spoil: bool) -> Outcome:
        spoil_at = self._fabric.below(max(sum(part.nbytes for part in receipt.parts), 1)) if spoil else -1
        for place, (theirs, part) in enumerate(zip(receipt.ref_parts, receipt.parts, strict=True)):
            whole = xxhash.xxh3_64()
            for at in range(0, part.nbytes, SLICE_NBYTES):
                sender = self._sender(call)
                if sender is None:
                    return call.over or LATE
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
                    # time passes, so that there is something to be in the middle of
                    await call.wait(call.now() + nbytes / self._fabric.faults.nbytes_per_s)
            if whole.intdigest() != receipt.checksums[place]:
                return damaged(place)
        return DONE
