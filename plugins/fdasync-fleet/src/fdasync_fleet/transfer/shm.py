"""The transport between processes of one machine: the receiver maps the sender's regions read-only and copies.

There are no sockets and no wakeups. The sender takes no part in a copy, so a sender that is stopped, or was killed
after it was mapped, can still be read. The last region of a source is a page of the transport's own, the *identity
page* (`shm_peer.py`). It holds the token and the inode of each other region, so that no reused process id or fd is
taken for the sender's.

The receiver hashes each slice of its copy while the CPU's caches hold it, which is faster than hashing a whole block
after it was copied (`benchmarks/fleet/transports.py`). Knows no messages. Made by `transports.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import xxhash

from fdasync.cache.store.base import DONE
from fdasync.errors import InvariantBroken
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import SLICE_NBYTES, Turns
from fdasync_fleet.transfer.endpoint import Endpoint
from fdasync_fleet.transfer.shm_peer import IDENTITY_NBYTES, Peer, make_identity
from fdasync_fleet.transfer.validation import (
    CLOSED,
    LATE,
    MAX_REGIONS,
    TOKEN_NBYTES,
    boot_id,
    damaged,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer


def shm_problem() -> str:
    """Why other processes of this user cannot map our memory; "" if they can, as far as this process can find out."""
    token = os.urandom(TOKEN_NBYTES)
    try:
        if os.lstat(f"/proc/{os.getpid()}").st_uid != os.geteuid():  # blocking: procfs, microseconds
            return "other processes of this user may not look into this one (it is not dumpable)"
        fd = make_identity(token, ())
    except OSError as error:
        return str(error)
    try:
        found = Peer.map(
            Source(machine=boot_id(), pid=os.getpid(), regions=((fd, IDENTITY_NBYTES),), token=token, address="")
        )
    finally:
        os.close(fd)
    if isinstance(found, Peer):
        found.close()
        return ""
    return found.problem


class ShmTransport(Endpoint):
    """See the module.

    Args:
        token: token of its source, 16 random bytes; None: drawn.
    """

    name: ClassVar[str] = "shm"

    _regions: Sequence[SharedRegion]

    def __init__(self, token: bytes | None = None) -> None:
        super().__init__(token)
        self._identity_fd = -1
        # by source, since a peer may send one token with different regions
        self._peers: dict[Source, Peer] = {}

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._check_new()
        if len(regions) >= MAX_REGIONS:
            raise InvariantBroken(f"{len(regions)} regions; a source has at most {MAX_REGIONS - 1}")
        self._identity_fd = make_identity(self._token, [region.fd for region in regions])
        self._regions = regions
        fds = [(region.fd, region.nbytes) for region in regions]
        fds.append((self._identity_fd, IDENTITY_NBYTES))
        self._offers.open(regions)
        self._source = Source(machine=boot_id(), pid=os.getpid(), regions=tuple(fds), token=self._token, address="")

    def _drop(self, token: bytes) -> None:
        for known in [known for known in self._peers if known.token == token]:
            self._peers.pop(known).close()

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        self._transfers.end(CLOSED)
        await self._transfers.idle()
        while self._peers:
            self._peers.popitem()[1].close()
        if self._identity_fd >= 0:
            os.close(self._identity_fd)
            self._identity_fd = -1
        self._regions = ()

    def _refusal(self, source: Source) -> Outcome | None:
        peer = self._peer(source)
        return None if isinstance(peer, Peer) else peer

    async def _copy(
        self, transfer: Transfer, source: Source, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]
    ) -> None:
        # mapped by `_refusal`, and not forgotten since, which ends a transfer
        peer = self._peer(source)
        assert isinstance(peer, Peer)
        turns = Turns()
        for place, copy_spec in enumerate(copy_specs):
            outcomes[place] = outcomes[place] or transfer.check() or await self._take(transfer, turns, peer, copy_spec)

    def _peer(self, source: Source) -> Peer | Outcome:
        """The mappings of a source, made at the first call; or why there are none."""
        # regions may come as lists, which cannot be keys
        source = Source(
            machine=source.machine,
            pid=source.pid,
            regions=tuple([(fd, nbytes) for fd, nbytes in source.regions]),
            token=source.token,
            address="",
        )
        found = self._peers.get(source)
        if found is not None:
            return found
        assert self._source is not None
        if source.machine != self._source.machine:
            return refused("the sender is on another machine: its memory cannot be mapped here")
        made = Peer.map(source)
        if isinstance(made, Peer):
            # a process has one token: a source with other fds under it replaces the earlier one
            self.forget(source)
            self._peers[source] = made
        return made

    async def _take(self, transfer: Transfer, turns: Turns, peer: Peer, copy_spec: CopySpec) -> Outcome:
        """Copy and check one block; no view of memory lives while other tasks run."""
        for place, (theirs, part) in enumerate(zip(copy_spec.ref_parts, copy_spec.parts, strict=True)):
            if theirs.region >= peer.num_regions:
                return refused("a part of the sender's is in no region of blocks")
            whole = xxhash.xxh3_64()
            for at in range(0, part.nbytes, SLICE_NBYTES):
                if transfer.check():
                    return transfer.over or LATE
                nbytes = min(SLICE_NBYTES, part.nbytes - at)
                with self._regions[part.region].view(part.offset + at, nbytes) as ours:
                    with peer.view(theirs.region, theirs.offset + at, nbytes) as from_:
                        ours[:] = from_
                    whole.update(ours)
                await turns.spend(nbytes)
            if whole.intdigest() != copy_spec.checksums[place]:
                return damaged(place)
        return DONE
