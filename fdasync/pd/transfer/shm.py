"""The transport between processes of one machine: the receiver maps the sender's regions, read-only, and copies.

No sockets, no wakeups: the sender takes no part in it, so one that is stopped, or was killed after it was mapped, can
still be read. The last of a source's regions is a page of the transport's own, the *identity page* (`shm_peer.py`):
it holds the token and says which memory each of the other file descriptors is, so that neither a process id nor an fd
that is used again passes for what was meant. Knows no messages. Made by whoever runs an instance.

Copying slice by slice and hashing each slice of our copy while the caches hold it beats copying a block and then
hashing it: see `benchmarks/transports.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import xxhash

from fdasync.cache.store.base import DONE
from fdasync.errors import InvariantBroken
from fdasync.pd.messages import Source
from fdasync.pd.transfer.base import SLICE_NBYTES, Transport, Turns
from fdasync.pd.transfer.shm_peer import IDENTITY_NBYTES, Peer, make_identity
from fdasync.pd.transfer.transfers import Calls
from fdasync.pd.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    MAX_REGIONS,
    TOKEN_NBYTES,
    Offers,
    boot_id,
    check_receipts,
    check_source,
    damaged,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.transfer.base import Receipt
    from fdasync.pd.transfer.transfers import Call


def shm_problem() -> str:
    """Why other processes of this user cannot map memory of ours; "" if they can, as far as we can tell."""
    token = os.urandom(TOKEN_NBYTES)
    try:
        if os.lstat(f"/proc/{os.getpid()}").st_uid != os.geteuid():  # blocking: procfs, microseconds
            return "other processes of this user may not look into this one (it is not dumpable)"
        fd = make_identity(token, ())
    except OSError as error:
        return str(error)
    try:
        found = Peer.map(Source(boot_id(), os.getpid(), ((fd, IDENTITY_NBYTES),), token, ""))
    finally:
        os.close(fd)
    if isinstance(found, Peer):
        found.close()
        return ""
    return found.problem


class ShmTransport(Transport):
    """See the module.

    Args:
        token: of its source, 16 random bytes; drawn unless given.
    """

    name: ClassVar[str] = "shm"

    def __init__(self, token: bytes | None = None) -> None:
        self._token = token or os.urandom(TOKEN_NBYTES)
        self._source: Source | None = None
        self._closed = False
        self._regions: Sequence[SharedRegion] = ()
        self._identity_fd = -1
        self._calls = Calls()
        self._offers = Offers()
        # by source: a token may be told with other regions, and is another source then
        self._peers: dict[Source, Peer] = {}

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._source is not None or self._closed:
            raise InvariantBroken("a transport is opened once")
        if len(regions) >= MAX_REGIONS:
            raise InvariantBroken(f"{len(regions)} regions; a source has at most {MAX_REGIONS - 1}")
        self._identity_fd = make_identity(self._token, [region.fd for region in regions])
        self._regions = regions
        fds = [(region.fd, region.nbytes) for region in regions]
        fds.append((self._identity_fd, IDENTITY_NBYTES))
        self._offers.open(regions)
        self._source = Source(boot_id(), os.getpid(), tuple(fds), self._token, "")

    def source(self) -> Source:
        if self._source is None or self._closed:
            raise InvariantBroken("only an open transport has a source")
        return self._source

    def offer(self, parts: Sequence[Part]) -> None:
        self._offers.add(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        self._offers.remove(parts)

    def forget(self, source: Source) -> None:
        if check_source(source):
            return
        self._calls.end(FORGOTTEN, source.token)
        for known in [known for known in self._peers if known.token == source.token]:
            self._peers.pop(known).close()

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        self._calls.end(CLOSED)
        await self._calls.idle()
        while self._peers:
            self._peers.popitem()[1].close()
        if self._identity_fd >= 0:
            os.close(self._identity_fd)
            self._identity_fd = -1
        self._regions = ()

    async def receive(self, source: Source, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        if self._source is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(receipts)
        problem = check_source(source)
        if problem:
            return [refused(problem)] * len(receipts)
        peer = self._peer(source)
        call = self._calls.start(source.token, deadline)
        turns = Turns()
        try:
            outcomes = await check_receipts(source, receipts, self._regions)
            if not isinstance(peer, Peer):
                return [outcome or peer for outcome in outcomes]
            return [
                outcome or call.check() or await self._take(call, turns, peer, receipt)
                for outcome, receipt in zip(outcomes, receipts, strict=True)
            ]
        finally:
            self._calls.finish(call)

    def _peer(self, source: Source) -> Peer | Outcome:
        """Its mappings, made when they are first needed; or why there are none."""
        # a list is as good as a tuple from the wire, but is no key
        source = Source(
            source.machine, source.pid, tuple([(fd, nbytes) for fd, nbytes in source.regions]), source.token, ""
        )
        found = self._peers.get(source)
        if found is not None:
            return found
        assert self._source is not None
        if source.machine != self._source.machine:
            return refused("the sender is on another machine: its memory cannot be mapped here")
        made = Peer.map(source)
        if isinstance(made, Peer):
            # one process, one token: whoever shows other fds under it has opened anew, or lies
            self.forget(source)
            self._peers[source] = made
        return made

    async def _take(self, call: Call, turns: Turns, peer: Peer, receipt: Receipt) -> Outcome:
        """Copy and check one block; no view of anything lives while others run."""
        for place, (theirs, part) in enumerate(zip(receipt.ref_parts, receipt.parts, strict=True)):
            if theirs.region >= peer.num_regions:
                return refused("a part of the sender's is in no region of blocks")
            whole = xxhash.xxh3_64()
            for at in range(0, part.nbytes, SLICE_NBYTES):
                if call.check():
                    return call.over or LATE
                nbytes = min(SLICE_NBYTES, part.nbytes - at)
                with self._regions[part.region].view(part.offset + at, nbytes) as ours:
                    with peer.view(theirs.region, theirs.offset + at, nbytes) as from_:
                        ours[:] = from_
                    whole.update(ours)
                await turns.spend(nbytes)
            if whole.intdigest() != receipt.checksums[place]:
                return damaged(place)
        return DONE
