"""A pool in host memory (a memfd) that other processes map: the device of runners that compute on a CPU.

Peers map it read-only. Copies run on the caller's loop, in slices between which other work runs, so a sender can be
killed in mid-copy here as it can on a device. Knows no blocks. Made by runners; see `ipc/peers/pool.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fdasync.errors import RunnerError
from fdasync.ipc.peers.pool import PeerPool
from fdasync.ipc.peers.sums import block_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.ipc.peers.pool import Copies, Sums
    from fdasync.ipc.shared_memory import SharedRegion

# copied between two turns of the loop: about 0.2 ms
_SLICE_NBYTES = 1 << 20


class PeerMemory:
    """A peer's memory, mapped read-only.

    Attributes:
        view: uint8 [nbytes].
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises RunnerError unless the descriptor is a memfd that cannot shrink, and is large enough."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size < nbytes:
                raise RunnerError(f"a peer's memory has {size} bytes, {nbytes} are needed, or may shrink")
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise RunnerError(f"a peer's memory cannot be mapped: {error}") from error
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmap it; idempotent."""
        self.view = np.empty(0, np.uint8)
        self._map.close()


class MemoryPool(PeerPool[PeerMemory]):
    """See the module. `region` is the caller's, and stays mapped until `aclose` has returned."""

    kind: ClassVar[str] = "memory"

    def __init__(self, region: SharedRegion) -> None:
        super().__init__(region.nbytes)
        self._region = region
        self._view: NDArray[np.uint8] = np.frombuffer(region.map, np.uint8)

    def export(self) -> int:
        try:
            return os.dup(self._region.fd)
        except OSError as error:
            raise RunnerError(f"the pool cannot be exported: {error}") from error

    def open(self, fd: int, nbytes: int) -> PeerMemory:
        return PeerMemory(fd, nbytes)

    def close_peer(self, opened: PeerMemory) -> None:
        opened.close()

    def _begin(self, copies: Sequence[Copies[PeerMemory]], sums: Sequence[Sums]) -> asyncio.Future[list[int]]:
        return asyncio.get_running_loop().create_task(self._perform(copies, sums), name="fdasync copies from a peer")

    async def _perform(self, copies: Sequence[Copies[PeerMemory]], sums: Sequence[Sums]) -> list[int]:
        for batch in copies:
            for source, target, nbytes in zip(
                batch.sources.tolist(), batch.targets.tolist(), batch.nbytes.tolist(), strict=True
            ):
                for at in range(0, nbytes, _SLICE_NBYTES):
                    count = min(_SLICE_NBYTES, nbytes - at)
                    self._view[target + at : target + at + count] = batch.peer.view[source + at : source + at + count]
                    # not for its own sake: steps and other peers' copies take their turns
                    await asyncio.sleep(0)
        found: list[int] = []
        for wanted in sums:
            for place in wanted.places.tolist():
                run = self._view[place : place + wanted.nbytes]
                found += block_sums(run[None], wanted.first_nbytes).tolist()
                await asyncio.sleep(0)
        return found

    async def aclose(self) -> None:
        await super().aclose()
        self._view = np.empty(0, np.uint8)
