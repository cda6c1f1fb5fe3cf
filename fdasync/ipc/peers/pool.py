"""Memory with rows of KV blocks that other processes of one machine read by mappings of their own: a contract.

A process exports its pool as a file descriptor, which others get by SCM_RIGHTS. Each maps the memory once and copies
out of it; the exporting process takes no part in a copy. **A mapping keeps the memory alive**: after the exporting
process closed, or was killed in mid-copy, mappings stay valid, and copies out of them complete. So a reader cannot fail
by the death of a process that it reads from. No reader ever names a peer's memory as the target of a copy.

`ipc/peers/memory.py` is the kind for host memory, `gpu/peer_pool.py` that for devices of CUDA. A pool knows bytes, and
neither blocks nor ranks; `ipc/peers/rows.py` knows those, and calls it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from fdasync.errors import DeadlineExceeded, InvariantBroken, RunnerError
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.futures import pass_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_CLOSE_S: Final = 10.0

#: what a pool makes of a peer's descriptor
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Copies(Generic[Opened]):
    """Runs of bytes to copy out of a peer's memory.

    Attributes:
        peer: the memory, as `open` returned it.
        sources: int64 [runs], places in the peer's memory.
        targets: int64 [runs], places in this pool's memory; the runs of a call do not overlap there.
        nbytes: int64 [runs].
    """

    peer: Opened
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    nbytes: NDArray[np.int64]


@dataclass(frozen=True)
class Sums:
    """Runs of bytes of this pool's memory to check.

    Attributes:
        places: int64 [runs], of the first byte.
        nbytes: of each run, whole words.
        first_nbytes: where in its block each run begins (`ipc/peers/sums.py`).
    """

    places: NDArray[np.int64]
    nbytes: int
    first_nbytes: int


class PeerPool(ABC, Generic[Opened]):
    """See the module. Used from one loop. Places are bytes from the beginning of a memory.

    Attributes:
        kind: pools of one kind can open each other's memory.
        nbytes: of this pool's memory.
    """

    kind: ClassVar[str]
    nbytes: int

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._work: dict[asyncio.Future[list[int]], None] = {}
        self._closed = False

    @abstractmethod
    def export(self) -> int:
        """A new descriptor of this pool's memory, the caller's to close. Raises RunnerError."""

    @abstractmethod
    def open(self, fd: int, nbytes: int) -> Opened:
        """Map a peer's memory; its first `nbytes` bytes are used. The descriptor stays the caller's, who may close it.

        Raises RunnerError where the descriptor is none of this kind, the memory is smaller, or this device does not
        reach it."""

    @abstractmethod
    def close_peer(self, opened: Opened) -> None:
        """Undo `open`. No copy out of it may be in flight."""

    def launch(self, copies: Sequence[Copies[Opened]], sums: Sequence[Sums]) -> asyncio.Future[list[int]]:
        """Copy, and then compute checksums of this pool's memory, including the copied bytes; when all is done the
        future has the sum of each run, run after run.

        Cancelling the future stops the waiting, and not the copies: only a future that was not cancelled tells when
        they have ended. The caller has checked all places. The future fails with RunnerError when none of the copies
        runs any more, also where only some could be launched; with DeviceFailed some of them may still run.

        Raises InvariantBroken after `aclose`.
        """
        if self._closed:
            raise InvariantBroken("copies after the close of a pool")
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        work = self._begin(copies, sums)
        self._work[work] = None
        work.add_done_callback(partial(self._ended, done))
        return done

    @abstractmethod
    def _begin(self, copies: Sequence[Copies[Opened]], sums: Sequence[Sums]) -> asyncio.Future[list[int]]:
        """Begin what `launch` was asked for. The future ends with the work, and is cancelled by no caller."""

    def _ended(self, done: asyncio.Future[list[int]], work: asyncio.Future[list[int]]) -> None:
        del self._work[work]
        pass_on(work, done, RunnerError("the pool was closed"))

    async def aclose(self) -> None:
        """Wait, bounded, for what is in flight; idempotent. The owner frees the memory after it; peers that have mapped
        it keep it. Raises DeadlineExceeded."""
        self._closed = True
        if self._work:
            await wait_within(list(self._work), _CLOSE_S)
        if self._work:
            raise DeadlineExceeded(f"{len(self._work)} copies from peers", _CLOSE_S)
