"""Defines a `Transport`, by which an instance copies blocks out of another instance's memory: a contract.

`fdasync_fleet.testing.TransportTests` checks its sentences. Built in are `shm.py` (one machine) and `tcp.py`. A
transport knows no requests, leases and messages: the services of `instance/` decide which blocks are copied when, and
call it through `transports.py`.

**Two sides.** Blocks lie in shared regions as runs of bytes (`Part`). The *sender* has computed them. It sends their
places and checksums in messages, and keeps them unchanged until the receiver has taken them or the lease is over. The
*receiver* copies: it names parts of the sender's regions and parts of its own of the same sizes (`CopySpec`). No
instance can write to another's memory. One transport object is both sides.

**Whole and checked, or not at all.** A copy is "done" when every part is in place and the checksum (XXH3-64, unless the
transport says otherwise) of the receiver's own copy of each equals the sender's. This guards against a sender that used
its memory again too early. After any other outcome the content of the receiver's parts is undefined.

**The end of `receive` is the end of its use of the parts.** After `receive` returned or was cancelled, the transport
neither reads nor writes the parts of that call, keeps no reference to them, and drops bytes that still arrive for them.
`receive` ends at its deadline, after the slice in hand. During the call no other code touches the receiver's parts, and
the parts of concurrent calls do not overlap.

**Errors.** Each copy has an `Outcome`: "done"; "damaged" (a checksum is wrong); or "failed" with a problem. A failure
is transient if the sender does not answer in time or went away, and not transient if a part is malformed or not on
offer. `receive` raises InvariantBroken only, if this side broke the contract: the transport was never opened, or the
deadline is not finite. A `Source` and the sender's parts and checksums come from a peer: whatever their values, the
transport touches no memory outside of the receiver's parts, and allocates none by their sizes.

**On offer.** Over a socket, only parts that are on offer can be read, each as a whole and by exactly its numbers.
Offers are counted: a part that was offered twice must be withdrawn twice. A receiver that maps memory (`shm.py`) can
read all of a sender's regions: there offers are advice, and only processes of one user can map each other's memory.

**Fair.** Any number of receives run at a time. None waits for another, whatever their sizes, and however slow, stopped
or dead a sender is. Copies and checksums are made in slices; none holds the loop for long.
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
    from fdasync_fleet.messages import Source

#: bytes hashed or copied at a time: few enough to be in the CPU's caches when they are read the second time
SLICE_NBYTES = 256 << 10
#: bytes that one callback of the loop moves: some 0.1 ms, twice that if pages are touched for the first time
TURN_NBYTES = 512 << 10
# cost of a part besides its bytes, as bytes
_PART_NBYTES = 8 << 10


class CopySpec(msgspec.Struct, frozen=True, array_like=True):
    """One block to copy.

    Attributes:
        ref_parts: parts of the sender's regions, as the sender named them.
        parts: parts of our regions: as many, of the same sizes; no two of a call overlap.
        checksums: of each part, from the sender (`Transport.checksum`).
    """

    ref_parts: tuple[Part, ...]
    parts: tuple[Part, ...]
    checksums: tuple[int, ...]


class Transport(ABC):
    """See the module. Call `open` once, the other methods any number of times and at the same time, `aclose` once or
    more. Used from one loop.

    Attributes:
        name: the transport's name in `Hello.sources`; two instances use a transport that both have.
        needs_trust: processes that show nothing may reach what it copies, on the way or in memory of its own. An
            instance has it only where its user says that the network is trusted (`Instance(trusted_network=True)`).
        takes_host: it is made with the address at which this side is reached, in numbers, and `keyed=True`, where links
            have keys; else without arguments.
    """

    name: ClassVar[str]
    needs_trust: ClassVar[bool] = False
    takes_host: ClassVar[bool] = False

    @staticmethod
    def checksum(data: bytes) -> int:
        """The checksum of a part with these bytes, as this transport compares it; this one is XXH3-64."""
        return xxhash.xxh3_64_intdigest(data)

    @abstractmethod
    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Be ready as sender and receiver. The caller keeps the regions mapped until `aclose` has returned.

        Raises OSError (no port, no fd), InvariantBroken if it is open already; `aclose` is called after that too.
        """

    @abstractmethod
    def source(self) -> Source:
        """The source from which others read our blocks; the same from `open` to `aclose`. Raises InvariantBroken before
        and after."""

    @abstractmethod
    async def receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        """Copy blocks from a sender; returns one outcome for each, in order. `deadline` is a time of the loop's clock.

        Raises InvariantBroken before `open` and for a deadline that is not finite, and no error for any act of a peer.
        After `aclose` all outcomes are "failed". Cancelling ends it at once: the parts are the caller's again when
        CancelledError is raised.
        """

    @abstractmethod
    def offer(self, parts: Sequence[Part]) -> None:
        """Let others read these parts of our regions. Raises InvariantBroken for a part outside of them; then none of
        these is on offer."""

    @abstractmethod
    def withdraw(self, parts: Sequence[Part]) -> None:
        """Undo one `offer`. After the last one for a part the transport no longer reads it for others; a copy that is
        under way ends "damaged" or "failed". Raises InvariantBroken for a part that is not on offer; then none is
        withdrawn. Does nothing after `aclose`."""

    @abstractmethod
    def forget(self, source: Source) -> None:
        """Drop the mappings and connections of a sender that went away; idempotent, also for an unknown sender.

        Receives from it that run fail soon after. A later receive starts anew."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the transport: receives that run fail. On return it has no listener and no mapping, and reads no
        memory. Idempotent; may be called after a failed `open`, and without one."""


class Turns:
    """Shares the loop: `await spend(nbytes)` after each slice lets other tasks run after `TURN_NBYTES`.

    Counts bytes instead of time, so that simulations are the same in every run.
    """

    def __init__(self) -> None:
        self._spent = 0

    async def spend(self, nbytes: int) -> None:
        """Count bytes that were moved or hashed."""
        self._spent += nbytes + _PART_NBYTES
        if self._spent >= TURN_NBYTES:
            self._spent = 0
            await asyncio.sleep(0)


async def checksum_parts(regions: Sequence[SharedRegion], parts: Sequence[Part]) -> tuple[int, ...]:
    """XXH3-64 of each part, made in slices. Other tasks run in between and must not write to the parts.

    Raises InvariantBroken for a part outside of the regions. Cancelling stops it; it keeps no reference.
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
