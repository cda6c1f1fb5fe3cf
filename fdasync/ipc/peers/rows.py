"""One process's blocks for other instances: what is copied from a run of a peer's row, and where it goes.

A block's run in this process may lie in the rows of several processes of the other instance, or be a part of one row.
Knows no bytes and no device: `PeerPool` copies. Made by runners; in a group `runner/group/peer_blocks.py` adds up what
the processes answer.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdasync.errors import DeadlineExceeded, InvariantBroken, RunnerError
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.futures import failed, pass_on
from fdasync.ipc.peers.blocks import Exported, PeerBlocks
from fdasync.ipc.peers.pool import Copies, Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fdasync.ipc.peers.blocks import BlockPull, PoolExport
    from fdasync.ipc.peers.pool import PeerPool
    from fdasync.ipc.remote import Fd

_IDLE_S = 60.0


class _Run(NamedTuple):
    """A run of every block that comes from one peer process.

    Attributes:
        peer: its memory, opened.
        pool: the peer's rows.
        offset, nbytes: of the run in a block.
    """

    peer: Any
    pool: PoolExport
    offset: int
    nbytes: int


class _Source:
    """Another instance.

    Attributes:
        peers: memory of its processes, opened.
        runs: what makes up this process's part of a block.
        num_blocks: blocks that it has.
        pulls: copies in flight.
    """

    def __init__(self) -> None:
        self.peers: list[Any] = []
        self.runs: list[_Run] = []
        self.num_blocks = 0
        self.pulls: dict[asyncio.Future[list[int]], None] = {}


class PeerRows(PeerBlocks):
    """See the module and `PeerBlocks`.

    Args:
        pool: the memory, the caller's.
        own: the rows in it.
        on_pulled: called with each pull whose copies have ended, before its future is done.
        check: raises InvariantBroken for a pull that may not begin now.
    """

    def __init__(
        self,
        pool: PeerPool[Any],
        own: PoolExport,
        on_pulled: Callable[[BlockPull], None] = lambda _: None,
        check: Callable[[BlockPull], None] = lambda _: None,
    ) -> None:
        own.check()
        self._pool = pool
        self._own = own
        self._on_pulled = on_pulled
        self._check = check
        self._sources: dict[bytes, _Source] = {}

    async def export(self) -> Exported:
        return Exported((self._own,), (self._pool.export(),))

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None:
        if source in self._sources:
            raise InvariantBroken("another instance's pools are open under this name")
        opened = _Source()
        try:
            for pool in pools:
                self._check_pool(pool)
            opened.num_blocks = min(pool.num_blocks for pool in pools)
            at, end = self._own.held_offset, self._own.held_offset + self._own.held
            # blocking: maps, once for each peer
            for pool, fd in sorted(zip(pools, fds, strict=True), key=lambda pair: pair[0].offset):
                stop = min(pool.offset + pool.part, end)
                if pool.writes and pool.offset <= at < stop:
                    opened.peers.append(self._pool.open(fd, pool.nbytes))
                    opened.runs.append(_Run(opened.peers[-1], pool, at, stop - at))
                    at = stop
            if at < end:
                raise RunnerError(f"no process of the other instance has byte {at} of blocks")
        except BaseException:
            self._close(opened)
            raise
        self._sources[source] = opened

    def _check_pool(self, pool: PoolExport) -> None:
        pool.check()
        if pool.kind != self._pool.kind or pool.block != self._own.block:
            problem = f"{pool.kind} memory with blocks of {pool.block} bytes"
            raise RunnerError(f"the other instance has {problem}, this one {self._pool.kind}, {self._own.block}")

    async def close_source(self, source: bytes) -> None:
        opened = self._sources.pop(source, None)
        if opened is None:
            return
        if opened.pulls:
            await wait_within(list(opened.pulls), _IDLE_S)
        if opened.pulls:
            # the memory stays mapped: the device may still read it
            raise DeadlineExceeded("copies from another instance", _IDLE_S)
        self._close(opened)

    def _close(self, opened: _Source) -> None:
        while opened.peers:
            self._pool.close_peer(opened.peers.pop())

    def pull(self, pull: BlockPull) -> asyncio.Future[list[int]]:
        opened = self._sources.get(pull.source)
        if opened is None:
            return failed(RunnerError("blocks of an instance that is not open"))
        try:
            theirs = _numbers(pull.theirs, opened.num_blocks, "of the other instance")
            ours = _numbers(pull.ours, self._own.num_blocks, "of this one")
            if len(theirs) != len(ours) or len(set(pull.ours)) < len(ours):
                raise RunnerError(f"{len(theirs)} blocks go to {len(ours)} places, or two to one")
            self._check(pull)
        except (RunnerError, InvariantBroken) as error:
            return failed(RunnerError(str(error)))
        copies = [
            Copies(
                run.peer,
                theirs * run.pool.stride + run.pool.place(run.offset),
                ours * self._own.stride + self._own.place(run.offset),
                np.full(len(ours), run.nbytes, np.int64),
            )
            for run in opened.runs
        ]
        copied = self._pool.launch(copies, [self._summed(ours, self._own.held_offset, self._own.held)])
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        opened.pulls[done] = None
        copied.add_done_callback(partial(self._pulled, opened, pull, done))
        return done

    def _pulled(
        self, opened: _Source, pull: BlockPull, done: asyncio.Future[list[int]], copied: asyncio.Future[list[int]]
    ) -> None:
        del opened.pulls[done]
        if not copied.cancelled() and copied.exception() is None:
            self._on_pulled(pull)
        pass_on(copied, done, RunnerError("the pool was closed"))

    def sums(self, blocks: Sequence[int]) -> asyncio.Future[list[int]]:
        try:
            ours = _numbers(blocks, self._own.num_blocks, "of this one")
        except RunnerError as error:
            return failed(error)
        return self._pool.launch([], [self._summed(ours, self._own.offset, self._own.part)])

    def _summed(self, blocks: NDArray[np.int64], offset: int, nbytes: int) -> Sums:
        return Sums(blocks * self._own.stride + self._own.place(offset), nbytes, offset)

    async def aclose(self) -> None:
        """Wait, bounded, for what is in flight, and unmap all peers; idempotent. Raises DeadlineExceeded."""
        await self._pool.aclose()
        while self._sources:
            self._close(self._sources.popitem()[1])


def _numbers(blocks: Sequence[int], count: int, whose: str) -> NDArray[np.int64]:
    """Block numbers as an array. Raises RunnerError for a block that does not exist."""
    wrong = next((block for block in blocks if not 0 <= block < count), None)
    if wrong is not None:
        raise RunnerError(f"there is no block {wrong} {whose}: it has {count}")
    return np.array(blocks, np.int64)
