"""The transport between devices of one machine: the receiver's worker copies blocks out of the sender's mapped memory.

No byte passes through host memory, and this process touches no device: it hands descriptors from worker to worker
(`device_door.py`), says which blocks to copy, and compares checksums that are computed where the bytes are
(`ipc/peers/sums.py`, instead of XXH3). The sender takes no part in a copy. A sender that was killed after it was mapped
can still be read, since the mapping keeps its memory (`ipc/peers/pool.py`); what was copied then is right or damaged as
its checksum says.

A copy that is launched cannot be stopped, so a receive that was cancelled, or whose deadline has passed, ends when the
copy in hand has: some milliseconds. Knows no messages. Made by instances, which call it through `transports.py`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from fdasync.cache.store.base import DONE
from fdasync.errors import DeadlineExceeded, FdasyncError, RunnerError
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.peers.sums import WORD_NBYTES, block_sums
from fdasync.ipc.remote import Fd
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.device_door import Door, knock
from fdasync_fleet.transfer.endpoint import Endpoint
from fdasync_fleet.transfer.transfers import Transfer
from fdasync_fleet.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    boot_id,
    broken,
    check_source,
    damaged,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.device_blocks import PartPuller

# copied by one call: under a millisecond between two devices, and about ten in host memory
_BATCH_NBYTES = 32 << 20
_OPEN_S = 10.0
# a device that does not end a copy for so long is broken
_PULL_S = 60.0


class _Size(NamedTuple):
    """A region of devices, as far as this process knows it."""

    nbytes: int


class _Peer:
    """A sender: the name that its pools are opened by, and the task that opens them."""

    def __init__(self, name: bytes, call: Transfer) -> None:
        self.name = name
        self.call = call
        self.opening: asyncio.Task[Outcome | None] | None = None
        # copies in flight
        self.pulls = 0

    @property
    def outcome(self) -> Outcome | None:
        """Why it cannot be read, once that is known; None where it can."""
        assert self.opening is not None
        return FORGOTTEN if self.opening.cancelled() else self.opening.result()


class DeviceTransport(Endpoint):
    """See the module. `open` takes no regions of memory: the puller has the regions of its parts. `receive` raises
    DeadlineExceeded, too, where this instance's own device does not end a copy, and DeviceFailed where it is broken.

    Args:
        puller: the instance's devices.
        token: token of its source, 16 random bytes; None: drawn.
    """

    name: ClassVar[str] = "device"

    @staticmethod
    def checksum(data: bytes) -> int:
        """See `ipc/peers/sums.py`."""
        words = np.frombuffer(data.ljust(-(-len(data) // WORD_NBYTES) * WORD_NBYTES, b"\0"), np.uint8)
        return int(block_sums(words[None])[0])

    def __init__(self, puller: PartPuller, token: bytes | None = None) -> None:
        super().__init__(token)
        self._puller = puller
        self._fds: tuple[int, ...] = ()
        self._door: Door | None = None
        self._peers: dict[bytes, _Peer] = {}
        self._named = 0
        self._closing: dict[asyncio.Task[None], None] = {}
        # senders whose pools this instance's devices cannot read
        self._unfit: set[bytes] = set()

    async def open(self, regions: Sequence[SharedRegion]) -> None:  # noqa: ARG002 - the contract's
        """See `Transport`. Raises RunnerError where the devices show no memory."""
        self._check_new()
        exported = await self._puller.export()
        self._fds = exported.fds
        self._regions = [_Size(nbytes) for nbytes in self._puller.sizes]
        self._offers.open(self._regions)
        self._door = Door(self._token, exported)
        sizes = tuple([(0, nbytes) for nbytes in self._puller.sizes])
        self._source = Source(machine=boot_id(), pid=os.getpid(), regions=sizes, token=self._token, address="")

    def _drop(self, token: bytes) -> None:
        self._unfit.discard(token)
        peer = self._peers.pop(token, None)
        if peer is not None:
            task = asyncio.get_running_loop().create_task(self._close(peer), name="fdasync close of a sender")
            self._closing[task] = None
            task.add_done_callback(self._closing.pop)

    async def _close(self, peer: _Peer) -> None:
        assert peer.opening is not None
        peer.call.end(FORGOTTEN)
        await asyncio.wait([peer.opening])
        try:
            await self._puller.close_source(peer.name)
        except FdasyncError:
            # the worker is gone, and its mappings with it; or it hangs, and the engine fails
            return

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        if self._door is not None:
            self._door.close()
        self._transfers.end(CLOSED)
        await self._transfers.idle()
        for token in list(self._peers):
            self._drop(token)
        if self._closing:
            _, left = await wait_within(list(self._closing), _PULL_S)
            if left:
                raise DeadlineExceeded("the end of copies between devices", _PULL_S)
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    # -- the receiver -------------------------------------------------------------------------------

    def prepare(self, source: Source) -> None:
        """Map a sender's pools before the first receive; does nothing where that is done, or cannot be."""
        if self._source is not None and not self._closed and not check_source(source):
            if source.machine != self._source.machine:
                self._unfit.add(source.token)
            elif source.token not in self._unfit:
                self._peer(source.token)

    def reads(self, source: Source) -> bool | None:
        """Whether a sender's devices can be read here; None: that is being found out."""
        peer = self._peers.get(source.token)
        if self._closed or peer is None or source.token in self._unfit:
            return False
        assert peer.opening is not None
        if not peer.opening.done():
            return None
        return peer.outcome is None

    async def prepared(self, source: Source, limit_s: float) -> bool:
        """As `reads`, after waiting for it, bounded."""
        peer = self._peers.get(source.token)
        if peer is not None and peer.opening is not None and not peer.opening.done():
            await wait_within([peer.opening], limit_s)
        return self.reads(source) is True

    def _refusal(self, source: Source) -> Outcome | None:
        assert self._source is not None
        if source.machine == self._source.machine:
            return None
        return refused("the sender is on another machine: its devices cannot be reached from here")

    def _problem(self, copy_spec: CopySpec) -> Outcome | None:
        pairs = zip(copy_spec.ref_parts, copy_spec.parts, strict=True)
        problems = [self._puller.problem(part) for pair in pairs for part in pair if part.nbytes]
        return next((refused(problem) for problem in problems if problem), None)

    async def _copy(
        self,
        transfer: Transfer,
        source: Source,  # noqa: ARG002 - known by its token
        copy_specs: Sequence[CopySpec],
        outcomes: list[Outcome | None],
    ) -> None:
        for place, outcome in enumerate(outcomes):
            if outcome is None:
                outcomes[place] = self._problem(copy_specs[place])
        if None not in outcomes:
            return
        peer = self._peer(transfer.token)
        opening = peer.opening
        assert opening is not None
        if not opening.done():
            opening.add_done_callback(lambda _: transfer.wake())
        while not opening.done() and transfer.check() is None:
            await transfer.wait(transfer.deadline)
        if transfer.check() is None and peer.outcome is not None:
            transfer.end(self._unopened(transfer.token, peer, peer.outcome))
        for batch in _batches(copy_specs, outcomes):
            if transfer.check() is not None:
                return
            try:
                await self._pull(peer, copy_specs, batch, outcomes)
            except RunnerError as error:
                self._unfit.add(transfer.token)
                transfer.end(refused(f"the sender's device cannot be read: {error}"))

    def _unopened(self, token: bytes, peer: _Peer, why: Outcome) -> Outcome:
        """Note that a sender's pools were not opened; a later receive tries again."""
        if self._peers.get(token) is peer:
            del self._peers[token]
        if not why.transient:
            self._unfit.add(token)
        return why

    async def _pull(
        self, peer: _Peer, copy_specs: Sequence[CopySpec], batch: list[int], outcomes: list[Outcome | None]
    ) -> None:
        """Copy and check the copy specs of these numbers. Ends with the copies, also when it is cancelled."""
        pairs = [
            (place, theirs, ours)
            for number in batch
            for place, (theirs, ours) in enumerate(
                zip(copy_specs[number].ref_parts, copy_specs[number].parts, strict=True)
            )
            if ours.nbytes
        ]
        pulled = self._puller.pull(peer.name, [theirs for _, theirs, _ in pairs], [ours for _, _, ours in pairs])
        sums = iter(await _whole(pulled))
        for number in batch:
            wrong = -1
            for place, part in enumerate(copy_specs[number].parts):
                if part.nbytes and next(sums) != copy_specs[number].checksums[place] and wrong < 0:
                    wrong = place
            outcomes[number] = DONE if wrong < 0 else damaged(wrong)

    # -- senders --------------------------------------------------------------------------------------

    def _peer(self, token: bytes) -> _Peer:
        """A sender, whose pools are being opened from the first call on."""
        peer = self._peers.get(token)
        if peer is not None and peer.opening is not None and peer.opening.done() and peer.outcome is not None:
            # it could not be opened: try again
            peer = None
        if peer is None:
            self._named += 1
            loop = asyncio.get_running_loop()
            # a name of its own: the same sender may be opened again while it is being closed
            peer = _Peer(token[:8] + self._named.to_bytes(8, "little"), Transfer(token, loop.time() + _OPEN_S))
            peer.opening = loop.create_task(self._open(peer, token), name="fdasync open of a sender")
            self._peers[token] = peer
        return peer

    async def _open(self, peer: _Peer, token: bytes) -> Outcome | None:
        """Map a sender's pools; returns why that failed, None when it is done."""
        try:
            exported = await knock(peer.call, token)
        except TimeoutError:
            return peer.call.over or LATE
        except PermissionError as error:
            return refused(str(error))
        except OSError as error:
            return broken(f"the sender cannot be read: {error}")
        except ValueError as error:
            return refused(f"the sender's answer cannot be read: {error}")
        try:
            await self._puller.open(peer.name, exported.pools, [Fd(fd) for fd in exported.fds])
        except FdasyncError as error:
            return refused(f"the sender's device cannot be read: {error}")
        finally:
            for fd in exported.fds:
                os.close(fd)
        return None


def _batches(copy_specs: Sequence[CopySpec], outcomes: Sequence[Outcome | None]) -> list[list[int]]:
    """Numbers of the copies without an outcome, in batches that are copied at once."""
    batches: list[list[int]] = []
    nbytes = _BATCH_NBYTES
    for number, outcome in enumerate(outcomes):
        if outcome is None:
            size = sum([part.nbytes for part in copy_specs[number].parts])
            if nbytes + size > _BATCH_NBYTES:
                batches.append([])
                nbytes = 0
            batches[-1].append(number)
            nbytes += size
    return batches


async def _whole(pulled: asyncio.Future[list[int]]) -> list[int]:
    """Wait for the end of copies even when cancelled: until then they write to the receiver's memory.

    Raises DeadlineExceeded where the device does not end them.
    """
    until = asyncio.get_running_loop().time() + _PULL_S
    cancelled: asyncio.CancelledError | None = None
    while not pulled.done():
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("a copy of blocks between devices", _PULL_S)
        try:
            await wait_within([pulled], left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return pulled.result()  # it is done
