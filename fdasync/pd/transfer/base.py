"""What a transport is: how an instance copies blocks out of another one's memory. A specification, and a checksum.

`fdasync.testing.TransportTests` checks its sentences. Built in: `shm.py` (the same machine), `tcp.py`. It knows
nothing of requests, leases and messages: who may copy what when is the affair of those who call it, the instances'
services of `fdasync/pd`.

**Two sides.** Blocks lie in shared regions as runs of bytes (`Part`). The *sender* has computed them: it says in
messages where they lie and what their checksums are, and keeps them as they are until it hears that they were taken,
or the lease is over. The *receiver* copies: it names parts of the sender's and parts of its own of the same sizes
(`Receipt`). No instance can write into another one's memory. One transport object is both sides.

**Whole and checked, or not at all.** A receipt is "done" when every part is in place and the XXH3-64 of each, taken
over the receiver's own copy after it was made, is what the sender said. That is the guard against a sender that used
its memory again too early. Unless "done", what our parts hold afterwards is undefined.

**The end of a verb is the end of its use of the parts.** However `receive` ends - it returns or is cancelled - the
transport neither reads nor writes the parts of that call any more, keeps no reference to them, and what still comes
from the sender never gets there. It ends at its deadline at the latest, but for the slice in hand. During the call
nobody else touches our parts; those of several calls at a time do not overlap.

**Errors.** What concerns one receipt is its `Outcome`: "done"; "damaged" (a checksum is wrong); "failed", with the
problem, transient or not: a peer that does not answer by the deadline or went away is transient; what is malformed or
not on offer is not. `receive` raises nothing but InvariantBroken, where this side broke the contract: it was never
opened, or the deadline is not a finite number. A `Source` and the sender's parts and checksums are a peer's words:
whatever they say, nothing is read or written outside of our parts, and no memory is taken by their size.

**On offer.** Over a socket only parts can be read that are on offer, each as a whole and by exactly these numbers. It
is counted: what was offered twice is withdrawn twice. Who maps memory (`shm.py`) can read all of a sender's regions:
there the offers are advice, and only processes of one user can map each other's memory at all.

**Fair.** Any number of receives run at a time and none waits for another, whatever their sizes and whoever of the
senders is slow, stopped or gone. Copies and checksums are made in slices, none of which holds the loop for long.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec
import xxhash

from fdasync.ipc.shared_memory import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync.pd.messages import Source

#: what is hashed or copied in one go: it is in the CPU's caches when it is read the second time
SLICE_NBYTES = 256 << 10
#: what one callback of the loop moves: some 0.1 ms, twice that where pages are touched for the first time
TURN_NBYTES = 512 << 10
# what a part costs besides its bytes
_PART_NBYTES = 8 << 10


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """One block to copy.

    Attributes:
        ref_parts: where it lies in the sender's regions, as the sender said.
        parts: where it goes in ours: as many, of the same sizes; no two of a call overlap.
        checksums: XXH3-64 of each part, as the sender said.
    """

    ref_parts: tuple[Part, ...]
    parts: tuple[Part, ...]
    checksums: tuple[int, ...]


class Transport(ABC):
    """See the module. Life: `open` once, verbs any number of times and at the same time, `aclose` once or more.

    Used from one loop.
    """

    name: ClassVar[str]

    @abstractmethod
    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Be ready for both sides. The regions stay the caller's, who keeps them mapped until `aclose` returned.

        Raises OSError (no port, no fd), InvariantBroken if it is open already; `aclose` is called then too.
        """

    @abstractmethod
    def source(self) -> Source:
        """What others need to read from us: the same from `open` to `aclose`. Raises InvariantBroken outside of it."""

    @abstractmethod
    async def receive(self, source: Source, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        """Copy blocks from a sender; one outcome for each, in order. `deadline` in the loop's time.

        Raises nothing for what a peer says or does; InvariantBroken before `open`, and for a deadline that is not
        finite. After `aclose` all are "failed".
        Cancelling it ends it at once: the parts are the caller's again when CancelledError is raised.
        """

    @abstractmethod
    def offer(self, parts: Sequence[Part]) -> None:
        """These parts of our regions can be read from now on. Raises InvariantBroken for one outside of them, and
        then none is on offer."""

    @abstractmethod
    def withdraw(self, parts: Sequence[Part]) -> None:
        """The opposite, once for each `offer`: nothing of them is read from our memory after the last one, and
        who is in the middle of it ends up "damaged" or "failed". Raises InvariantBroken for what is not on offer, and
        then nothing is withdrawn; after `aclose` it does nothing."""

    @abstractmethod
    def forget(self, source: Source) -> None:
        """Drop the mappings and connections of a sender that went away; idempotent, fine for one never seen.

        Receives from it that are running fail, soon after. A later receive starts anew."""

    @abstractmethod
    async def aclose(self) -> None:
        """End everything, in order; receives that are running fail. On return nothing of ours is listening, mapped or
        read any more, by this object. Idempotent; right after a failed `open` too, and without one."""


class Turns:
    """Shares the loop: `await spend(nbytes)` after each slice lets others run when this one has had its turn.

    Counts bytes and not time, so that simulations stay the same from run to run.
    """

    def __init__(self) -> None:
        self._spent = 0

    async def spend(self, nbytes: int) -> None:
        """So many bytes were moved or hashed."""
        self._spent += nbytes + _PART_NBYTES
        if self._spent >= TURN_NBYTES:
            self._spent = 0
            await asyncio.sleep(0)


async def checksum_parts(regions: Sequence[SharedRegion], parts: Sequence[Part]) -> tuple[int, ...]:
    """XXH3-64 of each part, in slices; others run in between, so nobody may write there meanwhile.

    Raises InvariantBroken for a part outside of the regions. Cancelling it stops it; it keeps no reference.
    """
    turns = Turns()
    sums = []
    for part in parts:
        whole = xxhash.xxh3_64()
        for at in range(0, part.nbytes, SLICE_NBYTES):
            nbytes = min(SLICE_NBYTES, part.nbytes - at)
            with regions[part.region].view(part.offset + at, nbytes) as view:
                whole.update(view)
            await turns.spend(nbytes)
        sums.append(whole.intdigest())
    return tuple(sums)
